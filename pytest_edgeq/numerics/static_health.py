"""Health checks without inference: scales, biases, and causes in the calibration."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from .findings import (
    BAD_SCALE,
    BIAS_AT_INT32_LIMIT,
    NO_HARM,
    UNCALIBRATED_ACTIVATION,
    Finding,
    Harm,
    Place,
)
from .metrics import Array

_INT32 = np.iinfo(np.int32)


def check_scales(place: Place, scales: Array) -> list[Finding]:
    """Return the finding `bad_scale` for the scales of one tensor, or none."""
    values = np.asarray(scales, dtype=np.float64).ravel()
    tiny = float(np.finfo(np.float32).tiny)
    defects = {
        "zero": values == 0,
        "subnormal": (values > 0) & (values < tiny),
        "negative": values < 0,
        "not finite": ~np.isfinite(values),
    }
    bad = np.logical_or.reduce(list(defects.values()))
    if not bad.any():
        return []
    n_bad, first = int(np.count_nonzero(bad)), int(bad.argmax())
    kinds = " and ".join(name for name, mask in defects.items() if mask.any())
    return [
        Finding(
            kind=BAD_SCALE,
            place=place,
            expected="positive normal scales",
            got=f"{kinds} in {n_bad} of {values.size} (the first at channel {first}: "
            f"{values[first]:.6g})",
            causes=("a channel without range, or never observed",),
            harm=Harm.share(n_bad, values.size),
        )
    ]


def has_default_parameters(scales: Array, zero_points: Array, dtype: str) -> bool:
    """
    Whether an activation has scale 1.0 and zero point 0, which an observer without samples leaves.

    They are right for whole numbers from -128 to 127, and of uint8 for raw pixels.
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


def check_bias(place: Place, values: Array) -> list[Finding]:
    """Return the finding `bias_at_int32_limit` for the codes of one bias, or none."""
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


LEAST_SCALE: Final = 2.0**-12
"""The least scale that torchao's observers give (`eps` of its quantizers)."""

_CHANGED = "the model's weights or code changed after the calibration"

# More samples do not help.
_AVERAGES = (
    "averages the samples' ranges, which clips about half of the samples: if all are alike, "
    "pt2e_static_int8 keeps the least and the greatest value of all"
)


class Reason(NamedTuple):
    """Why a range does not fit."""

    causes: tuple[str, ...] = ()  # what is known of it, a clause each
    fix: str = ""  # what to change; empty where the cause says it

    def __str__(self) -> str:
        """Return one clause."""
        return "; ".join(filter(None, (*self.causes, self.fix)))


class Calibration(NamedTuple):
    """How the evaluated samples relate to those of the calibration."""

    evaluated: int = 0  # how many samples were evaluated
    known: int = 0  # how many of them the file was calibrated on, as far as it is known
    averages: bool = False  # whether the file's ranges are averages over samples, as of a recipe

    @property
    def is_own(self) -> bool:
        """Whether the file was calibrated on every sample that was evaluated."""
        return 0 < self.evaluated <= self.known

    def too_wide(self, scale: float | None = None) -> Reason:
        """Return why a range is mostly unused, or a check that distinguishes the causes."""
        if scale == LEAST_SCALE:
            cause = "PT2E chooses no scale below 2⁻¹²"
            return Reason((cause,), "leave what is so small in float, or scale it up")
        if self.is_own:
            cause = (
                f"the file was calibrated on {self._samples}, so they are not the cause: another "
                "calibration sample is an outlier (compare the greatest values of each), or "
                f"{_CHANGED}"
            )
            return Reason((cause,))
        return Reason(
            fix="compare the values of the calibration samples, one of which may be an outlier, "
            "with those of the evaluated samples, which may be preprocessed otherwise"
        )

    def too_narrow(self, *, on_more: bool = False) -> Reason:
        """Return the cause of a range that clips values, or the calibration that fixes it."""
        if self.is_own:
            changed = (
                f"either a recipe {_AVERAGES}, or {_CHANGED} (then a file built anew has another "
                "range)"
            )
            own = f"the file was calibrated on {self._samples}, so others will not widen it"
            return Reason((f"{own}: {changed if self.averages else _CHANGED}",))
        more = ", and on more" if on_more else ""
        averages = f"; a recipe {_AVERAGES}" if self.averages else ""
        return Reason(
            fix=f"calibrate with samples like those evaluated, preprocessed alike{more}{averages}"
        )

    @property
    def _samples(self) -> str:
        if self.evaluated == 1:
            return "the one sample evaluated"
        return f"all {self.evaluated} samples evaluated"


def keeps_nothing(reach: float, needed: float) -> bool:
    """Whether a range covers at most 1 % of the needed one: it was hardly calibrated."""
    return 0 < reach <= needed / 100


ON_NOTHING: Final = Reason(
    ("the calibration samples are zero or nearly zero there",),
    "calibrate with samples like those evaluated, preprocessed alike",
)
"""Why an input's range keeps nothing."""

UNKNOWN: Final = Calibration()  # nothing is known of the calibration samples
