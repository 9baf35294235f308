"""Sums that do not depend on how samples were split."""

from __future__ import annotations

import math
import pickle

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pytest_edgeq.numerics.sums import ExactSum, dot

FLOATS = st.floats(allow_nan=False, allow_infinity=False)


def exact(values: list[float]) -> ExactSum:
    """Return the sum that has seen the values."""
    total = ExactSum()
    for value in values:
        total.add(value)
    return total


@given(st.lists(st.floats(-1e300, 1e300)))
def test_value_is_that_of_fsum(values: list[float]) -> None:
    """The sum is correctly rounded, as math.fsum's is."""
    assert exact(values).value() == math.fsum(values)


@given(st.lists(FLOATS), st.lists(FLOATS))
def test_merge_is_one_pass_in_any_order(left: list[float], right: list[float]) -> None:
    """Two halves merged, either way around, are one pass."""
    forth, back = exact(left), exact(right)
    forth.merge(exact(right))
    back.merge(exact(left))
    expected = exact(left + right).value()
    assert repr(forth.value()) == repr(back.value()) == repr(expected)


def test_plain_addition_would_differ() -> None:
    """The sum keeps what float addition loses."""
    assert exact([1e16, 1.0, -1e16]).value() == 1.0
    assert 1e16 + 1.0 - 1e16 != 1.0


def test_overflow_is_nan_for_good() -> None:
    """Infinity added, or a sum beyond float64, reads NaN, which fails every bound."""
    infinite = exact([1.0, math.inf])
    merged = exact([1.0])
    merged.merge(infinite)
    assert math.isnan(infinite.value())
    assert math.isnan(merged.value())
    assert math.isnan(exact([1.7e308, 1.7e308]).value())


def test_sum_travels_between_processes() -> None:
    """A pickled sum is the same sum."""
    assert pickle.loads(pickle.dumps(exact([0.1, 0.2]))).value() == exact([0.1, 0.2]).value()


def test_dot_in_chunks_is_dot() -> None:
    """Beyond one chunk, with a rest and without, the result is the sum of products."""
    for size in (0, 5, 8192, 20000):
        left = np.arange(size, dtype=np.float64) % 7
        assert dot(left, left) == float(sum(int(x) ** 2 for x in left))
