"""
The formulas of metrics, from sums pooled over all samples and elements.

f is the reference, q what is measured against it, S the scale of the output. Where a formula has no
answer the result is NaN, and every bound is written so that NaN fails it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]

# OpenBLAS uses threads from 10 000 elements on, and its sum then depends on their number.
_CHUNK = 8192


def total(values: Iterable[float]) -> float:
    """Return the correctly rounded sum; NaN if it is not finite, so that it fails every bound."""
    try:
        found = math.fsum(values)
    except (OverflowError, ValueError):
        return math.nan
    return found if math.isfinite(found) else math.nan


def dot(left: Array, right: Array) -> float:
    """Return the sum of products of two flat float64 arrays, whatever the number of cores."""
    whole = left.size // _CHUNK * _CHUNK
    if not whole:
        return float(np.dot(left, right))
    shape = (-1, _CHUNK)
    chunks = np.vecdot(left[:whole].reshape(shape), right[:whole].reshape(shape))
    return float(chunks.sum() + np.dot(left[whole:], right[whole:]))


class Side:
    """An array with cached statistics, which the stages and checks of a comparison share."""

    def __init__(self, array: Array) -> None:
        self.array = np.asarray(array)
        # Others, such as complex numbers, are refused by callers, which know the output's name.
        self._known = self.array.ravel() if self.array.dtype.kind in "biuf" else np.empty(0)

    @classmethod
    def of(cls, values: Array | Side) -> Side:
        """Return the side itself, or an array as one."""
        return values if isinstance(values, cls) else cls(values)  # type: ignore[arg-type]

    @functools.cached_property
    def flat(self) -> Array:
        """The elements in float64."""
        return self._known.astype(np.float64, copy=False)

    @functools.cached_property
    @np.errstate(over="ignore", invalid="ignore")
    def power(self) -> float:
        """The sum of the squares."""
        return dot(self.flat, self.flat)

    @functools.cached_property
    def finite(self) -> Array:
        """The finite elements, in their own dtype."""
        is_finite = np.isfinite(self._known)
        return self._known if is_finite.all() else self._known[is_finite]

    @property
    def n_nonfinite(self) -> int:
        """How many elements are not finite."""
        return self._known.size - self.finite.size

    @functools.cached_property
    def ends(self) -> tuple[float, float]:
        """The least and the greatest finite element; +inf and −inf where there is none."""
        values = self.finite
        return (float(values.min()), float(values.max())) if values.size else (math.inf, -math.inf)

    @functools.cached_property
    def magnitude(self) -> float:
        """The sum of the absolute values."""
        return float(np.abs(self.flat).sum())

    @property
    def has_classes(self) -> bool:
        """Whether it is of rank 2, with several elements a row."""
        return self.array.ndim == 2 and self.array.shape[1] > 1

    @functools.cached_property
    def first_maxima(self) -> Array:
        """Index of the first maximum of each row."""
        return np.asarray(self.array.argmax(axis=1))

    @functools.cached_property
    def maxima(self) -> Array:
        """Maximum of each row."""
        return np.asarray(self.array.max(axis=1))

    @property
    def first(self) -> int:
        """Number of rows whose first element is a maximum; 0 where rows are no classes."""
        if not self.has_classes:
            return 0
        return int(np.count_nonzero(self.array[:, 0] == self.maxima))


# Four float32 roundings of half an ulp: the dequantized value and the scale, on both sides.
_FLOAT32_SLACK = 2.0**-22

# SQNR of the best quantizer of one bit for Gaussian values, 4.40 dB (Max, Quantizing for minimum
# distortion, IRE Trans. Inf. Theory 6, 1960). Sound recipes were seen down to 5 dB at outputs.
ONE_BIT_DB = -10 * math.log10(1 - 2 / math.pi)


def sqnr_db(signal: float, noise: float) -> float:
    """
    Return the signal-to-quantization-noise ratio in dB, without any epsilon.

    It is 10·log10(Σf² / Σ(f−q)²) (Oppenheim & Schafer, Discrete-Time Signal Processing, "Analysis
    of quantization errors"). An epsilon would cap it by the absolute size of the values.
    """
    # An infinite sum is an overflow: with finite noise it would read +inf dB and pass.
    if not (math.isfinite(signal) and math.isfinite(noise)) or signal == noise == 0:
        return math.nan
    if noise == 0:
        return math.inf
    if signal == 0:
        return -math.inf
    ratio = signal / noise
    if 0 < ratio < math.inf:
        return 10 * math.log10(ratio)
    return 10 * (math.log10(signal) - math.log10(noise))


def cosine_similarity(product: float, signal: float, actual: float, noise: float) -> float:
    """
    Return the cosine of the angle between both sides, each flattened and pooled to one vector.

    cos = Σfq / (√Σf² · √Σq²), the normalized inner product. Equal sides give exactly 1.0 by
    definition (Σ(f−q)² = 0), because the roots need not cancel; rounding beyond ±1 is cut off.
    """
    if signal == actual == 0:
        return math.nan
    if signal == 0 or actual == 0:
        return 0.0
    if noise == 0:
        return 1.0
    cosine = product / (math.sqrt(signal) * math.sqrt(actual))
    return cosine if math.isnan(cosine) else min(1.0, max(-1.0, cosine))


def perplexity_ratio(nll: float, nll_reference: float) -> float:
    """Return exp(nll − nll_reference) of two means in nats, +inf beyond float64."""
    try:
        return math.exp(nll - nll_reference)
    except OverflowError:
        return math.inf


def lsb_error(difference: float, scale: float, magnitude: float) -> float:
    """
    Return a difference in LSB, steps of the output's own scale: |f−q| / S.

    A difference that float32 cannot tell from a whole number of steps, at the size of these values,
    is that number: a bound of 2 must not fail by the rounding of the test itself.
    """
    if not 0 < scale < math.inf:
        return math.nan
    steps = difference / scale
    if not math.isfinite(steps):
        return steps
    whole = float(round(steps))
    return whole if abs(steps - whole) <= _FLOAT32_SLACK * magnitude / scale else steps


def top1_counts(reference: Side, actual: Side) -> tuple[int, int]:
    """
    Count rows where the top-1 class agrees, and all rows; of rank 2 with several classes alone.

    A row agrees when the first maximum of `actual`, which is what argmax takes on the device, is
    among the maxima of `reference`. So of two classes that tie in the reference either is right;
    of two that tie in `actual`, as int8 codes often do, the first decides.
    """
    if not reference.has_classes:
        return 0, 0
    rows = reference.array
    agree = rows[np.arange(len(rows)), actual.first_maxima] == reference.maxima
    return int(np.count_nonzero(agree)), len(rows)


def json_number(value: float | None) -> float | str | None:
    """Return the number as JSON can hold it: ``"nan"``, ``"inf"`` and ``"-inf"`` are text there."""
    return value if value is None or math.isfinite(value) else str(value)


def short_numbers(values: Array) -> list[float | str | None]:
    """Return numbers as JSON can hold them, to five digits: there are thousands."""
    return [json_number(float(f"{each:.5g}")) for each in values.tolist()]


class Distances:
    """
    Selects samples with greater errors than those selected before.

    Args:
        worst: The greatest distance of each output over the samples selected before.
        factor: How many times as far from the reference an output must be to be selected.
    """

    def __init__(self, worst: Sequence[float] | None = None, factor: float = 1.0) -> None:
        self.worst = None if worst is None else list(worst)
        self._factor = factor

    @staticmethod
    def between(actual: Sequence[Array], reference: Sequence[Array]) -> list[float]:
        """Return the sum of the squared differences of each output; NaN in one is infinite."""
        return [_distance(one, two) for one, two in zip(actual, reference, strict=True)]

    def exceeds(self, distances: Sequence[float]) -> bool:
        """Return whether any output is further than before; if so, add the sample."""
        before = [-1.0] * len(distances) if self.worst is None else self.worst
        pairs = list(zip(distances, before, strict=True))
        if not any(distance > self._factor * worst for distance, worst in pairs):
            return False
        self.worst = [max(pair) for pair in pairs]
        return True


def _distance(one: Array, two: Array) -> float:
    with np.errstate(all="ignore"):
        difference = np.where(one == two, 0.0, one.astype(np.float64) - two)
        difference[np.isnan(one) & np.isnan(two)] = 0.0
        total = float(np.square(difference).sum())
    return total if math.isfinite(total) else math.inf


def least_sqnr_db(reference: Sequence[Array], actual: Sequence[Array]) -> float:
    """Return the least SQNR over a sample's outputs, NaN before any; −inf where shapes differ."""
    least = math.inf
    for expected, got in zip(reference, actual, strict=True):
        if expected.shape != got.shape:
            return -math.inf
        signal = expected.astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            power, noise = float(np.square(signal).sum()), float(np.square(signal - got).sum())
        if power or noise:  # zeros on both sides are no error
            least = float(np.minimum(least, sqnr_db(power, noise)))  # min(inf, nan) is inf
    return least
