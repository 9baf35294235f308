"""
CREPE-tiny, a pitch tracker, in static int8: does it still hear the right note?

A metric of the task (cents) beside the metrics of the arithmetic, and a graph that int8 does not
take whole: batch norm after ReLU cannot be folded, so it stays in float between borders.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from fixtures.crepe import cents_between, pitch_hz, sine_frames
from pytest_edgeq import (
    Budget,
    assert_input_dtypes,
    assert_no_float_ops,
    assert_op_counts,
    assert_op_dtypes,
    assert_output_dtypes,
    assert_within_budget,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

    from pytest_edgeq import Edgeq, QuantizedModel

pytestmark = pytest.mark.slow

PITCHES_HZ = (110.0, 220.0, 440.0, 880.0)
FRAMES = 8

# Half a bin of the network's own grid, and about what a listener can tell apart.
# Measured at worst: float 7.9 cents (at 220 Hz, any phase), int8 8.0.
MAX_CENTS = 10.0

# What quantization may add to it: a tenth of a bin. Measured 0.9 cents at worst (880 Hz).
MAX_CENTS_FROM_FLOAT = 2.0


def calibration() -> Iterator[Tensor]:
    """Sines in steps of a major third from 65 to 825 Hz, none of them at an evaluated pitch."""
    for step in range(12):
        yield from sine_frames(65.0 * 2.0 ** (step / 3.0), 2, first_phase=0.3)


@pytest.fixture(scope="module")
def static(edgeq: Edgeq, crepe_tiny: nn.Module) -> QuantizedModel:
    """CREPE-tiny in static int8."""
    return edgeq.quantize(
        crepe_tiny,
        tuple(sine_frames(440.0, 1)),
        quantizer="pt2e_static_int8",
        calibration=calibration(),
        name="crepe_tiny",
    )


@pytest.mark.parametrize("frequency_hz", PITCHES_HZ)
def test_crepe_int8_tells_the_pitch(
    static: QuantizedModel, crepe_tiny: nn.Module, frequency_hz: float
) -> None:
    """Within MAX_CENTS of the note and MAX_CENTS_FROM_FLOAT of what float says, in any phase."""
    for frame in sine_frames(frequency_hz, FRAMES):
        edge_hz = pitch_hz(static.run(frame)["output_0"])
        with torch.no_grad():
            float_hz = pitch_hz(crepe_tiny(frame).numpy())
        assert abs(cents_between(edge_hz, frequency_hz)) <= MAX_CENTS
        assert abs(cents_between(edge_hz, float_hz)) <= MAX_CENTS_FROM_FLOAT


def test_crepe_int8_stays_within_budget(edgeq: Edgeq, static: QuantizedModel) -> None:
    """Measured 36.5 dB, worst frame 32.7 dB; less 2 dB, noise power 1.6 times as high."""
    frames = (frame for hz in PITCHES_HZ for frame in sine_frames(hz, FRAMES))
    comparison = edgeq.compare(static, frames)
    assert comparison.total.n_samples == FRAMES * len(PITCHES_HZ)
    assert_within_budget(comparison, Budget(sqnr_db=34.5, worst_sample_sqnr_db=30.5))


def test_crepe_int8_convolves_in_int8(static: QuantizedModel) -> None:
    """Six convolutions and the head; the first has one input channel, which makes it depthwise."""
    assert_input_dtypes(static, "int8")
    assert_output_dtypes(static, "int8")
    for op, count in {"CONV_2D": 5, "DEPTHWISE_CONV_2D": 1, "FULLY_CONNECTED": 1}.items():
        assert_op_dtypes(
            static, op, input="int8", weight="int8", bias="int32", output="int8", count=count
        )


def test_crepe_int8_normalises_in_float(static: QuantizedModel) -> None:
    """
    What int8 does not take: six batch norms after their ReLU, each between two borders.

    That it is these and no others is what the test holds; a release that folds them fails it.
    """
    assert_no_float_ops(static, allow=("ADD", "MUL", "SUB"))
    assert_op_counts(static, {"DEQUANTIZE": 6, "QUANTIZE": 6, "MUL": 12, "SUB": 6, "ADD": 6})
