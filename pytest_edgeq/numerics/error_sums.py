"""
Accumulators that turn outputs, sample by sample, into errors, and merge.

Sums over samples are computed at the end. Memory grows by thirteen numbers a sample and output,
whatever their size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .metrics import (
    Array,
    Side,
    cosine_similarity,
    differences,
    dot,
    lsb_error,
    sqnr_db,
    top1_counts,
    total,
    worst_low,
)
from .results import ElementError, OutputErrors, SampleErrors, StageErrors

_SPREAD = 0.25
"""
Difference of two rows that are the same choice, as a share of the spread of a column.

Of a sound file, 20 dB SQNR, it is 2.5 standard deviations of the error; of two rows drawn at
random one in seven is so near in one column, and one in 2,500 in four.
"""


def match_counts(reference: Array, actual: Array) -> tuple[int, int]:
    """
    Count the rows of a chosen output, and those that agree with the reference.

    A row is the last axis, as the coordinates of a box; of an array of one row, of integers and of
    bools it is an element. It matches where all whole numbers in it, such as a class, are equal,
    and all others within a quarter of the standard deviation of their column.

    Returns:
        Matching rows and all rows.
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


_NAN, _NUMBER, _DEGENERATE = 0, 1, 2
"""Ranks of a sample's SQNR, the worst first."""


@dataclass(frozen=True, slots=True)
class IOSpec:
    """The properties of an output or input that a measurement needs."""

    name: str  # its name
    # its own scale S in the file (one LSB); None for one without a scale
    scale: float | None = None
    zero_point: int | None = None  # its zero point
    qmin: int | None = None  # its least code
    qmax: int | None = None  # its greatest code
    # whether it holds a choice, of which matches are counted in place of top-1 classes
    chosen: bool = False


