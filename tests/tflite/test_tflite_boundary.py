"""Crossing the border: floats to codes at the inputs, codes to floats at the outputs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fixtures.tflite.writer import one_op
from pytest_edgeq.tflite.boundary import code_range, decode, encode
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.subgraph import SignatureTensor

# More code points in one run, the same in every run.
derandomized = settings(derandomize=True, deadline=None, max_examples=200)


def _border(
    dtype: str,
    scales: tuple[float, ...] = (),
    zero_points: tuple[int, ...] | None = None,
    *,
    shape: tuple[int, ...] = (1, 4),
    axis: int = 0,
) -> SignatureTensor:
    # An op of a later release: the interpreter does not look at the parameters then.
    given = {"dtype": dtype, "shape": shape, "axis": axis}
    given |= {"scales": np.ones_like(scales), "zero_points": zero_points}
    border = OpGraph.read(one_op("9999", [given], [given])).signatures[0].inputs[0]
    # Not written into the file, which is refused where they make no sense.
    tensor = dataclasses.replace(border.tensor, scales=np.array(scales, np.float32))
    return dataclasses.replace(border, tensor=tensor)


def _encode(values: Any, border: SignatureTensor) -> list[int]:
    codes: list[int] = encode(np.asarray(values, np.float32), border).tolist()
    return codes


def test_halves_are_rounded_to_even() -> None:
    """As torch and numpy do; rounding away from zero would give 1, 2, 3. The sample stays."""
    for dtype in ("float16", "float32", "float64"):
        array = np.array([0.5, 9, 1.5, 9, 2.5, 9, -0.5, 9, -1.5, 9], dtype)
        before = array.copy()
        codes = encode(array[::2], _border("int8", (1.0,)))
        assert codes.tolist() == [0, 2, 2, 0, -2]
        assert codes.flags.c_contiguous
        assert np.array_equal(array, before)
    # The zero point comes after rounding: an odd one must not turn the halves.
    assert _encode([0.5, 1.5, 2.5], _border("int8", (1.0,), (1,))) == [1, 3, 3]


@pytest.mark.parametrize(
    ("dtype", "zero_point"), [("int8", 5), ("uint8", 128), ("int16", 0), ("int32", -7)]
)
def test_what_lies_outside_is_clipped(dtype: str, zero_point: int) -> None:
    """To the range of the dtype, infinity and what float32 can just hold included."""
    low, high = code_range(dtype)
    values = [math.inf, -math.inf, 3e38, -3e38, 0]
    assert _encode(values, _border(dtype, (1e-3,), (zero_point,))) == [
        high,
        low,
        high,
        low,
        zero_point,
    ]


def test_nan_is_refused() -> None:
    """It has no code: cast to an integer it would become one without a word."""
    with pytest.raises(ValueError, match=r"'t0' holds 2 NaN, which has no code in int8"):
        _encode([math.nan, 0, math.nan], _border("int8", (1.0,)))
    kept = encode(np.array([math.nan], np.float32), _border("float32"))
    assert math.isnan(kept[0])


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_a_scale_that_is_none_is_refused(scale: float) -> None:
    """Division by it gives codes that look sound."""
    border = _border("int8", (scale,))
    with pytest.raises(ValueError, match="a scale is greater than 0 and finite"):
        _encode([0, 1], border)
    with pytest.raises(ValueError, match="a scale is greater than 0 and finite"):
        decode(np.zeros(2, np.int8), border)


def test_one_scale_a_channel() -> None:
    """Along the quantized dimension, at both borders."""
    border = _border("int8", (1, 2, 4), (0, 1, 2), shape=(2, 3), axis=1)
    codes = encode(np.array([[4, 4, 4], [8, 8, 8]], np.float32), border)
    assert codes.tolist() == [[4, 3, 3], [8, 5, 4]]
    assert decode(codes, border).tolist() == [[4, 4, 4], [8, 8, 8]]
    rows = _border("int8", (1, 2), shape=(2, 3), axis=0)
    assert encode(np.full((2, 3), 4, np.float32), rows).tolist() == [[4] * 3, [2] * 3]


@pytest.mark.parametrize(
    ("dtype", "zero_point", "code", "value"),
    [
        ("uint8", 128, 0, -128),
        ("uint8", 0, 255, 255),
        ("int8", 127, -128, -255),
        ("int8", -128, 127, 255),
        ("int16", -32768, 32767, 65535),
        ("int32", -(2**31), 2**31 - 1, 2**32 - 1),
        ("int32", 2**24 + 1, 2**24 + 2, 1),
    ],
)
def test_a_code_minus_a_zero_point_does_not_wrap(
    dtype: str, zero_point: int, code: int, value: float
) -> None:
    """In the code's own dtype 0 − 128 is 128 for uint8."""
    border = _border(dtype, (1.0,), (zero_point,))
    decoded = decode(np.array([code], dtype), border)
    assert decoded.dtype == np.float32
    assert decoded.tolist() == [np.float32(value)]


