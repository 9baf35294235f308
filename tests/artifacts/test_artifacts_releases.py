"""Files of another release of litert-torch, loaded with the module that they were made from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fixtures.models import ResidualNet, samples, seeded
from pytest_edgeq import Edgeq
from tests.bench.detection.edits import edited, ops_of
from tests.bench.detection.flatfile import FlatFile
from tests.localize.builds import blamed

FILES = Path(__file__).parents[2] / "fixtures" / "tflite" / "litert_torch_0_9_4"
FLOWS = ("float", "pt2e_static_int8", "recipe_static_wi8_ai8", "recipe_dynamic_wi8_afp32")


@pytest.fixture(scope="module")
def maker() -> Edgeq:
    """Load files."""
    return Edgeq()


@pytest.mark.parametrize("flow", FLOWS)
def test_a_sound_file_of_another_release_passes(maker: Edgeq, flow: str) -> None:
    """Release 0.9.4 writes a spatial mean as SUM, and 1/N goes into the weights behind it."""
    content = (FILES / f"{flow}.tflite").read_bytes()
    assert ops_of(FlatFile(content), "SUM")
    loaded = maker.load(content, reference=seeded(ResidualNet))

    with pytest.warns(UserWarning, match="baselines were not checked"):
        maker.check(loaded, list(samples(ResidualNet, 6, seed=3)))


def _zeroed(values: np.ndarray) -> None:
    values[1] = 0


def _negated(values: np.ndarray) -> None:
    values[1] = -values[1]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("change", [_zeroed, _negated])
@pytest.mark.parametrize("name", ["CONV_2D", "FULLY_CONNECTED"])
@pytest.mark.parametrize("flow", FLOWS)
def test_a_defect_in_a_file_of_another_release_is_found(
    maker: Edgeq, flow: str, name: str, change: Callable[[np.ndarray], None]
) -> None:
    """Also in the layer whose weights are not torch's."""
    file = FlatFile((FILES / f"{flow}.tflite").read_bytes())
    op = ops_of(file, name)[-1]
    edited(file, op, 1, change)
    loaded = maker.load(file.content(), reference=seeded(ResidualNet))

    errors = maker.localize(loaded, list(samples(ResidualNet, 6, seed=3)))
    assert set(blamed(errors)) == {op}, errors