@dataclass(slots=True)
class _OutputAccumulator:
    """One output of a StageAccumulator; the arrays it gets were checked there."""

    spec: IOSpec
    dtypes: frozenset[np.dtype[Any]] = frozenset()
    n_samples: int = 0
    n_elements: int = 0
    nonfinite_reference: int = 0
    nonfinite_actual: int = 0
    agreeing: int = 0
    rows: int = 0
    worst: tuple[int, float, int] | None = None  # rank, dB, sample: the least is the worst
    largest: tuple[int, float, int] | None = None  # rank, −|f−q|, sample: the least is the worst
    element: ElementError | None = None
    samples: list[SampleErrors] = field(default_factory=list)

    def update(self, reference: Side, actual: Side, sample: int) -> float:
        self.n_samples += 1
        self.n_elements += reference.array.size
        if actual.array.dtype not in self.dtypes:
            self.dtypes |= {actual.array.dtype}
        bad = [~side.finite for side in (reference, actual) if side.finite is not None]
        if bad:
            self.nonfinite_reference += reference.n_nonfinite
            self.nonfinite_actual += actual.n_nonfinite
            first = int(np.logical_or.reduce(bad).argmax())
            self._offer_element((_NAN, 0.0, sample), first, reference.array, actual.array)
            # The rows alone: the shape shows whether this output has classes at all.
            self.rows += self._agreement(reference, actual)[1]
            return self._offer_sample(math.nan, _NAN, sample)
        with np.errstate(over="ignore", invalid="ignore"):
            decibels, rank = self._add(reference, actual, sample)
        return self._offer_sample(decibels, rank, sample)

    def _add(self, reference: Side, actual: Side, sample: int) -> tuple[float, int]:
        difference = differences(reference, actual)
        signal, noise = reference.power, dot(difference, difference)
        power, product = actual.power, dot(reference.flat, actual.flat)
        magnitudes = np.abs(difference, out=difference)
        absolute = float(magnitudes.sum())
        agreeing, rows = self._agreement(reference, actual)
        self.agreeing += agreeing
        self.rows += rows
        if difference.size:
            at = int(magnitudes.argmax())
            largest = float(magnitudes[at])
            self._offer_element((_NUMBER, -largest, sample), at, reference.array, actual.array)
            sums = (signal, noise, power, product, absolute, largest, agreeing, rows)
            first = reference.first
            if self.spec.chosen:
                first = match_counts(reference.array, np.zeros_like(reference.array))[0]
            of_reference = (reference.magnitude, max(map(abs, reference.ends)), first)
            self.samples.append(SampleErrors(sample, difference.size, *sums, *of_reference))
        decibels = sqnr_db(signal, noise)
        if signal == noise == 0:
            return decibels, _DEGENERATE
        return decibels, _NAN if math.isnan(decibels) else _NUMBER

    def _agreement(self, reference: Side, actual: Side) -> tuple[int, int]:
        """Return the rows that agree, and all rows."""
        if self.spec.chosen:
            return match_counts(reference.array, actual.array)
        return top1_counts(reference, actual)

    def _offer_sample(self, decibels: float, rank: int, sample: int) -> float:
        # NaN has no order, so its rank replaces it.
        key = (rank, decibels if rank == _NUMBER else 0.0, sample)
        self.worst = key if self.worst is None else min(self.worst, key)
        # A degenerate sample has no error to look at: it must not crowd out the bad ones.
        return math.inf if rank == _DEGENERATE else decibels

    def _offer_element(
        self, key: tuple[int, float, int], at: int, reference: Array, actual: Array
    ) -> None:
        if self.largest is None or key < self.largest:
            index = tuple(int(i) for i in np.unravel_index(at, reference.shape))
            self.largest = key
            self.element = ElementError(
                key[2], index, reference[index].item(), actual[index].item()
            )

    def merge(self, other: _OutputAccumulator) -> None:
        self.dtypes |= other.dtypes
        self.n_samples += other.n_samples
        self.n_elements += other.n_elements
        self.nonfinite_reference += other.nonfinite_reference
        self.nonfinite_actual += other.nonfinite_actual
        self.samples += other.samples
        self.agreeing += other.agreeing
        self.rows += other.rows
        if other.worst is not None:
            self.worst = other.worst if self.worst is None else min(self.worst, other.worst)
        if other.largest is not None and (self.largest is None or other.largest < self.largest):
            self.largest, self.element = other.largest, other.element

    def result(self) -> OutputErrors:
        assert self.worst is not None, "unreachable because StageAccumulator has seen a sample"
        finite = not (self.nonfinite_reference or self.nonfinite_actual)
        measured = finite and self.n_elements > 0
        signal, noise, power, product, absolute = (
            total(getattr(each, name) for each in self.samples)
            for name in ("signal", "noise", "power", "product", "absolute")
        )
        scale, top1, largest = self.spec.scale, None, math.nan
        if measured:
            assert self.largest is not None, "unreachable because there is an element"
            largest = -self.largest[1]
        if self.rows:
            top1 = self.agreeing / self.rows if finite else math.nan
        rank, decibels, worst_sample = self.worst
        return OutputErrors(
            name=self.spec.name,
            dtype="/".join(sorted(dtype.name for dtype in self.dtypes)),
            scale=scale,
            n_samples=self.n_samples,
            n_elements=self.n_elements,
            nonfinite_reference=self.nonfinite_reference,
            nonfinite_actual=self.nonfinite_actual,
            degenerate=finite and signal == noise == 0,
            max_abs_error=largest,
            mean_abs_error=absolute / self.n_elements if measured else math.nan,
            rmse=math.sqrt(noise / self.n_elements) if measured else math.nan,
            max_lsb_error=None if scale is None else self._lsb(largest, scale),
            sqnr_db=sqnr_db(signal, noise) if finite else math.nan,
            worst_sample_sqnr_db=decibels if rank == _NUMBER else math.nan,
            worst_sample=worst_sample,
            cosine_similarity=(
                cosine_similarity(product, signal, power, noise) if finite else math.nan
            ),
            top1_agreement=top1,
            chosen=self.spec.chosen,
            max_abs_index=self.element,
            samples=tuple(sorted(self.samples)),
        )

    def _lsb(self, largest: float, scale: float) -> float:
        if math.isnan(largest):
            return math.nan
        assert self.element is not None, "unreachable because there is an element"
        magnitude = max(abs(self.element.reference), abs(self.element.actual))
        return lsb_error(largest, scale, magnitude)


