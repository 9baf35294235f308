"""Sums that do not depend on the order of the samples or the number of cores."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pytest_edgeq.numerics.metrics import dot, total


def test_total_keeps_what_plain_addition_loses() -> None:
    """In any order."""
    assert total([1e16, 1.0, -1e16]) == total([1.0, 1e16, -1e16]) == 1.0
    assert 1e16 + 1.0 - 1e16 != 1.0


@pytest.mark.parametrize("values", [[1.0, math.inf], [math.inf, -math.inf], [1.7e308, 1.7e308]])
def test_what_is_not_finite_is_nan(values: list[float]) -> None:
    """Which fails every bound."""
    assert math.isnan(total(values))


def test_dot_in_chunks_is_dot() -> None:
    """Beyond one chunk, with a rest and without, the result is the sum of products."""
    for size in (0, 5, 8192, 20000):
        left = np.arange(size, dtype=np.float64) % 7
        assert dot(left, left) == float(sum(int(x) ** 2 for x in left))
