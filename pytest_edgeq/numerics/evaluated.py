"""How many different samples were evaluated, and whether they have any content."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np

from .checks import SampleLedger
from .sums import Array

__all__ = ["NOT_COUNTED", "EvaluatedLedger", "EvaluatedSamples"]


class EvaluatedSamples(NamedTuple):
    """
    The samples that errors were measured on.

    Attributes:
        given: How many there were.
        different: How many of them differ from all before.
        constant: How many of all given are constant: every input has one value in all elements, as
            a black image has.
    """

    given: int = 0
    different: int = 0
    constant: int = 0


NOT_COUNTED: Final = EvaluatedSamples()
"""Nothing is known of the samples."""


class EvaluatedLedger:
    """Counts the evaluated samples by a digest of each."""

    def __init__(self) -> None:
        self._ledger = SampleLedger()
        self._constant = 0

    def add(self, arrays: Iterable[Array]) -> None:
        """Count one sample."""
        known = [np.asarray(array) for array in arrays]
        self._ledger.add(known)
        self._constant += _is_constant(known)

    def result(self) -> EvaluatedSamples:
        """Return the counts so far."""
        return EvaluatedSamples(self._ledger.n_added, len(self._ledger), self._constant)


def _is_constant(arrays: Iterable[Array]) -> bool:
    """Whether each array has one value; single elements, such as an index, say nothing."""
    several = [array for array in arrays if array.size > 1]
    return bool(several) and all(bool((array == array.flat[0]).all()) for array in several)
