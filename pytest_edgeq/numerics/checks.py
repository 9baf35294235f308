"""Health checks that need no inference: scales, biases, samples met twice."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

import numpy as np

from .findings import (
    BAD_SCALE,
    BIAS_AT_INT32_LIMIT,
    CALIBRATION_OVERLAP,
    CALIBRATION_REPEATED,
    NO_HARM,
    SAMPLES,
    UNCALIBRATED_ACTIVATION,
    Finding,
    Harm,
    Place,
)
from .sums import Array

_INT32 = np.iinfo(np.int32)

_FILLED = {"input": 1 / 4, "output": 1 / 32}
"""
Share of the codes that the values of a range that was meant span at least.

Inputs in steps of 1 are whole numbers, which are told from others; outputs are rounded to them.
"""

_BY_CHANCE = 1e-3
"""Samples met again of which less than this share would be by chance are the same ones."""

_SIGMAS = 3
"""How many standard deviations above its share by chance a count is none."""


def check_scales(place: Place, scales: Array) -> list[Finding]:
    """
    Check the scales of one tensor.

    Returns:
        Findings of kind `bad_scale`.
    """
    values = np.asarray(scales, dtype=np.float64).ravel()
    if not values.size:
        return []
    found = []
    tiny = float(np.finfo(np.float32).tiny)
    defects = {
        "zero": values == 0,
        "subnormal": (values > 0) & (values < tiny),
        "negative": values < 0,
        "not finite": ~np.isfinite(values),
    }
    bad = np.logical_or.reduce(list(defects.values()))
    n_bad = int(np.count_nonzero(bad))
    if n_bad:
        kinds = [name for name, mask in defects.items() if mask.any()]
        first = int(bad.argmax())
        found.append(
            Finding(
                kind=BAD_SCALE,
                place=place,
                expected="positive normal scales",
                got=f"{' and '.join(kinds)} in {n_bad} of {values.size} (the "
                f"first at channel {first}: {values[first]:.6g})",
                causes=("a channel without range, or never observed",),
                harm=Harm.share(n_bad, values.size),
            )
        )
    return found


def has_default_parameters(scales: Array, zero_points: Array, dtype: str) -> bool:
    """
    Whether an activation has scale 1.0 and zero point 0.

    An observer that saw no sample leaves these. They are right for whole numbers from -128 to 127,
    and of uint8 for raw pixels.
    """
    is_signed = dtype in ("int8", "int16")
    return is_signed and bool(len(scales) and np.all(scales == 1)) and not np.any(zero_points)


def uncalibrated_finding(place: Place, evidence: str, harm: Harm = NO_HARM) -> Finding:
    """Return the finding for an activation with default parameters."""
    return Finding(
        kind=UNCALIBRATED_ACTIVATION,
        place=place,
        symptom=f"scale 1.0 and zero point 0, {evidence}",
        causes=("its observer saw no sample",),
        fix="calibrate with inputs that reach it",
        harm=harm,
    )


class DefaultRange:
    """Tells whether values fill codes of scale 1.0 and zero point 0; merges."""

    def __init__(self, scale: float | None, zero_point: int | None, low: int | None) -> None:
        self._is_default = (scale, zero_point) == (1.0, 0) and low is not None and low < 0
        self._is_whole = True

    @property
    def is_exact(self) -> bool:
        """Whether all values are whole numbers, in steps of 1."""
        return self._is_default and self._is_whole

    def update(self, values: Array) -> None:
        """Look at the finite values of one sample."""
        if self._is_default and self._is_whole:
            self._is_whole = bool((values == np.rint(values)).all())

    def merge(self, other: DefaultRange) -> None:
        """Add all that another one has seen."""
        self._is_whole &= other._is_whole

    def finding(self, place: Place, least: float, greatest: float, codes: int) -> Finding | None:
        """Return the finding, if values of fractions leave most codes unused."""
        used = max(greatest, 0.0) - min(least, 0.0) + 1
        if not self._is_default or self._is_whole or not 1 < used < codes * _FILLED[place.kind]:
            return None
        evidence = f"and its values, in [{least:.3g}, {greatest:.3g}], span {used:.2g} of {codes}"
        harm = Harm.decibels(20 * math.log10(codes / used))
        return uncalibrated_finding(place, f"{evidence} codes", harm)


def check_bias(place: Place, values: Array) -> list[Finding]:
    """
    Check the codes of one bias for the limits of int32.

    Returns:
        A finding of kind `bias_at_int32_limit`, or none.
    """
    values = np.asarray(values)
    if values.dtype.kind not in "iu":
        return []
    # Symmetric clamps end at -INT32_MAX.
    at_limit = int(np.count_nonzero(np.isin(values, [_INT32.min, -_INT32.max, _INT32.max])))
    if not at_limit:
        return []
    return [
        Finding(
            kind=BIAS_AT_INT32_LIMIT,
            place=place,
            expected="codes inside of int32",
            got=f"{at_limit} of {values.size} at its limit",
            causes=("the bias is cut off because input scale × weight scale is too small for it",),
            harm=Harm.share(at_limit, values.size),
        )
    ]


_REPEATED = 4
"""How often one sample must be given to be a mistake: fewer may be all there are."""


class SampleLedger:
    """
    Remembers samples by a digest of 16 bytes each, to know calibration samples when met again.

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
        """Remember one sample."""
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
    """How many samples there can be, as far as the least and greatest numbers met tell it."""

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


_GLANCE = 64
"""Elements of an array that are looked at first."""


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
    Return the finding for a calibration by one sample that was given again and again; else None.

    By a loader that gives the same always, or as `[sample] * 64`.
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
