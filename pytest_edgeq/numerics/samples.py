"""Samples that were calibrated with and evaluated, known by a digest of each."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np

from .findings import CALIBRATION_OVERLAP, CALIBRATION_REPEATED, SAMPLES, Finding
from .metric_table import BY_SAMPLE
from .metrics import Array

_FEW_NUMBERS = 8  # samples of up to so many whole numbers, as of a user and an article, recur

_SIGMAS = 3  # how many standard deviations above its share by chance a count is none

_REPEATED = 4  # how often one sample must be given to be a mistake: fewer may be all there are


class SampleLedger:
    """
    Digests of samples, to recognize calibration samples that occur again.

    A digest takes in number, dtype, shape and bytes of the arrays: 0 and 0.0 are two samples.
    """

    def __init__(self) -> None:
        self._digests: set[bytes] = set()
        self._repeated: set[bytes] = set()
        self._recurs = True
        self.n_added = 0

    def add(self, arrays: Iterable[Array]) -> None:
        """Add the digest of one sample."""
        known = [np.asarray(array) for array in arrays]
        digest = sample_digest(known)
        if digest in self._digests:
            self._repeated.add(digest)
        self._digests.add(digest)
        self.n_added += 1
        is_whole = all(array.dtype.kind in "biu" for array in known)
        self._recurs &= is_whole and sum(array.size for array in known) <= _FEW_NUMBERS

    @property
    def chance(self) -> float:
        """
        Return the share of new samples that repeat a known one by chance; 0 unless few integers.

        It is estimated by the share of samples seen more than once (Good, The population
        frequencies of species, 1953), plus one and three standard deviations.
        """
        if not self._recurs or not self.n_added:
            return 0.0
        repeats = self.n_added - len(self._digests) + len(self._repeated) + 1
        return min(1.0, (repeats + _SIGMAS * math.sqrt(repeats)) / (self.n_added + 1))

    @property
    def fingerprint(self) -> str:
        """Return SHA-256 over the different samples, in whatever order; empty without any."""
        return hashlib.sha256(b"".join(sorted(self._digests))).hexdigest() if self._digests else ""

    def knows(self, digest: bytes) -> bool:
        """Return whether a sample of this digest was added."""
        return digest in self._digests

    def __contains__(self, arrays: Iterable[Array]) -> bool:
        """Return whether the sample was added before."""
        return bool(self._digests) and self.knows(sample_digest(map(np.asarray, arrays)))

    def __len__(self) -> int:
        """Return the number of different samples."""
        return len(self._digests)


def sample_digest(arrays: Iterable[Array]) -> bytes:
    """Return a digest of 16 bytes over number, dtype, shape and bytes of a sample's arrays."""
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}:".encode())
        digest.update(array.tobytes())
    return digest.digest()


def repeated_finding(ledger: SampleLedger) -> Finding | None:
    """Return the finding for a calibration by one repeated sample, as by `[sample] * 64`."""
    if len(ledger) != 1 or ledger.n_added < _REPEATED:
        return None
    return Finding(
        kind=CALIBRATION_REPEATED,
        place=SAMPLES,
        expected="different calibration samples",
        got=f"one, {ledger.n_added} times: ranges hold what it reaches, and cut off the others",
        fix="look at the loader, and give dozens that differ",
    )


def overlap_finding(n_overlap: int, n_total: int, *, chance: float = 0.0) -> Finding | None:
    """Return the finding for evaluated samples that the calibration had seen; None without any."""
    expected = n_total * chance
    if n_overlap <= expected + _SIGMAS * math.sqrt(expected * (1 - chance)):
        return None
    return Finding(
        kind=CALIBRATION_OVERLAP,
        place=SAMPLES,
        symptom=f"{n_overlap} of {n_total} evaluated samples were also used to calibrate: the "
        "errors look smaller than they are",
        fix="evaluate on samples that the calibration has not seen",
    )


class EvaluatedSamples(NamedTuple):
    """The samples that errors were measured on."""

    given: int = 0  # how many there were
    different: int = 0  # how many of them differ from all before
    constant: int = 0  # in how many every input has one value, as of a black image


NOT_COUNTED: Final = EvaluatedSamples()  # nothing is known of the samples


class EvaluatedLedger:
    """Counts the evaluated samples by a digest of each; ledgers of parts of the samples merge."""

    def __init__(self) -> None:
        self._digests: dict[int, bytes] = {}
        self._constant = 0

    def add(self, index: int, arrays: Iterable[Array]) -> bytes:
        """Count one sample, and return its digest."""
        known = [np.asarray(array) for array in arrays]
        self._digests[index] = digest = sample_digest(known)
        several = [array for array in known if array.size > 1]  # an index alone says nothing
        self._constant += bool(several) and all((each == each.flat[0]).all() for each in several)
        return digest

    def merge(self, other: EvaluatedLedger) -> None:
        """Count the samples that another ledger has counted, none of which is counted here."""
        self._digests |= other._digests
        self._constant += other._constant

    def result(self) -> EvaluatedSamples:
        """Return the counts so far."""
        different = len(set(self._digests.values()))
        return EvaluatedSamples(len(self._digests), different, self._constant)

    def fingerprint(self, names: Iterable[str]) -> str:
        """Return `BY_SAMPLE` and SHA-256 over the digests, however the samples were split."""
        digest = hashlib.sha256(repr(tuple(names)).encode())
        for index in sorted(self._digests):
            digest.update(self._digests[index])
        return BY_SAMPLE + digest.hexdigest()
