"""Why a range does not fit the values met, as far as the calibration samples are known."""

from __future__ import annotations

from typing import Final, NamedTuple

LEAST_SCALE: Final = 2.0**-12
"""The least scale that torchao's observers give (`eps` of its quantizers)."""

_AT_LEAST_SCALE = "PT2E gives no scale below 2⁻¹²"

_CHANGED = "the model's weights or code changed after the calibration"

# More samples do not help.
_AVERAGES = (
    "averages the ranges of the samples, and cuts about half of them at the ends: if they are "
    "alike, pt2e_static_int8 keeps the least and the greatest value of all"
)


class Reason(NamedTuple):
    """
    Why a range does not fit.

    Attributes:
        causes: What is known of it, a clause each.
        fix: What to change; empty where the cause says it.
    """

    causes: tuple[str, ...] = ()
    fix: str = ""

    def __str__(self) -> str:
        """Return one clause."""
        return "; ".join((*self.causes, *([self.fix] if self.fix else [])))


class Calibration(NamedTuple):
    """
    How the evaluated samples relate to those of the calibration.

    Attributes:
        evaluated: How many samples were evaluated.
        known: How many of them the file was calibrated on; 0, too, where a loaded file does not
            tell.
        averages: Whether the file's ranges are averages over samples, as of a recipe; False where
            a loaded file does not tell.
    """

    evaluated: int = 0
    known: int = 0
    averages: bool = False

    @property
    def is_own(self) -> bool:
        """Whether the file was calibrated on every sample that was evaluated."""
        return 0 < self.evaluated <= self.known

    def too_wide(self, scale: float | None = None) -> Reason:
        """Return why a range is mostly unused, or the check that tells the causes apart."""
        if scale == LEAST_SCALE:
            return Reason((_AT_LEAST_SCALE,), "leave what is so small in float, or scale it up")
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
        """Return the cause of a range that clips values, or the calibration that mends it."""
        if self.is_own:
            own = f"the file was calibrated on {self._samples}, so others will not widen it"
            if self.averages:
                own += (
                    f": either a recipe {_AVERAGES}, or {_CHANGED} (then a file built anew has "
                    "another range)"
                )
            else:
                own += f": {_CHANGED}"
            return Reason((own,))
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
    """Whether a range keeps one value in a hundred at most: calibration gave it next to nothing."""
    return 0 < reach <= needed / 100


ON_NOTHING: Final = Reason(
    ("the calibration samples are zero there, or next to it",),
    "calibrate with samples like those evaluated, preprocessed alike",
)
"""Why an input's range keeps nothing."""

UNKNOWN: Final = Calibration()
"""Nothing is known of the calibration samples."""
