"""Sums of float64 that do not depend on the order of the samples or the number of cores."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]

_CHUNK = 8192
"""OpenBLAS uses threads from 10 000 elements on, and its sum then depends on their number."""


def total(values: Iterable[float]) -> float:
    """Return the correctly rounded sum; NaN if it is not finite, so that it fails every bound."""
    try:
        found = math.fsum(values)
    except (OverflowError, ValueError):
        return math.nan
    return found if math.isfinite(found) else math.nan


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
