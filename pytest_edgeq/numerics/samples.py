"""Samples that were calibrated with and evaluated, known by a digest of each."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np

from .confidence import BY_SAMPLE
from .findings import CALIBRATION_OVERLAP, CALIBRATION_REPEATED, SAMPLES, Finding
from .metrics import Array

_BY_CHANCE = 1e-3
"""Samples met again of which less than this share would be by chance are the same ones."""

_SIGMAS = 3  # how many standard deviations above its share by chance a count is none

_REPEATED = 4
"""How often one sample must be given to be a mistake: fewer may be all there are."""


class SampleLedger:
    """
    Digests of samples, to recognize calibration samples that occur again.

    A digest takes in number, dtype, shape and bytes of the arrays: 0 and 0.0 are two samples.
    """

    def __init__(self) -> None:
        self._digests: set[bytes] = set()
        # Of a few elements each: tells a new sample from the known ones without reading it whole.
        self._glances: set[bytes] = set()
        self._repeated: set[bytes] = set()
        self._n_added = 0
        self._numbers = _WholeNumbers()

    def add(self, arrays: Iterable[Array]) -> None:
        """Add the digest of one sample."""
        known = [np.asarray(array) for array in arrays]
        digest = sample_digest(known)
        if digest in self._digests:
            self._repeated.add(digest)
        self._glances.add(sample_digest(map(_glance, known)))
        self._digests.add(digest)
        self._n_added += 1
        self._numbers.add(known)

    @property
    def chance(self) -> float:
        """
        Return the share of honest new samples that are known by chance.

        It is that of the known ones that were met more than once (Good, The population frequencies
        of species, 1953), one more and three standard deviations of their number counted as such,
        where samples are a few whole numbers, such as a user's and an article's. It is 0 of
        floats, and of whole numbers of which less than one sample in a thousand would be known if
        all were as likely.
        """
        if self._numbers.bits > math.log2(max(self._n_added, 1) / _BY_CHANCE):
            return 0.0
        repeats = self._n_added - len(self._digests) + len(self._repeated) + 1
        return min(1.0, (repeats + _SIGMAS * math.sqrt(repeats)) / (self._n_added + 1))

    @property
    def fingerprint(self) -> str:
        """Return SHA-256 over the different samples, in whatever order; empty without any."""
        return hashlib.sha256(b"".join(sorted(self._digests))).hexdigest() if self._digests else ""

    @property
    def n_added(self) -> int:
        """Return the number of samples, those that are alike, too."""
        return self._n_added

    def __contains__(self, arrays: Iterable[Array]) -> bool:
        """Return whether the sample was added before."""
        asked = [np.asarray(array) for array in arrays]
        return (
            sample_digest(map(_glance, asked)) in self._glances
            and sample_digest(asked) in self._digests
        )

    def __len__(self) -> int:
        """Return the number of different samples."""
        return len(self._digests)


class _WholeNumbers:
    """An upper bound on distinct samples of integers, from their least and greatest values."""

    def __init__(self) -> None:
        self._ends: dict[int, tuple[int, int, int]] = {}
        self._floats = False

    def add(self, arrays: Iterable[Array]) -> None:
        for place, array in enumerate(arrays):
            if array.dtype.kind not in "biu":
                self._floats = True
            elif array.size:
                size, low, high = self._ends.get(place, (0, 1, 0))
                ends = int(array.min()), int(array.max())
                if size:
                    ends = min(low, ends[0]), max(high, ends[1])
                self._ends[place] = (max(size, array.size), *ends)

    @property
    def bits(self) -> float:
        """Base-2 logarithm of the number of samples; infinite of floats."""
        if self._floats:
            return math.inf
        return sum(size * math.log2(high - low + 1) for size, low, high in self._ends.values())


_GLANCE = 64  # elements of an array that are looked at first


def _glance(array: Array) -> Array:
    # Of one that is not contiguous, flat[...] copies the elements asked for alone.
    return np.asarray(array.flat[:: max(1, array.size // _GLANCE)])


def sample_digest(arrays: Iterable[Array]) -> bytes:
    """Return a digest of 16 bytes over number, dtype, shape and bytes of a sample's arrays."""
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}:".encode())
        digest.update(array.tobytes())
    return digest.digest()


def repeated_finding(ledger: SampleLedger) -> Finding | None:
    """
    Return the finding for a calibration by one repeated sample; else None.

    As from a loader that always yields the same, or from `[sample] * 64`.
    """
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
    # how many of all given are constant: every input has one value in all elements, as a black
    # image has
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