@derandomized
@given(
    dtype=st.sampled_from(["int8", "uint8", "int16"]),
    scale=st.floats(2**-20, 2**10, width=32),
    data=st.data(),
)
def test_every_code_survives_the_way_out_and_in(
    dtype: str, scale: float, data: st.DataObject
) -> None:
    """Code to float to code is the identity: no code is lost, none is shifted."""
    low, high = code_range(dtype)
    border = _border(dtype, (scale,), (data.draw(st.integers(low, high)),))
    codes = np.array(data.draw(st.lists(st.integers(low, high), min_size=1)), dtype)
    assert encode(decode(codes, border), border).tolist() == codes.tolist()


@derandomized
@given(
    scale=st.floats(2**-13, 2**7, width=32),
    zero_point=st.integers(-128, 127),
    values=st.lists(st.floats(-1e3, 1e3, width=32), min_size=1),
)
def test_a_value_in_range_comes_back_within_half_a_step(
    scale: float, zero_point: int, values: list[float]
) -> None:
    """The definition of quantization; what was clipped comes back as the end of the range."""
    border = _border("int8", (scale,), (zero_point,))
    given_values = np.array(values, np.float32)
    low, high = (scale * (end - zero_point) for end in code_range("int8"))
    back = decode(encode(given_values, border), border)
    slack = 1e-5 * max(abs(low), abs(high))
    assert np.all(np.abs(back - np.clip(given_values, low, high)) <= scale / 2 + slack)


@pytest.mark.parametrize(
    ("dtype", "value", "text"),
    [
        ("float32", np.int64, "expects float32, got int64"),
        ("int32", np.float32, "expects int32, got float32"),
        ("bool", np.float32, "expects bool, got float32"),
        ("int4", np.int8, "is int4, which cannot be given"),
        ("string", np.int8, "is string, which cannot be given"),
        # Codes would be quantized once more.
        ("int8 codes", np.int8, "expects floats, which are quantized to int8"),
    ],
)
def test_dtypes_that_do_not_fit_are_refused(dtype: str, value: Any, text: str) -> None:
    """Floats for integers would be cut, integers for floats are most likely codes."""
    border = _border(dtype.split()[0], (0.5,) if "codes" in dtype else ())
    with pytest.raises(TypeError, match=text):
        encode(np.ones((1, 4), value), border)


@pytest.mark.parametrize(
    ("dtype", "value", "ok"),
    [
        ("int32", 2**31 - 1, True),
        ("int32", 2**31, False),
        ("int32", -(2**31) - 1, False),
        ("uint8", -1, False),
        ("bool", 1, True),
        ("bool", 2, False),
        ("int64", 2**62, True),
    ],
)
def test_integers_are_cast_where_they_fit(dtype: str, value: int, ok: bool) -> None:
    """Torch's int64 ids become int32 in the file; one that wraps would be another id."""
    array = np.array([[0, value]], np.int64)
    if ok:
        encoded = encode(array, _border(dtype))
        assert (encoded.dtype, encoded.tolist()) == (np.dtype(dtype), [[0, value]])
    else:
        with pytest.raises(ValueError, match="cannot hold the values"):
            encode(array, _border(dtype))


def test_a_float_that_becomes_infinite_is_refused() -> None:
    """65,504 is the greatest float16; an infinite sample stays as it is."""
    border = _border("float16")
    with pytest.raises(ValueError, match="cannot hold 1 of the sample's values"):
        encode(np.array([[1, 70_000]], np.float32), border)
    assert encode(np.array([[1, math.inf]], np.float32), border).dtype == np.float16
    assert encode(np.array([[1e300]], np.float64), _border("float64")).tolist() == [[1e300]]


def test_outputs_that_are_not_quantized_come_back_as_they_are() -> None:
    """Only float16 is widened, so that metrics are not computed in it."""
    assert decode(np.array([1.5], np.float16), _border("float16")).dtype == np.float32
    for dtype in ("float32", "int32", "bool", "int64"):
        value = np.ones((1, 4), dtype)
        assert decode(value, _border(dtype)) is value


def test_scales_of_blocks_cannot_be_crossed() -> None:
    """No interpreter has such a border; the text says what it is."""
    border = _border("int8", (0.5,))
    tensor = border.tensor
    object.__setattr__(tensor, "scales", np.empty(0, np.float32))
    object.__setattr__(tensor, "block_scales", 0)
    with pytest.raises(TypeError, match="is quantized multi_axis"):
        decode(np.zeros((1, 4), np.int8), border)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [*((dtype, ()) for dtype in ("float32", "float16", "int32", "int8")), ("int32", (0, 4))],
)
def test_a_scalar_and_an_empty_array_keep_their_shape(dtype: str, shape: tuple[int, ...]) -> None:
    """Shape (1,) is another one to the ops that compute shapes; nothing has no range."""
    border = _border(dtype, (0.5,) if dtype == "int8" else (), shape=shape)
    value = np.full(shape, 2, "int64" if dtype == "int32" else "float32")

    assert encode(value, border).shape == shape
