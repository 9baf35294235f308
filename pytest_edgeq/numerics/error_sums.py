"""
Accumulators that turn outputs, sample by sample, into errors, and merge.

Sums over samples are computed at the end. Memory grows by twenty numbers a sample and output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from .metrics import (
    Array,
    Side,
    cosine_similarity,
    dot,
    lsb_error,
    perplexity_ratio,
    sqnr_db,
    top1_counts,
    total,
)
from .results import ElementError, OutputErrors, SampleErrors, StageErrors

# Difference of two rows that are the same choice, as a share of the spread of a column. Of a sound
# file, 20 dB SQNR, it is 2.5 standard deviations of the error; of two rows drawn at random one in
# seven is so near in one column, and one in 2,500 in four.
_SPREAD = 0.25


def match_counts(reference: Array, actual: Array) -> tuple[int, int]:
    """
    Count the rows of a chosen output that match the reference, and all rows.

    A row is the last axis, as the coordinates of a box; of an array of one row, of integers and of
    bools it is an element. It matches where all whole numbers in it, such as a class, are equal,
    and all others within a quarter of the standard deviation of their column.
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


# Maximum number of elements of an output whose means over the samples are kept: of heads, 0.5 MB.
_MOST_MEANS = 1 << 16
_FLOAT_NOISE = 1e-12  # power of what varies over that of the output that float32 may have made

# Ranks of a sample's SQNR, the worst first: NaN has no order.
_NAN, _NUMBER, _DEGENERATE = 0, 1, 2

_Key: TypeAlias = "tuple[int, float, int]"  # rank, dB or −|f−q|, sample: the least is the worst


class IOSpec(NamedTuple):
    """The properties of an output or input that a measurement needs."""

    name: str
    scale: float | None = None  # its own in the file (one LSB); None without one
    zero_point: int | None = None
    qmin: int | None = None  # its least code
    qmax: int | None = None  # its greatest code
    chosen: bool = False  # whether matches are counted in place of top-1 classes


