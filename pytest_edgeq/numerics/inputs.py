"""Health of what goes in: whether the range that an input was calibrated with is one for it."""

from __future__ import annotations

import math

import numpy as np

from .calibration import ON_NOTHING, UNKNOWN, Calibration, keeps_nothing
from .checks import DefaultRange
from .error_sums import BorderSpec
from .findings import CLIPPED_INPUT, COARSE_INPUT, Finding, Harm, Place
from .health import CLIPPED_LSB, Outside
from .sums import Array

_FEWEST_CODES = 8
"""
Codes, 0 among them, that an input must span: 3 bits of whatever it has.

Pixels that were normalised for the model alone, and not for the calibration, span 6 of 256; those
of sound networks 167 and more, on 4 samples already.
"""

_ENOUGH = 32
"""Elements that it takes: fewer say nothing of a range."""


class InputHealth:
    """
    Looks at one quantized input sample by sample.

    Whatever the model makes of it, an input that is cut or rounded away was calibrated with others:
    on zeros, on data that was scaled otherwise, with an outlier.

    Raises:
        ValueError: no scale, zero point or code range.
    """

    def __init__(self, spec: BorderSpec, *, averaged: bool = False) -> None:
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
        """Return what is wrong with this input; empty where it is sound."""
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
        """Width of what the codes reach, and of the values met; 0 where none was."""
        low, high = self._reach()
        met = max(self._greatest, 0.0) - min(self._least, 0.0)
        return high - low, max(met, 0.0)

    def _reach(self) -> tuple[float, float]:
        low, high = ((code - self._zero_point) * self._scale for code in self._codes)
        return low, high

    @property
    def _place(self) -> Place:
        return Place("input", self._name)
