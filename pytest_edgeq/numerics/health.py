"""
Health checks: defects that a loose budget would accept.

Every rule has a limit that is stated with its reason, so that a finding is worth to act on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .checks import ON_NOTHING, UNKNOWN, Calibration, DefaultRange, keeps_nothing
from .error_sums import IOSpec
from .findings import (
    CLIPPED_INPUT,
    CLIPPED_OUTPUT,
    COARSE_INPUT,
    CONSTANT_OUTPUT,
    NONFINITE,
    SATURATED_OUTPUT,
    USELESS,
    ZERO_OUTPUT,
    Finding,
    Harm,
    Place,
)
from .metrics import Array, Side
from .results import FIXED_SCALES

CLIPPED_SHARE_LIMIT = 0.05
"""
Share of clipped or saturated elements above which there is a finding.

The least and the greatest of n calibrated values are exceeded by 2/(n + 1) of new ones on average:
a calibration as small as 4 samples of a head of 10 classes gives 5 % in a sound model.
"""

_SIGMAS = 3
"""
How many standard deviations above a share a count must lie to be more than chance.

Of few elements a share says little: of 32, 5 % are 1.6, and 5 are not yet a surprise.
"""

_AVERAGED_ENDS = 2
"""
How many elements of a sample may lie outside of a range that is an average over the samples.

A moving average of each sample's least and greatest value, which ai-edge-quantizer calibrates with,
lies where about half of the samples go beyond it, at either end: of small outputs many elements.
"""

CLIPPED_LSB = 1.5
"""
How far, in LSB, the reference must lie outside of the range to be clipped.

Half an LSB is rounding, and the scales that TFLite fixes for SOFTMAX and LOGISTIC (1/256) and TANH
(1/128) leave an exact 1.0 one LSB outside of the range in every sound model.
"""

SATURATED_INSIDE = 1 / 8
"""
How far inside, as a share of the range, the reference of a saturated element must lie.