class OutputAccumulator:
    """Collects the errors of one output, sample by sample; its callers check the arrays."""

    def __init__(self, spec: IOSpec) -> None:
        self.spec = spec
        self.dtypes: set[str] = set()
        # samples, elements, 2 × non-finite, agreeing, rows, positions, tokens
        self.counts = np.zeros(8, np.int64)
        self.worst: _Key = (_DEGENERATE, math.inf, 0)
        self.largest: _Key = self.worst
        self.element: ElementError | None = None
        self.samples: list[SampleErrors] = []
        # Sum of the reference over the samples by element; empty if too large, or shapes vary.
        self.sums: npt.NDArray[np.float64] | None = None

    @np.errstate(over="ignore", invalid="ignore")
    def update(self, reference: Side, actual: Side, sample: int) -> float:
        """Measure and add one sample, and return its SQNR in dB."""
        dtype = actual.array.dtype.name
        nonfinite = reference.n_nonfinite, actual.n_nonfinite
        if self.spec.chosen:
            agreeing, rows = match_counts(reference.array, actual.array)
        else:
            agreeing, rows = top1_counts(reference, actual)
        if any(nonfinite):
            at = int((~np.isfinite(reference.flat) | ~np.isfinite(actual.flat)).argmax())
            nan = math.nan
            unknown = SampleErrors(
                *(sample, reference.flat.size, nan, nan, nan, nan, nan, nan),
                *(agreeing, rows, nan, nan, 0),
            )
            return self.add(unknown, dtype, _element(reference, actual, at, sample), nonfinite)
        # float64 holds every bool, float32 and integer of 32 bits: nothing wraps.
        difference = reference.flat - actual.flat
        signal, noise = reference.power, dot(difference, difference)
        power, product = actual.power, dot(reference.flat, actual.flat)
        self._add_sums(reference.flat)
        magnitudes = np.abs(difference, out=difference)
        absolute = float(magnitudes.sum())
        largest, element = 0.0, None
        if difference.size:
            at = int(magnitudes.argmax())
            largest, element = float(magnitudes[at]), _element(reference, actual, at, sample)
        first = reference.first
        if self.spec.chosen:
            first = match_counts(reference.array, np.zeros_like(reference.array))[0]
        sums = SampleErrors(
            *(sample, difference.size, signal, noise, power, product, absolute, largest),
            *(agreeing, rows, reference.magnitude, max(map(abs, reference.ends)), first),
        )
        return self.add(sums, dtype, element)

    def add(
        self,
        sums: SampleErrors,
        dtype: str,
        element: ElementError | None,
        nonfinite: tuple[int, int] = (0, 0),
    ) -> float:
        """
        Add the sums of one sample, and return its SQNR in dB.

        `element` is that of the greatest difference, or the first non-finite one. With anything
        `nonfinite`, of reference and actual, only the number of elements and rows count.
        """
        sample, broken = sums.sample, any(nonfinite)
        self.dtypes.add(dtype)
        # With anything non-finite, rows, positions and tokens show which metrics this output has.
        agreeing = 0 if broken else sums.agreeing
        self.counts += (1, sums.n, *nonfinite, agreeing, sums.rows, sums.positions, sums.tokens)
        if element is not None:
            offered = (_NAN, 0.0, sample) if broken else (_NUMBER, -sums.largest, sample)
            if offered < self.largest:
                self.largest, self.element = offered, element
        decibels = math.nan if broken else sqnr_db(sums.signal, sums.noise)
        if not broken and sums.n:
            self.samples.append(sums)
        if sums.signal == sums.noise == 0:
            # It has no error to look at: it must not crowd out the bad ones.
            self.worst = min(self.worst, (_DEGENERATE, 0.0, sample))
            return math.inf
        is_nan = math.isnan(decibels)
        self.worst = min(self.worst, (_NAN, 0.0, sample) if is_nan else (_NUMBER, decibels, sample))
        return decibels

    def _add_sums(self, sums: Array) -> None:
        known = np.zeros(sums.size) if self.sums is None else self.sums
        fits = known.size == sums.size <= _MOST_MEANS
        self.sums = known + sums if fits else np.empty(0)

    def _spread(self, signal: float) -> float | None:
        """Return the rms of the reference's difference from its mean over the samples."""
        if self.sums is None or not self.sums.size or not math.isfinite(signal):
            return None
        n = len(self.samples)
        power = signal - dot(self.sums, self.sums) / n
        return math.sqrt(power / n / self.sums.size) if power > _FLOAT_NOISE * signal else 0.0

    def merge(self, other: OutputAccumulator) -> None:
        """Add all samples of another accumulator of the same output."""
        if other.sums is not None:
            self._add_sums(other.sums)
        self.dtypes |= other.dtypes
        self.counts += other.counts
        self.samples += other.samples
        self.worst = min(self.worst, other.worst)
        if other.largest < self.largest:
            self.largest, self.element = other.largest, other.element

    def result(self) -> OutputErrors:
        """Return the errors of the samples added so far."""
        n_samples, n_elements, of_reference, of_actual, *counts = map(int, self.counts)
        agreeing, rows, positions, tokens = counts
        finite = not (of_reference or of_actual)
        measured = finite and n_elements > 0
        signal, noise, power, product, absolute, kl, nll, nll_reference = (
            total(getattr(each, name) for each in self.samples)
            for name in (
                *("signal", "noise", "power", "product", "absolute"),
                *("kl", "nll", "nll_reference"),
            )
        )
        scale, lsb = self.spec.scale, None
        largest = -self.largest[1] if measured else math.nan
        if scale is not None:
            ends = (self.element.reference, self.element.actual) if self.element else (math.nan,)
            lsb = lsb_error(largest, scale, max(map(abs, ends)))
        rank, decibels, worst_sample = self.worst
        return OutputErrors(
            name=self.spec.name,
            dtype="/".join(sorted(self.dtypes)),
            scale=scale,
            n_samples=n_samples,
            n_elements=n_elements,
            nonfinite_reference=of_reference,
            nonfinite_actual=of_actual,
            degenerate=finite and signal == noise == 0,
            max_abs_error=largest,
            mean_abs_error=absolute / n_elements if measured else math.nan,
            rmse=math.sqrt(noise / n_elements) if measured else math.nan,
            max_lsb_error=lsb,
            sqnr_db=sqnr_db(signal, noise) if finite else math.nan,
            worst_sample_sqnr_db=decibels if rank == _NUMBER else math.nan,
            worst_sample=worst_sample,
            cosine_similarity=(
                cosine_similarity(product, signal, power, noise) if finite else math.nan
            ),
            top1_agreement=(agreeing / rows if finite else math.nan) if rows else None,
            chosen=self.spec.chosen,
            kl=(kl / positions if finite else math.nan) if positions else None,
            perplexity_ratio=(
                (perplexity_ratio(nll / tokens, nll_reference / tokens) if finite else math.nan)
                if tokens
                else None
            ),
            max_abs_index=self.element,
            spread=self._spread(signal),
            samples=tuple(sorted(self.samples)),
        )


