"""
Health checks: defects that a loose budget would accept.

Every rule has a limit that is stated with its reason, so that a finding is worth to act on.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

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
from .static_health import ON_NOTHING, UNKNOWN, Calibration, keeps_nothing, uncalibrated_finding

# Share of clipped or saturated elements above which there is a finding. The least and the greatest
# of n calibrated values are exceeded by 2/(n + 1) of new ones on average: a calibration as small as
# 4 samples of a head of 10 classes gives 5 % in a sound model.
CLIPPED_SHARE_LIMIT = 0.05

# How many standard deviations above a share a count must lie to be more than chance. For few
# elements a share means little: 5 % of 32 are 1.6, and 5 may occur by chance.
_SIGMAS = 3

# How many elements of a sample may lie outside of a range that is an average over the samples. A
# moving average of each sample's least and greatest value, which ai-edge-quantizer calibrates with,
# lies where about half of the samples go beyond it, at either end.
_AVERAGED_ENDS = 2

# How far, in LSB, the reference must lie outside of the range to be clipped. Half an LSB is
# rounding, and the scales that TFLite fixes for SOFTMAX and LOGISTIC (1/256) and TANH (1/128) leave
# an exact 1.0 one LSB outside of the range in every sound model.
CLIPPED_LSB = 1.5

# How far inside, as a share of the range, the reference of a saturated element must lie: 32 codes
# of an int8 are more than the noise of a deep model, less than the half range that a wrong
# multiplier moves the values.
SATURATED_INSIDE = 1 / 8

# Least share of the codes spanned by values of a range chosen on purpose. Inputs in steps of 1 are
# integers, recognized as such; outputs are rounded to integers.
_FILLED = {"input": 1 / 4, "output": 1 / 32}

# Codes, 0 among them, that an input must span: 3 bits of whatever it has. Pixels that were
# normalised for the model alone, and not for the calibration, span 6 of 256; those of sound
# networks 167 and more, on 4 samples already.
_FEWEST_CODES = 8

_ENOUGH = 32  # elements needed: fewer say nothing of a range

_LOCALIZE = "edgeq.localize(model, samples)"


def more_than_chance(count: int, elements: int, *, averaged: int = 0) -> bool:
    """Whether more elements than chance explains are clipped or saturated."""
    expected = min(CLIPPED_SHARE_LIMIT * elements + _AVERAGED_ENDS * averaged, elements)
    if not expected:
        return False
    spread = math.sqrt(expected * (1 - expected / elements))
    return count > expected + _SIGMAS * spread


class _CodeSpan(NamedTuple):
    """The codes of an input or output, and the values at their ends."""

    scale: float
    zero_point: int
    qmin: int
    qmax: int

    @staticmethod
    def of(spec: IOSpec) -> _CodeSpan | None:
        """Return None if parameters are missing or unsound; check_scales reports it."""
        known: Any = spec[1:5]
        return _CodeSpan(*known) if None not in known and 0 < known[0] < math.inf else None

    @property
    def ends(self) -> tuple[float, float]:
        low, high = ((code - self.zero_point) * self.scale for code in (self.qmin, self.qmax))
        return low, high

    @property
    def number(self) -> int:
        return self.qmax - self.qmin + 1


class _Health:
    """Values of an input, or of the reference of an output, against the range of its codes."""

    def __init__(self, spec: IOSpec, *, averaged: bool = False) -> None:
        self.spec = spec
        self._averaged = averaged
        self._codes = _CodeSpan.of(spec)
        self._is_default = spec[1:3] == (1.0, 0) and spec.qmin is not None and spec.qmin < 0
        self._is_whole = True
        self._low, self._high = math.inf, -math.inf
        self._outside: list[tuple[int, int]] = []  # elements outside, and all, of each sample

    def _add(self, side: Side, elements: int) -> None:
        """Add the finite values of one sample."""
        values, (low, high) = side.finite, side.ends
        self._low, self._high = min(self._low, low), max(self._high, high)
        if self._codes is None:
            return
        if self._is_default and self._is_whole:
            self._is_whole = bool((values == np.rint(values)).all())
        margin, count = CLIPPED_LSB * self._codes.scale, 0
        least, greatest = self._codes.ends
        if low < least - margin or high > greatest + margin:
            exact = values.astype(np.float64)
            outside = (exact < least - margin) | (exact > greatest + margin)
            count = int(np.count_nonzero(outside))
        self._outside.append((count, elements))

    def merge(self, other: Any) -> None:
        """Add all that another one of the same input or output has seen."""
        self._is_whole &= other._is_whole
        self._low, self._high = min(self._low, other._low), max(self._high, other._high)
        self._outside += other._outside

    @property
    def _clipped(self) -> tuple[int, int] | None:
        """Elements outside and all, if these are more than chance explains, also of samples."""
        counts = np.array(self._outside or [(0, 0)])
        count, elements = map(int, counts.sum(axis=0))
        averaged = len(counts) if self._averaged else 0
        if not more_than_chance(count, elements, averaged=averaged):
            return None
        if len(counts) > 1:
            # Those of one sample go together: a loud one has many, and most have none.
            shares = counts[:, 0] / np.maximum(counts[:, 1], 1)
            expected = min(CLIPPED_SHARE_LIMIT + _AVERAGED_ENDS * averaged / elements, 1.0)
            error = float(np.std(shares, ddof=1)) / math.sqrt(len(shares))
            if float(shares.mean()) <= expected + _SIGMAS * error:
                return None
        return count, elements

    @property
    def _range(self) -> str:
        assert self._codes is not None, "unreachable because without a range nothing is clipped"
        return "[{:.3g}, {:.3g}]".format(*self._codes.ends)

    @property
    def _met(self) -> str:
        return f"[{self._low:.3g}, {self._high:.3g}]"

    def _uncalibrated_finding(self, place: Place) -> Finding | None:
        """Return the finding, if fractions fill few codes of scale 1.0 and zero point 0."""
        if self._codes is None or not self._is_default or self._is_whole:
            return None
        used, codes = max(self._high, 0.0) - min(self._low, 0.0) + 1, self._codes.number
        if not 1 < used < codes * _FILLED[place.kind]:
            return None
        evidence = f"and its values, in {self._met}, span {used:.2g} of {codes} codes"
        return uncalibrated_finding(place, evidence, Harm.decibels(20 * math.log10(codes / used)))


class OutputHealth(_Health):
    """Looks at one output sample by sample; merges over processes like the error accumulators."""

    def __init__(self, spec: IOSpec, *, averaged: bool = False) -> None:
        super().__init__(spec, averaged=averaged)
        self.n_elements = 0
        self._nonfinite = np.zeros(2, np.int64)  # reference, actual
        self._actual = (math.inf, -math.inf)
        self._saturated = self._at_ends = 0
        self._place = Place("output", spec.name)

    def update(
        self, reference: Array | Side, actual: Array | Side, codes: Array | None = None
    ) -> None:
        """Look at one sample, of equal shapes."""
        expected, got = Side.of(reference), Side.of(actual)
        self.n_elements += expected.array.size
        self._nonfinite += (expected.n_nonfinite, got.n_nonfinite)
        self._actual = min(self._actual[0], got.ends[0]), max(self._actual[1], got.ends[1])
        self._add(expected, expected.flat.size)
        if self._codes is None:
            return
        if codes is None:
            with np.errstate(over="ignore"):
                codes = np.rint(got.flat / self._codes.scale) + self._codes.zero_point
        codes = codes.ravel()
        ends = np.flatnonzero((codes <= self._codes.qmin) | (codes >= self._codes.qmax))
        self._at_ends += ends.size
        low, high = self._codes.ends
        inside, there = SATURATED_INSIDE * (high - low), expected.flat[ends]
        self._saturated += int(np.count_nonzero((there > low + inside) & (there < high - inside)))

    def merge(self, other: OutputHealth) -> None:
        """Add all that another one of the same output has seen."""
        super().merge(other)
        self.n_elements += other.n_elements
        self._nonfinite += other._nonfinite
        (low, high), (least, greatest) = self._actual, other._actual
        self._actual = min(low, least), max(high, greatest)
        self._saturated += other._saturated
        self._at_ends += other._at_ends

    def findings(self, calibration: Calibration = UNKNOWN) -> list[Finding]:
        """Return the defects of this output; empty if it is sound."""
        found = [self._nonfinite_finding(), self._constant_finding()]
        found += [self._clipped_finding(calibration), self._saturated_finding()]
        if self.n_elements >= _ENOUGH:
            found.append(self._uncalibrated_finding(self._place))
        return [finding for finding in found if finding is not None]

    def _nonfinite_finding(self) -> Finding | None:
        reference, actual = self._nonfinite
        if not self._nonfinite.any():
            return None
        counted = f"{actual} NaN or infinite of {self.n_elements} elements"
        got = f"{counted}, where the reference has none"
        fix = f"{_LOCALIZE} names the first op that has any"
        if reference:
            got = f"{counted}, and {reference} in the float reference itself"
            fix = "look at the model (log, sqrt, a division) and at the samples first"
        return Finding(
            kind=NONFINITE,
            place=self._place,
            expected="finite values",
            got=got,
            fix=fix,
            harm=USELESS,
        )

    def _constant_finding(self) -> Finding | None:
        actual, low, high = self._actual[0], self._low, self._high
        # One element, such as the class index of one sample, is not yet a constant.
        if self.n_elements < 2 or self._nonfinite.any() or actual != self._actual[1]:
            return None
        is_right = max(abs(low - actual), abs(high - actual)) <= (self.spec.scale or 0.0) / 2
        # If nothing is detected, a sound model outputs zeros, too.
        if is_right and (low == high if actual else self.spec.scale in FIXED_SCALES):
            return None
        same = f"is {low:.6g} throughout"
        where = same if low == high else f"runs from {low:.6g} to {high:.6g}"
        is_tested = actual or low or high
        return Finding(
            kind=CONSTANT_OUTPUT if actual else ZERO_OUTPUT,
            place=self._place,
            symptom=f"{f'{actual:.6g}' if actual else 'zero'} in all {self.n_elements} elements, "
            f"where the reference {where}",
            fix=f"{_LOCALIZE} names the layer"
            if is_tested
            else "give samples for which the output is not zero",
            harm=USELESS,
        )

    def _clipped_finding(self, calibration: Calibration) -> Finding | None:
        if (clipped := self._clipped) is None:
            return None
        reason = calibration.too_narrow()
        return Finding(
            kind=CLIPPED_OUTPUT,
            place=self._place,
            expected=f"the reference within the range of the codes, {self._range}",
            got=f"{self._share(clipped[0])} outside, as far as {self._met}, and "
            f"{self._share(self._at_ends)} at qmin or qmax",
            causes=reason.causes,
            fix=reason.fix,
            harm=Harm.share(*clipped),
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

    def _share(self, count: int) -> str:
        share = 100 * count / self.n_elements
        return f"{count} of {self.n_elements} elements ({share:.3g} %)"


class InputHealth(_Health):
    """
    Looks at one quantized input sample by sample; mergeable.

    Whatever the model makes of it, an input that is cut or rounded away was calibrated with others:
    on zeros, on data that was scaled otherwise, with an outlier.
    """

    def update(self, values: Array) -> None:
        """Look at one sample."""
        side = Side(values)
        if side.finite.size:
            self._add(side, side.finite.size)

    @property
    def span(self) -> tuple[float, float]:
        """Width of the range of the codes, and of the observed values."""
        low, high = (0.0, 0.0) if self._codes is None else self._codes.ends
        return high - low, max(max(self._high, 0.0) - min(self._low, 0.0), 0.0)

    def findings(self, calibration: Calibration = UNKNOWN) -> list[Finding]:
        """Return the defects of this input; empty if it is sound."""
        if self._codes is None:
            return []
        place = Place("input", self.spec.name)
        if (clipped := self._clipped) is not None:
            count, elements = clipped
            reason = ON_NOTHING if keeps_nothing(*self.span) else calibration.too_narrow()
            return [
                Finding(
                    kind=CLIPPED_INPUT,
                    place=place,
                    expected=f"values within the range of its codes, {self._range}",
                    got=f"{count} of {elements} elements ({100 * count / elements:.3g} %) "
                    f"outside, as far as {self._met}",
                    causes=reason.causes,
                    fix=reason.fix,
                    harm=Harm.share(count, elements),
                )
            ]
        if sum(elements for _, elements in self._outside) < _ENOUGH:
            return []
        if (unset := self._uncalibrated_finding(place)) is not None:
            return [unset]
        scale, codes = self._codes.scale, self.span[1] / self._codes.scale + 1
        # Zeros have nothing to lose, and whole numbers nothing in steps of 1.
        if not 1 < codes < _FEWEST_CODES or (self._is_default and self._is_whole):
            return []
        reason = calibration.too_wide(scale)
        return [
            Finding(
                kind=COARSE_INPUT,
                place=place,
                expected=f"its values to span {_FEWEST_CODES} codes or more",
                got=f"{codes:.2g} of {self._codes.number}: they lie in {self._met}, and the codes "
                f"reach {self._range} in steps of {scale:.3g}",
                causes=reason.causes,
                fix=reason.fix,
                harm=Harm.decibels(20 * math.log10(self._codes.number / codes)),
            )
        ]
