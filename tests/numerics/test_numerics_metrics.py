"""Every formula at its ordinary and at its degenerate places."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_edgeq.numerics.metrics import (
    Side,
    cosine_similarity,
    dot,
    lsb_error,
    sqnr_db,
    top1_counts,
    total,
)

POWERS = st.floats(1e-30, 1e30)


@pytest.mark.parametrize(
    ("signal", "noise", "expected"),
    [
        (100.0, 1.0, 20.0),
        (1.0, 0.0, math.inf),
        (0.0, 1.0, -math.inf),
        (1e300, 1e-300, 6000.0),  # the ratio does not fit a float64
        (0.0, 0.0, math.nan),  # nothing tested
        *((value, 1.0, math.nan) for value in (math.nan, math.inf)),
        *((1.0, value, math.nan) for value in (math.nan, math.inf)),
    ],
)
def test_sqnr(signal: float, noise: float, expected: float) -> None:
    """10·log10 of the ratio, +inf without noise, −inf without signal; NaN without an answer."""
    np.testing.assert_equal(sqnr_db(signal, noise), expected)


@given(POWERS, POWERS, st.integers(-20, 20))
def test_sqnr_does_not_depend_on_the_unit(signal: float, noise: float, exponent: int) -> None:
    """There is no epsilon: the same model in another unit has the same SQNR."""
    factor = 2.0**exponent
    assert sqnr_db(signal * factor, noise * factor) == sqnr_db(signal, noise)


@pytest.mark.parametrize(
    ("sums", "expected"),
    [
        ((-6.0, 4.0, 9.0, 25.0), -1.0),
        ((0.1 + 0.2, 0.1 + 0.2, 0.1 + 0.2, 0.0), 1.0),
        ((1.0 + 1e-15, 1.0, 1.0, 1e-16), 1.0),
        ((0.0, 0.0, 9.0, 9.0), 0.0),
    ],
)
def test_cosine(sums: tuple[float, float, float, float], expected: float) -> None:
    """Cosine is 1.0 for equal sides, 0.0 where one is all zero, and never beyond ±1."""
    assert cosine_similarity(*sums) == expected


@given(
    st.integers(-128, 127),
    st.integers(-128, 127),
    st.integers(-128, 127),
    st.floats(2.0**-20, 100.0, width=32),
)
def test_lsb_error_of_codes_is_whole(left: int, right: int, zero_point: int, scale: float) -> None:
    """Codes that differ by k are k LSB apart, whatever float32 makes of the dequantized values."""
    step = np.float32(scale)
    values = [float(np.float32(code - zero_point) * step) for code in (left, right)]
    error = lsb_error(abs(values[0] - values[1]), scale, max(map(abs, values)))
    assert error == abs(left - right)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_lsb_error_of_a_bad_scale_is_nan(scale: float) -> None:
    """A scale that is none gives no number that could pass."""
    assert math.isnan(lsb_error(0.0, scale, 0.0))


@pytest.mark.parametrize(
    ("reference", "actual", "expected"),
    [
        ([[1, 2], [2, 1]], [[0, 9], [9, 0]], (2, 2)),
        ([[1, 2], [2, 1]], [[9, 0], [9, 0]], (1, 2)),
        ([[1, 2, 2]], [[0, 0, 5]], (1, 1)),  # a tie in the reference: either is right
        ([[1, 2]], [[5, 5]], (0, 1)),  # a tie in actual: the first decides, here the wrong one
        ([[1], [2]], [[1], [2]], (0, 0)),
        ([1, 2], [1, 2], (0, 0)),  # of another rank the last axis may be anything
        ([[[1, 2], [3, 4]]], [[[1, 2], [3, 4]]], (0, 0)),
    ],
)
def test_top1(reference: Any, actual: Any, expected: tuple[int, int]) -> None:
    """A row agrees when actual's first maximum is among the reference's maxima."""
    assert top1_counts(Side(np.array(reference)), Side(np.array(actual))) == expected


def test_total_keeps_what_plain_addition_loses() -> None:
    """In any order; what is not finite is NaN, which fails every bound."""
    assert total([1e16, 1.0, -1e16]) == total([1.0, 1e16, -1e16]) == 1.0
    for values in ([1.0, math.inf], [math.inf, -math.inf], [1.7e308, 1.7e308]):
        assert math.isnan(total(values))


def test_dot_in_chunks_is_dot() -> None:
    """Beyond one chunk, with a rest and without, the result is the sum of products."""
    for size in (0, 5, 8192, 20000):
        left = np.arange(size, dtype=np.float64) % 7
        assert dot(left, left) == float(sum(int(x) ** 2 for x in left))