def _element(reference: Side, actual: Side, at: int, sample: int) -> ElementError:
    """Return the element at a flat index of both sides."""
    index = tuple(int(i) for i in np.unravel_index(at, reference.array.shape))
    return ElementError(sample, index, reference.array[index].item(), actual.array[index].item())


class StageAccumulator:
    """Collects the errors of one stage, sample by sample."""

    def __init__(self, outputs: Sequence[IOSpec]) -> None:
        names = [spec.name for spec in outputs]
        if not names:
            raise ValueError("no outputs: there is nothing to measure")
        if len(set(names)) < len(names):  # as in a file without signatures
            raise ValueError(f"output names must differ, got {', '.join(map(repr, names))}")
        self.n_samples = 0
        self._accumulators = [OutputAccumulator(spec) for spec in outputs]

    def update(
        self,
        reference: Sequence[Array | Side],
        actual: Sequence[Array | Side],
        *,
        index: int | None = None,
    ) -> float:
        """
        Add one sample, and return its least SQNR in dB over the outputs, to pick the worst by.

        It is NaN with anything non-finite, +inf without any error.
        """
        sample = self.n_samples if index is None else index
        pairs = self._checked(reference, actual, sample)
        self.n_samples += 1
        triples = zip(self._accumulators, pairs, strict=True)
        return float(np.min([each.update(*pair, sample) for each, pair in triples]))

    def _checked(
        self, reference: Sequence[Array | Side], actual: Sequence[Array | Side], sample: int
    ) -> list[tuple[Side, Side]]:
        pairs = [(Side.of(a), Side.of(b)) for a, b in zip(reference, actual, strict=True)]
        for accumulator, pair in zip(self._accumulators, pairs, strict=True):
            where = f"output {accumulator.spec.name!r}, sample {sample}"
            left, right = (side.array for side in pair)
            if left.shape != right.shape:
                raise ValueError(
                    f"{where}: expected shape {left.shape}, got {right.shape} "
                    "(shapes must be equal, nothing is broadcast)"
                )
            for array in (left, right):
                if array.dtype.kind not in "biuf":
                    raise ValueError(
                        f"{where}: expected bool, integer or float, got {array.dtype.name}"
                    )
        return pairs

    def merge(self, other: StageAccumulator) -> None:
        """Add all that another accumulator of the same outputs has seen."""
        self.n_samples += other.n_samples
        for mine, theirs in zip(self._accumulators, other._accumulators, strict=True):
            mine.merge(theirs)

    def result(self) -> StageErrors:
        """Return the errors measured so far."""
        if not self.n_samples:
            raise ValueError("no sample was measured: the inputs are empty")
        results = [accumulator.result() for accumulator in self._accumulators]
        return StageErrors({result.name: result for result in results})
