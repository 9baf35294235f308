"""
Sums that come out the same, bit for bit, however the samples were split over processes.

Floating-point addition is not associative: (0.1 + 0.2) + 0.3 != 0.1 + (0.2 + 0.3).
A budget that passes in one process and fails under ``-n 2`` would be blamed on the model,
so pooled sums are kept exactly.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]

_UNIT_BITS = 1074
"""Every finite float64 is a whole number of 2**-1074, the smallest subnormal."""

_CHUNK = 8192
"""OpenBLAS uses threads from 10 000 elements on, and its sum then depends on their number."""


class ExactSum:
    """
    A running sum of float64 without any rounding, in memory that does not grow.

    The sum is one integer that counts units of 2**-1074 (at most some 2100 bits and the carries),
    so adding and merging are integer additions, exact and in any order. Only `value` rounds, once.
    """

    __slots__ = ("_overflowed", "_units")

    def __init__(self) -> None:
        self._units = 0
        self._overflowed = False

    def add(self, value: float) -> None:
        """Add one float. One that is not finite makes the sum NaN for good, so that it fails."""
        if not math.isfinite(value):
            self._overflowed = True
            return
        numerator, denominator = value.as_integer_ratio()
        self._units += numerator << (_UNIT_BITS + 1 - denominator.bit_length())

    def merge(self, other: ExactSum) -> None:
        """Add all that another sum holds."""
        self._units += other._units
        self._overflowed |= other._overflowed

    def value(self) -> float:
        """Return the sum, correctly rounded; NaN where it does not fit a float64."""
        if self._overflowed:
            return math.nan
        try:
            return self._units / (1 << _UNIT_BITS)
        except OverflowError:
            return math.nan


def dot(left: Array, right: Array) -> float:
    """
    Return the sum of products of two flat float64 arrays of the same length.

    Summed in chunks that BLAS does on one thread: the number of cores must not show in the figures.
    """
    whole = left.size // _CHUNK * _CHUNK
    if not whole:
        return float(np.dot(left, right))
    shape = (-1, _CHUNK)
    chunks = np.vecdot(left[:whole].reshape(shape), right[:whole].reshape(shape))
    return float(chunks.sum() + np.dot(left[whole:], right[whole:]))
