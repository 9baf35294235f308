"""Files that several tests of `pytest_edgeq.tflite` look at."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pytest_edgeq import litert


class _Mixed(nn.Module):
    """Embedding, linear layers and both kinds of matrix products, 64 wide for blocks of 32."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(32, 64), nn.Linear(64, 64)
        self.conv, self.w = nn.Conv2d(1, 8, 3), nn.Parameter(torch.randn(2, 64, 8))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.linear(self.table(ids)))
        scores = torch.bmm(x, x.transpose(1, 2))
        image = self.conv(scores[:, None])
        y: torch.Tensor = torch.bmm(x, self.w).mean() + image.mean()
        return y


def _quantized(rules: list[dict[str, Any]]) -> bytes:
    source = _source()
    ids = {"args_0": np.arange(32, dtype=np.int32).reshape(2, 16)}
    ranges = litert.calibrate_recipe(source, rules, {litert.SIGNATURE: [ids]}, threads=1)
    return litert.quantize_recipe(source, rules, ranges)


@functools.cache
def _source() -> bytes:
    torch.manual_seed(0)
    return litert.convert(
        {litert.SIGNATURE: litert.Traced(_Mixed().eval(), (torch.arange(32).reshape(2, 16),))}
    )


@functools.cache
def _by_recipe(recipe: str) -> bytes:
    if recipe == "float":
        return _source()
    if recipe == "float16":
        # The recipe that ai-edge-quantizer has no ready-made list for.
        config = {
            "weight_tensor_config": {
                "num_bits": 16,
                "symmetric": True,
                "granularity": "TENSORWISE",
                "dtype": "FLOAT",
            },
            "compute_precision": "FLOAT",
            "explicit_dequantize": True,
        }
        rule = {
            "regex": ".*",
            "operation": "FULLY_CONNECTED",
            "algorithm_key": "float_casting",
            "op_config": config,
        }
        return _quantized([rule, rule | {"operation": "CONV_2D"}])
    os.environ.setdefault("LITERT_TORCH_SHOW_PROGRESS", "n")
    from ai_edge_quantizer import recipe as recipes

    return _quantized(getattr(recipes, recipe)())


@pytest.fixture(scope="session")
def by_recipe() -> Callable[[str], bytes]:
    """One model, converted once, by the name of an ai-edge-quantizer recipe."""
    return _by_recipe
