"""Files that would end the process, or be computed by chance, are refused, and only those."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from fixtures.models import CausalMask, samples, seeded
from fixtures.tflite.writer import one_op
from pytest_edgeq import Edgeq
from pytest_edgeq.runtimes.edge import EdgeFile
from tests.tflite.one_op_files import RESOLVERS, run

CHANNELS = 64


def _refusal(content: bytes) -> str:
    try:
        EdgeFile(content).runner("builtin")
    except RuntimeError as error:
        return str(error)
    return ""


def test_an_output_that_was_zero_in_calibration_is_told_from_a_mask() -> None:
    """No value is huge: the output's scale is tiny."""
    side = {"dtype": "int8", "scales": [0.5]}
    content = one_op("ADD", [side, side], [dict(side, scales=[1e-12])], "AddOptions")

    text = _refusal(content)

    assert "Such an output was zero or nearly zero in every sample of the calibration" in text
    assert "mask" not in text


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["recipe_static_wi8_ai8", "recipe_static_wi8_ai16"])
def test_an_infinite_mask_under_a_static_recipe_is_refused(maker: Edgeq, recipe: str) -> None:
    """What brings such scales about: ai-edge-quantizer takes the clamped −inf for a range."""
    with pytest.raises(RuntimeError, match=r"(?s)ADD .*an attention mask of -inf"):
        maker.quantize(
            seeded(CausalMask),
            CausalMask.sample_inputs(),
            quantizer=recipe,
            calibration=samples(CausalMask, 8),
        )


def _depthwise(n_scales: int, *, axis: int = 0, dtype: str = "float32") -> bytes:
    """Write a DEPTHWISE_CONV_2D that doubles each channel, by integer weights."""
    shape = (1, 1, 1, CHANNELS)
    data = {"dtype": dtype, "shape": shape, "scales": [1.0] if dtype != "float32" else []}
    weight = {
        "dtype": "int8",
        "shape": shape,
        "data": np.full(shape, 127, np.int8),
        "scales": [2 / 127] * n_scales,
        "axis": axis,
    }
    bias = {"dtype": "float32", "shape": (CHANNELS,), "data": np.zeros(CHANNELS, np.float32)}
    if dtype != "float32":
        bias |= {"dtype": "int32", "data": np.zeros(CHANNELS, np.int32), "scales": [2 / 127]}
    return one_op(
        "DEPTHWISE_CONV_2D",
        [data, weight, bias],
        [data],
        "DepthwiseConv2DOptions",
        strideH=1,
        strideW=1,
        depthMultiplier=1,
    )


def _run(content: bytes, runtime: str) -> npt.NDArray[np.float32]:
    """Run a file on ones, past our own checks."""
    made = run(content, runtime, [np.ones((1, 1, 1, CHANNELS), np.float32)])
    assert made is not None
    return made[0]


@pytest.mark.parametrize("runtime", RESOLVERS)
def test_kernels_still_read_past_the_one_scale(runtime: str) -> None:
    """ai-edge-litert 2.3.0: what lies behind it is no 2/127, for not one channel of many."""
    sound, past = _run(_depthwise(CHANNELS, axis=3), runtime), _depthwise(1)

    # The ones become codes of 8 bits: half a step of 1/127, doubled.
    np.testing.assert_allclose(sound, 2, atol=1 / 127)
    assert not np.abs(_run(past, runtime) - 2).max() < 0.5


def _two_bits(dtype: str) -> bytes:
    """Write a CONV_2D whose output is the sum of its input's channels, by weights of 1."""
    per_byte = {"int2": 4, "int4": 2, "int8": 1}[dtype]
    packed = np.full(CHANNELS // per_byte, sum(1 << 8 // per_byte * i for i in range(per_byte)))
    weight = {"dtype": dtype, "shape": (1, 1, 1, CHANNELS), "scales": [1.0]}
    return one_op(
        "CONV_2D",
        [
            {"dtype": "float32", "shape": (1, 1, 1, CHANNELS)},
            weight | {"data": packed.astype(np.uint8)},
            {"dtype": "float32", "shape": (1,), "data": np.zeros(1, np.float32)},
        ],
        [{"dtype": "float32", "shape": (1, 1, 1, 1)}],
        "Conv2DOptions",
        strideH=1,
        strideW=1,
    )


@pytest.mark.parametrize("runtime", RESOLVERS)
def test_kernels_still_do_not_unpack_two_bits(runtime: str) -> None:
    """ai-edge-litert 2.3.0: four weights of 1 in a byte are 85 of 256."""
    # Ones become codes of 8 bits exactly.
    np.testing.assert_allclose(_run(_two_bits("int4"), runtime), CHANNELS, rtol=1e-5)
    assert not np.abs(_run(_two_bits("int2"), runtime) - CHANNELS).max() < CHANNELS


_TENSORFLOW = pytest.param("tensorflow", marks=pytest.mark.slow)


@pytest.mark.parametrize("runtime", ["xnnpack", "builtin", "reference", "compiled", _TENSORFLOW])
def test_such_files_are_refused(runtime: str) -> None:
    """Only those: not of a scale for each channel, of integers throughout, or of other widths."""
    for sound in (
        *(_two_bits("int4"), _two_bits("int8")),
        *(_depthwise(CHANNELS, axis=3), _depthwise(1, dtype="int8")),
    ):
        EdgeFile(sound).runner(runtime)
    place = rf"(?s)the {runtime} runtime cannot load "
    with pytest.raises(RuntimeError, match=place + ".*CONV_2D #0.*weights are int2"):
        EdgeFile(_two_bits("int2")).runner(runtime)
    text = f".*DEPTHWISE_CONV_2D #0.*one scale for {CHANNELS} channels"
    with pytest.raises(RuntimeError, match=place + text):
        EdgeFile(_depthwise(1)).runner(runtime)
