"""How many different samples were evaluated, and whether they have any content."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np

from .checks import sample_digest
from .fingerprints import BY_SAMPLE
from .sums import Array


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
    """Counts the evaluated samples by a digest of each; ledgers of parts of the samples merge."""

    def __init__(self) -> None:
        self._digests: dict[int, bytes] = {}
        self._constant = 0

    def add(self, index: int, arrays: Iterable[Array]) -> None:
        """Count one sample."""
        known = [np.asarray(array) for array in arrays]
        self._digests[index] = sample_digest(known)
        self._constant += _is_constant(known)

    def merge(self, other: EvaluatedLedger) -> None:
        """Count the samples that another ledger has counted, none of which is counted here."""
        self._digests |= other._digests
        self._constant += other._constant

    def result(self) -> EvaluatedSamples:
        """Return the counts so far."""
        different = len(set(self._digests.values()))
        return EvaluatedSamples(len(self._digests), different, self._constant)

    def fingerprint(self, names: Iterable[str]) -> str:
        """
        Return `BY_SAMPLE` and SHA-256 over the digests of the samples, in the order of the indices.

        It is the same however the samples were split over processes.
        """
        digest = hashlib.sha256(repr(tuple(names)).encode())
        for index in sorted(self._digests):
            digest.update(self._digests[index])
        return BY_SAMPLE + digest.hexdigest()


def _is_constant(arrays: Iterable[Array]) -> bool:
    """Whether each array has one value; single elements, such as an index, say nothing."""
    several = [array for array in arrays if array.size > 1]
    return bool(several) and all(bool((array == array.flat[0]).all()) for array in several)