32 codes of an int8: more than the noise of a deep model, less than the half range that a wrong
multiplier moves the values.
"""


_ENOUGH = 32  # elements needed: fewer say nothing of a range

_LOCALIZE = "edgeq.localize(model, samples)"


class _CodeRange(NamedTuple):
    """The mapping from codes of an output to its values."""

    scale: float
    zero_point: int
    qmin: int
    qmax: int


@dataclass(slots=True)
class _Extremes:
    """Least and greatest value met so far."""

    low: float = math.inf
    high: float = -math.inf

    def update(self, low: float, high: float) -> None:
        self.low, self.high = min(self.low, low), max(self.high, high)

    def merge(self, other: _Extremes) -> None:
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)


def more_than_chance(count: int, elements: int, *, averaged: int = 0) -> bool:
    """Whether more elements than chance explains are clipped or saturated."""
    expected = min(CLIPPED_SHARE_LIMIT * elements + _AVERAGED_ENDS * averaged, elements)
    if not expected:
        return False
    spread = math.sqrt(expected * (1 - expected / elements))
    return count > expected + _SIGMAS * spread


@dataclass(slots=True)
class Outside:
    """
    Counts elements that lie outside of a range, sample by sample.

    Those of one sample go together: a loud one has many, and most have none.
    """

    count: int = 0
    elements: int = 0
    samples: int = 0
    _shares: float = 0.0
    _squares: float = 0.0

    def update(self, count: int, elements: int) -> None:
        """Add one sample."""
        self.count += count
        self.elements += elements
        self.samples += 1
        share = count / elements if elements else 0.0
        self._shares += share
        self._squares += share * share

    def merge(self, other: Outside) -> None:
        """Add all that another one has seen."""
        self.count += other.count
        self.elements += other.elements
        self.samples += other.samples
        self._shares += other._shares
        self._squares += other._squares

    def more_than_chance(self, *, averaged: bool) -> bool:
        """Whether these are more than chance explains, of elements and of samples."""
        samples = self.samples if averaged else 0
        if not more_than_chance(self.count, self.elements, averaged=samples):
            return False
        if self.samples < 2:  # which says nothing of how much samples differ
            return True
        expected = min(CLIPPED_SHARE_LIMIT + _AVERAGED_ENDS * samples / self.elements, 1.0)
        mean = self._shares / self.samples
        squares = self._squares / self.samples
        variance = max(squares - mean**2, 0.0) / (self.samples - 1)
        return mean > expected + _SIGMAS * math.sqrt(variance)


class OutputHealth:
    """Looks at one output sample by sample; merges over processes like the error accumulators."""

    def __init__(self, spec: IOSpec, *, averaged: bool = False) -> None:
        self.spec = spec
        self.averaged = averaged
        self.n_elements = 0
        self._nonfinite = [0, 0]  # reference, actual
        self._extremes = (_Extremes(), _Extremes())  # reference, actual
        self._clipped = Outside()
        self._saturated = 0
        self._at_ends = 0
        self._default = DefaultRange(spec.scale, spec.zero_point, spec.qmin)

    def update(
        self, reference: Array | Side, actual: Array | Side, codes: Array | None = None
    ) -> None:
        """
        Look at one sample.

        Raises:
            ValueError: the shapes differ.
        """
        sides = Side.of(reference), Side.of(actual)
        shapes = {side.array.shape for side in sides}
        if codes is not None:
            shapes.add(np.shape(codes))
        if len(shapes) > 1:
            raise ValueError(
                f"output {self.spec.name!r}: expected one shape for reference, actual and codes, "
                f"got {' and '.join(str(shape) for shape in sorted(shapes))}"
            )
        self.n_elements += sides[0].array.size
        for i, side in enumerate(sides):
            self._nonfinite[i] += side.n_nonfinite
            self._extremes[i].update(*side.ends)
        finite = sides[0].finite
        self._default.update(sides[0].flat if finite is None else sides[0].flat[finite])
        span = self._code_range()
        if span is not None:
            self._count_clipped(sides[0], sides[1].flat, codes, span)

    def _code_range(self) -> _CodeRange | None:
        spec = self.spec
        if spec.scale is None or spec.zero_point is None or spec.qmin is None or spec.qmax is None:
            return None
        if not 0 < spec.scale < math.inf:  # check_scales tells of it
            return None
        return _CodeRange(spec.scale, spec.zero_point, spec.qmin, spec.qmax)

    def _count_clipped(
        self, side: Side, actual: Array, codes: Array | None, span: _CodeRange
    ) -> None:
        reference = side.flat
        scale, zero_point, qmin, qmax = span
        low, high = (qmin - zero_point) * scale, (qmax - zero_point) * scale
        if codes is None:
            with np.errstate(over="ignore"):
                codes = np.rint(actual / scale) + zero_point
        codes = codes.ravel()
        margin, inside = CLIPPED_LSB * scale, SATURATED_INSIDE * (high - low)
        n_clipped = 0
        least, greatest = side.ends
        if least < low - margin or greatest > high + margin:
            clipped = (reference < low - margin) | (reference > high + margin)
            if side.finite is not None:
                clipped &= side.finite  # the others have a finding of their own
            n_clipped = int(np.count_nonzero(clipped))
        self._clipped.update(n_clipped, reference.size)
        ends = np.flatnonzero((codes <= qmin) | (codes >= qmax))
        self._at_ends += ends.size
        if ends.size:
            there = reference[ends]
            well_inside = (there > low + inside) & (there < high - inside)
            self._saturated += int(np.count_nonzero(well_inside))

    def merge(self, other: OutputHealth) -> None:
        """
        Add all that another one of the same output has seen.

        Raises:
            ValueError: the outputs differ.
        """
        if self.spec != other.spec:
            raise ValueError(
                "health of different outputs cannot be merged: "
                f"expected {self.spec}, got {other.spec}"
            )
        self.n_elements += other.n_elements
        self._clipped.merge(other._clipped)
        self._saturated += other._saturated
        self._at_ends += other._at_ends
        self._default.merge(other._default)
        for i in range(2):
            self._nonfinite[i] += other._nonfinite[i]
            self._extremes[i].merge(other._extremes[i])

    def findings(self, calibration: Calibration = UNKNOWN) -> list[Finding]:
        """Return the defects of this output; empty if it is sound."""
        found = [self._nonfinite_finding(), self._constant_finding()]
        found += [self._clipped_finding(calibration), self._saturated_finding()]
        found.append(self._uncalibrated_finding())
        return [finding for finding in found if finding is not None]

    @property
    def _place(self) -> Place:
        return Place("output", self.spec.name)

    def _nonfinite_finding(self) -> Finding | None:
        reference, actual = self._nonfinite
        if not (reference or actual):
            return None
        counted = f"{actual} NaN or infinite of {self.n_elements} elements"
        if reference:
            return Finding(
                kind=NONFINITE,
                place=self._place,
                expected="finite values",
                got=f"{counted}, and {reference} in the float reference itself",
                fix="look at the model (log, sqrt, a division) and at the samples first",
                harm=USELESS,
            )
        return Finding(
            kind=NONFINITE,
            place=self._place,
            expected="finite values",
            got=f"{counted}, where the reference has none",
            fix=f"{_LOCALIZE} names the first op that gives any",
            harm=USELESS,
        )

    def _constant_finding(self) -> Finding | None:
        # One element, such as the class index of one sample, is not yet a constant.
        if self.n_elements < 2 or any(self._nonfinite):
            return None
        reference, actual = self._extremes
        if actual.low != actual.high:
            return None
        spread = (
            f"where the reference is {reference.low:.6g} throughout"
            if reference.low == reference.high
            else f"where the reference runs from {reference.low:.6g} to {reference.high:.6g}"
        )
        away = max(abs(reference.low - actual.low), abs(reference.high - actual.low))
        is_right = away <= (self.spec.scale or 0.0) / 2
        if actual.low == 0:
            # If nothing is detected, a sound model outputs zeros, too.
            if is_right and self.spec.scale in FIXED_SCALES:
                return None
            return Finding(
                kind=ZERO_OUTPUT,
                place=self._place,
                symptom=f"zero in all {self.n_elements} elements, {spread}",
                fix=f"{_LOCALIZE} names the layer"
                if reference.high or reference.low
                else "give samples for which the output is not zero",
                harm=USELESS,
            )
        if reference.low == reference.high and is_right:
            return None
        return Finding(
            kind=CONSTANT_OUTPUT,
            place=self._place,
            symptom=f"{actual.low:.6g} in all {self.n_elements} elements, {spread}",
            fix=f"{_LOCALIZE} names the layer",
            harm=USELESS,
        )

    def _clipped_finding(self, calibration: Calibration) -> Finding | None:
        if not self._clipped.more_than_chance(averaged=self.averaged):
            return None
        reason = calibration.too_narrow()
        return Finding(
            kind=CLIPPED_OUTPUT,
            place=self._place,
            expected=f"the reference within the range of the codes, {self._reach()}",
            got=f"{self._share(self._clipped.count)} outside, as far as "
            f"[{self._extremes[0].low:.3g}, {self._extremes[0].high:.3g}], and "
            f"{self._share(self._at_ends)} at qmin or qmax",
            causes=reason.causes,
            fix=reason.fix,
            harm=Harm.share(self._clipped.count, self.n_elements),
        )

    def _saturated_finding(self) -> Finding | None:
        if not more_than_chance(self._saturated, self.n_elements):
            return None
        return Finding(
            kind=SATURATED_OUTPUT,
            place=self._place,
            symptom="at qmin or qmax though the reference lies well inside of the range in "
            f"{self._share(self._saturated)}",
            causes=("a layer before overflows or is scaled wrongly",),
            fix=f"{_LOCALIZE} names it",
            harm=Harm.share(self._saturated, self.n_elements),
        )

    def _uncalibrated_finding(self) -> Finding | None:
        span = self._code_range()
        if span is None or self.n_elements < _ENOUGH:
            return None
        low, high = self._extremes[0].low, self._extremes[0].high
        return self._default.finding(self._place, low, high, span.qmax - span.qmin + 1)

    def _reach(self) -> str:
        span = self._code_range()
        assert span is not None, "unreachable because without a range nothing is clipped"
        ends = ((code - span.zero_point) * span.scale for code in (span.qmin, span.qmax))
        return f"[{', '.join(f'{end:.3g}' for end in ends)}]"

    def _share(self, count: int) -> str:
        share = 100 * count / self.n_elements
        return f"{count} of {self.n_elements} elements ({share:.3g} %)"


_FEWEST_CODES = 8
"""
Codes, 0 among them, that an input must span: 3 bits of whatever it has.

