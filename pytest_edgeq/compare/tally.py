"""Counts of samples: measured, different, and known from the calibration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from pytest_edgeq.compare.measurement import Arrays
from pytest_edgeq.numerics.checks import Calibration
from pytest_edgeq.numerics.samples import EvaluatedLedger, SampleLedger

_NOTHING = (math.inf, -math.inf)  # the range of no values


class Tally:
    """Counts of samples, of different ones, and of calibration samples; mergeable."""

    def __init__(self) -> None:
        self.evaluated = EvaluatedLedger()
        # the least and the greatest finite value of each input
        self.ranges: list[tuple[float, float]] = []
        self._count = self._overlap = 0

    def add(self, index: int, arrays: Arrays, ledger: SampleLedger) -> None:
        """Count one sample."""
        digest = self.evaluated.add(index, arrays)
        self._widen([_range(np.asarray(array)) for array in arrays])
        self._overlap += ledger.knows(digest)
        self._count += 1

    def merge(self, other: Tally) -> None:
        """Add the counts of another tally."""
        self.evaluated.merge(other.evaluated)
        self._widen(other.ranges)
        self._overlap += other._overlap
        self._count += other._count

    def _widen(self, ranges: Sequence[tuple[float, float]]) -> None:
        pairs = zip(self.ranges or ranges, ranges or self.ranges, strict=True)
        self.ranges = [(min(one[0], two[0]), max(one[1], two[1])) for one, two in pairs]

    @property
    def calibration(self) -> Calibration:
        """How the counted samples relate to those of the calibration."""
        return Calibration(self._count, self._overlap)


def _range(array: np.ndarray[Any, Any]) -> tuple[float, float]:
    least, greatest = (float(array.min()), float(array.max())) if array.size else _NOTHING
    if not (math.isfinite(least) and math.isfinite(greatest)):
        array = array[np.isfinite(array)]
        return (float(array.min()), float(array.max())) if array.size else _NOTHING
    return least, greatest
