"""Files that several tests of `pytest_edgeq.tflite` look at."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import numpy as np
import pytest

from fixtures.tflite import make
from pytest_edgeq import litert
from tests.quantize.rules import float16


@functools.cache
def _by_recipe(recipe: str) -> bytes:
    source = make.MIXED.read_bytes()
    if recipe == "float":
        return source
    os.environ.setdefault("LITERT_TORCH_SHOW_PROGRESS", "n")
    from ai_edge_quantizer import recipe as recipes

    # The library has no ready-made list for float16.
    rules = [float16(operation) for operation in ("FULLY_CONNECTED", "CONV_2D")]
    if recipe != "float16":
        rules = getattr(recipes, recipe)()
    ids = {"args_0": np.arange(32, dtype=np.int32).reshape(2, 16)}
    ranges = litert.calibrate_recipe(source, rules, {litert.SIGNATURE: [ids]}, threads=1)
    return litert.quantize_recipe(source, rules, ranges)


@pytest.fixture(scope="session")
def by_recipe() -> Callable[[str], bytes]:
    """One stored model, by the name of an ai-edge-quantizer recipe."""
    return _by_recipe
