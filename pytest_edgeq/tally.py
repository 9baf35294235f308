"""How many samples were measured, how many differ, and how many the calibration has seen."""

from __future__ import annotations

from pytest_edgeq.measurement import Arrays
from pytest_edgeq.numerics.calibration import Calibration
from pytest_edgeq.numerics.evaluated import EvaluatedLedger
from pytest_edgeq.numerics.health import SampleLedger

__all__ = ["Tally"]


class Tally:
    """
    Counts samples, the different ones, and those of the calibration; tallies merge.

    Attributes:
        evaluated: Digests of the samples.
    """

    def __init__(self) -> None:
        self.evaluated = EvaluatedLedger()
        self._count = self._overlap = 0

    def add(self, index: int, arrays: Arrays, ledger: SampleLedger) -> None:
        """
        Count one sample.

        Args:
            index: Of the sample, over all processes.
            arrays: Of its inputs.
            ledger: Digests of the calibration samples.
        """
        self.evaluated.add(index, arrays)
        self._overlap += arrays in ledger
        self._count += 1

    def merge(self, other: Tally) -> None:
        """Count what another tally has counted."""
        self.evaluated.merge(other.evaluated)
        self._overlap += other._overlap
        self._count += other._count

    @property
    def calibration(self) -> Calibration:
        """Return how the samples counted relate to those of the calibration."""
        return Calibration(self._count, self._overlap)
