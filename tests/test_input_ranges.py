"""Ranges of inputs: calibrated with others than what is evaluated they are found, by any flow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest
import torch

from fixtures.models import seeded
from pytest_edgeq import Edgeq
from pytest_edgeq.numerics.findings import (
    BIAS_AT_INT32_LIMIT,
    CLIPPED_INPUT,
    COARSE_INPUT,
    INPUT_KINDS,
)
from pytest_edgeq.tflite.ends import quantized_inputs
from tests.bench.detection.nets import Mlp

pytestmark = pytest.mark.figures

STATIC = ("pt2e_static_int8", "recipe_static_wi8_ai8", "recipe_static_wi8_ai16")

Samples = Iterable[torch.Tensor]


def _rows(n: int, seed: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(n):
        yield torch.randn(1, 20, generator=generator)


def _with_an_outlier(rows: Samples) -> Samples:
    first, *rest = rows
    return [1e6 * first, *rest]


CALIBRATIONS: dict[str, tuple[Callable[[Samples], Samples], str]] = {
    "zeros": (lambda rows: [torch.zeros_like(row) for row in rows], CLIPPED_INPUT),
    "0.05 ×": (lambda rows: [0.05 * row for row in rows], CLIPPED_INPUT),
    "outlier": (_with_an_outlier, COARSE_INPUT),
}


@pytest.mark.slow
@pytest.mark.parametrize("flow", STATIC)
def test_a_sound_calibration_has_no_finding(maker: Edgeq, flow: str) -> None:
    """A few samples of the same kind as those evaluated."""
    quantized = maker.quantize(
        seeded(Mlp), Mlp.sample_inputs(), quantizer=flow, calibration=_rows(16, 1)
    )
    assert list(quantized_inputs(quantized.graph, quantized.graph.signatures[0]))
    assert maker.compare(quantized, _rows(16, 2)).health == ()
    errors = maker.localize(quantized, _rows(16, 2))
    assert errors.finding.kind not in INPUT_KINDS


@pytest.mark.sweep(1)
@pytest.mark.parametrize("calibration", CALIBRATIONS)
@pytest.mark.parametrize("flow", STATIC)
def test_another_calibration_is_found(maker: Edgeq, flow: str, calibration: str) -> None:
    """Without a memory, and though what comes out may still look alike."""
    spoilt, expected = CALIBRATIONS[calibration]
    quantized = maker.quantize(
        seeded(Mlp), Mlp.sample_inputs(), quantizer=flow, calibration=spoilt(_rows(16, 1))
    )
    kinds = [finding.kind for finding in maker.compare(quantized, _rows(16, 2)).health]
    assert kinds[0] == expected
    # It explains the others.
    with pytest.raises(AssertionError, match=f"^health: {expected}: input 'args_0': ") as caught:
        maker.check(quantized, _rows(16, 2))
    text = str(caught.value)
    assert "layer to blame" not in text
    assert "stands out" not in text
    # PT2E chooses no scale below 2⁻¹².
    is_empty = calibration == "zeros" and flow.startswith("recipe")
    assert ("\ncause: the calibration samples are zero or nearly zero there" in text) is is_empty
    # A bias that does not fit int32 in such a scale is no defect of its op.
    is_cut = is_empty and flow.endswith("ai8")
    assert (BIAS_AT_INT32_LIMIT in kinds) is is_cut
    cut = "for it\n    cause: explained by [1]\n"
    assert (cut in text) is is_cut
    # Nor is a layer blamed by itself.
    errors = maker.localize(quantized, _rows(16, 2))
    assert errors.culprit is None
    assert (errors.finding.kind, errors.finding.where) == (expected, "input 'args_0'")


def test_an_input_that_stays_in_float_has_no_range(maker: Edgeq) -> None:
    """Nothing is calibrated of a dynamic quantizer."""
    quantized = maker.quantize(
        seeded(Mlp), Mlp.sample_inputs(), quantizer="recipe_dynamic_wi8_afp32"
    )
    assert not list(quantized_inputs(quantized.graph, quantized.graph.signatures[0]))
    assert maker.compare(quantized, (1e6 * row for row in _rows(4, 2))).health == ()
