"""How far outputs are from the reference, to choose the samples to look at."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .metrics import sqnr_db
from .sums import Array


class Distances:
    """Keeps the greatest distance of each output over the samples."""

    def __init__(self, worst: Sequence[float] | None = None) -> None:
        self.worst = None if worst is None else list(worst)

    @staticmethod
    def between(actual: Sequence[Array], reference: Sequence[Array]) -> list[float]:
        """Return the sum of the squared differences of each output; NaN in one is infinite."""
        return [_distance(one, two) for one, two in zip(actual, reference, strict=True)]

    def exceeds(self, distances: Sequence[float]) -> bool:
        """Add a sample, and return whether an output of it is further off than all before."""
        before = [-1.0] * len(distances) if self.worst is None else self.worst
        self.worst = [max(pair) for pair in zip(distances, before, strict=True)]
        return self.worst != before


def _distance(one: Array, two: Array) -> float:
    with np.errstate(all="ignore"):
        apart = np.where(one == two, 0.0, one.astype(np.float64) - two)
        apart[np.isnan(one) & np.isnan(two)] = 0.0
        total = float(np.square(apart).sum())
    return total if math.isfinite(total) else math.inf


def least_sqnr_db(reference: Sequence[Array], actual: Sequence[Array]) -> float:
    """Return the least SQNR over the outputs of one sample; −inf where shapes differ."""
    least = math.inf
    for expected, got in zip(reference, actual, strict=True):
        if expected.shape != got.shape:
            return -math.inf
        signal = expected.astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            noise = float(np.square(signal - got).sum())
            least = min(least, sqnr_db(float(np.square(signal).sum()), noise))
    return least