class StageAccumulator:
    """
    Collects the errors of one stage, sample by sample.

    Raises:
        ValueError: there is no output, or two have the same name.
    """

    def __init__(self, outputs: Sequence[IOSpec]) -> None:
        self.outputs = tuple(outputs)
        names = [spec.name for spec in self.outputs]
        if not names:
            raise ValueError("no outputs: there is nothing to measure")
        if len(set(names)) < len(names):
            raise ValueError(f"output names must differ, got {', '.join(map(repr, names))}")
        self.n_samples = 0
        self._accumulators = [_OutputAccumulator(spec) for spec in self.outputs]

    def update(
        self,
        reference: Sequence[Array | Side],
        actual: Sequence[Array | Side],
        *,
        index: int | None = None,
    ) -> float:
        """
        Add one sample. Number of outputs and shapes are checked before anything is added.

        Returns:
            The least SQNR in dB over the outputs, to pick the worst samples by: NaN with anything
            non-finite, +inf without any error.

        Raises:
            ValueError: number of outputs, a shape or a kind of dtype does not match.
        """
        sample = self.n_samples if index is None else index
        pairs = self._checked(reference, actual, sample)
        self.n_samples += 1
        return worst_low(
            [
                accumulator.update(left, right, sample)
                for accumulator, (left, right) in zip(self._accumulators, pairs, strict=True)
            ]
        )

    def _checked(
        self, reference: Sequence[Array | Side], actual: Sequence[Array | Side], sample: int
    ) -> list[tuple[Side, Side]]:
        for side, arrays in (("reference", reference), ("actual", actual)):
            if len(arrays) != len(self.outputs):
                names = ", ".join(spec.name for spec in self.outputs)
                raise ValueError(
                    f"sample {sample}: expected {len(self.outputs)} output(s) ({names}), "
                    f"got {len(arrays)} in {side}"
                )
        pairs = []
        for spec, left, right in zip(self.outputs, reference, actual, strict=True):
            pair = Side.of(left), Side.of(right)
            where = f"output {spec.name!r}, sample {sample}"
            shapes = [side.array.shape for side in pair]
            if shapes[0] != shapes[1]:
                raise ValueError(
                    f"{where}: expected shape {shapes[0]}, got {shapes[1]} "
                    "(shapes must be equal, nothing is broadcast)"
                )
            for array in (side.array for side in pair):
                if array.dtype.kind not in "biuf":
                    raise ValueError(
                        f"{where}: expected bool, integer or float, got {array.dtype.name}"
                    )
            pairs.append(pair)
        return pairs

    def merge(self, other: StageAccumulator) -> None:
        """
        Add all that another accumulator of the same outputs has seen.

        Raises:
            ValueError: the outputs differ.
        """
        if self.outputs != other.outputs:
            raise ValueError(
                "accumulators of different outputs cannot be merged: "
                f"expected {self.outputs}, got {other.outputs}"
            )
        self.n_samples += other.n_samples
        for mine, theirs in zip(self._accumulators, other._accumulators, strict=True):
            mine.merge(theirs)

    def result(self) -> StageErrors:
        """
        Return the errors measured so far.

        Raises:
            ValueError: there was no sample.
        """
        if not self.n_samples:
            raise ValueError("no sample was measured: the inputs are empty")
        results = [accumulator.result() for accumulator in self._accumulators]
        return StageErrors({result.name: result for result in results})
