"""Count the rows of an output behind a choice that are those of the reference."""

from __future__ import annotations

import numpy as np

from .sums import Array

_SPREAD = 0.25
"""
Difference of two rows that are the same choice, as a share of the spread of a column.

Of a sound file, 20 dB SQNR, it is 2.5 standard deviations of the error; of two rows drawn at
random one in seven is so near in one column, and one in 2,500 in four.
"""


def match_counts(reference: Array, actual: Array) -> tuple[int, int]:
    """
    Count the rows of an output behind a choice, and those that are the reference's.

    A row is the last axis, as the coordinates of a box; of an array of one row, of integers and of
    bools it is an element. It matches where all whole numbers in it, such as a class, are equal,
    and all others within a quarter of the standard deviation of their column.

    Returns:
        Matching rows and all rows.
    """
    if not reference.size:
        return 0, 0
    if reference.dtype.kind != "f":
        return int(np.count_nonzero(reference == actual)), reference.size
    length = reference.shape[-1] if reference.ndim else 1
    width = length if reference.size > length else 1
    wanted, got = (each.reshape(-1, width).astype(np.float64) for each in (reference, actual))
    whole = (wanted == np.rint(wanted)).all(axis=0)
    spread = wanted.std(axis=0)
    tolerance = _SPREAD * np.where(spread > 0, spread, np.abs(wanted).max(axis=0))
    near = np.abs(got - wanted) <= np.where(whole, 0.5, tolerance)
    return int(np.count_nonzero(near.all(axis=1))), len(wanted)