Pixels that were normalised for the model alone, and not for the calibration, span 6 of 256; those
of sound networks 167 and more, on 4 samples already.
"""


class InputHealth:
    """
    Looks at one quantized input sample by sample.

    Whatever the model makes of it, an input that is cut or rounded away was calibrated with others:
    on zeros, on data that was scaled otherwise, with an outlier.

    Raises:
        ValueError: no scale, zero point or code range.
    """

    def __init__(self, spec: IOSpec, *, averaged: bool = False) -> None:
        scale, zero_point, low, high = spec.scale, spec.zero_point, spec.qmin, spec.qmax
        if scale is None or zero_point is None or low is None or high is None:
            raise ValueError(f"input {spec.name!r}: expected one with a scale, got {spec}")
        self._name = spec.name
        self._averaged = averaged
        self._scale, self._zero_point = scale, zero_point
        self._codes = (low, high)
        self._least, self._greatest = math.inf, -math.inf
        self._outside = Outside()
        self._default = DefaultRange(scale, zero_point, low)

    def update(self, values: Array) -> None:
        """Look at one sample."""
        # check_scales tells of such a scale.
        if not 0 < self._scale < math.inf:
            return
        if not values.size:
            return
        least, greatest = float(values.min()), float(values.max())
        if not (math.isfinite(least) and math.isfinite(greatest)):
            values = values[np.isfinite(values)]
            if not values.size:
                return
            least, greatest = float(values.min()), float(values.max())
        self._default.update(values)
        low, high = self._reach()
        self._least, self._greatest = min(self._least, least), max(self._greatest, greatest)
        margin, count = CLIPPED_LSB * self._scale, 0
        if least < low - margin or greatest > high + margin:
            values = values.astype(np.float64, copy=False)
            outside = (values < low - margin) | (values > high + margin)
            count = int(np.count_nonzero(outside))
        self._outside.update(count, values.size)

    def merge(self, other: InputHealth) -> None:
        """Add all that another one of the same input has seen."""
        self._least = min(self._least, other._least)
        self._greatest = max(self._greatest, other._greatest)
        self._outside.merge(other._outside)
        self._default.merge(other._default)

    def findings(self, calibration: Calibration = UNKNOWN) -> list[Finding]:
        """Return the defects of this input; empty if it is sound."""
        count, elements = self._outside.count, self._outside.elements
        if not elements:
            return []
        low, high = self._reach()
        reach = f"[{low:.3g}, {high:.3g}]"
        met = f"[{self._least:.3g}, {self._greatest:.3g}]"
        if self._outside.more_than_chance(averaged=self._averaged):
            is_empty = keeps_nothing(*self.span)
            reason = ON_NOTHING if is_empty else calibration.too_narrow()
            return [
                Finding(
                    kind=CLIPPED_INPUT,
                    place=self._place,
                    expected=f"values within the range of its codes, {reach}",
                    got=f"{count} of {elements} elements ({100 * count / elements:.3g} %) "
                    f"outside, as far as {met}",
                    causes=reason.causes,
                    fix=reason.fix,
                    harm=Harm.share(count, elements),
                )
            ]
        codes = (max(self._greatest, 0.0) - min(self._least, 0.0)) / self._scale + 1
        all_codes = self._codes[1] - self._codes[0] + 1
        unset = self._default.finding(self._place, self._least, self._greatest, all_codes)
        if elements >= _ENOUGH and unset is not None:
            return [unset]
        # Zeros have nothing to lose, and whole numbers nothing in steps of 1.
        is_coarse = 1 < codes < _FEWEST_CODES and not self._default.is_exact
        if elements >= _ENOUGH and is_coarse:
            reason = calibration.too_wide(self._scale)
            return [
                Finding(
                    kind=COARSE_INPUT,
                    place=self._place,
                    expected=f"its values to span {_FEWEST_CODES} codes or more",
                    got=f"{codes:.2g} of {all_codes}: they lie in {met}, and the codes reach "
                    f"{reach} in steps of {self._scale:.3g}",
                    causes=reason.causes,
                    fix=reason.fix,
                    harm=Harm.decibels(20 * math.log10(all_codes / codes)),
                )
            ]
        return []

    @property
    def span(self) -> tuple[float, float]:
        """Width of the range of the codes, and of the observed values."""
        low, high = self._reach()
        met = max(self._greatest, 0.0) - min(self._least, 0.0)
        return high - low, max(met, 0.0)

    def _reach(self) -> tuple[float, float]:
        low, high = ((code - self._zero_point) * self._scale for code in self._codes)
        return low, high

    @property
    def _place(self) -> Place:
        return Place("input", self._name)
