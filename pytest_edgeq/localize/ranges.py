"""What the ranges of a file say of its calibration, all of them together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from pytest_edgeq.localize.rows import Evidence, LayerError
from pytest_edgeq.numerics.health import AVERAGES

__all__ = ["FAR", "OtherSamples", "other_samples", "overshoot"]

FAR = 0.1
"""Share of a range's width; values that go beyond it so far are no chance of a few samples more."""

_HALF = 0.5
"""Share of a range: a bit is left unused."""

_LEAST = 5
"""Ranges that it takes to tell of all."""

_FIXED = {"SOFTMAX", "LOGISTIC", "TANH"}
"""Ops whose range TFLite fixes, whatever the values are."""


class OtherSamples(NamedTuple):
    """
    How samples differ from those of the calibration.

    Attributes:
        text: In words; empty where they do not.
        half_empty: Whether it is that they leave half of most ranges empty.
    """

    text: str = ""
    half_empty: bool = False


def other_samples(rows: Sequence[LayerError], evidence: Sequence[Evidence]) -> OtherSamples:
    """
    Tell what many ranges say, each of which may be chance: values far beyond, or few of them used.

    Of sound networks that were calibrated on 64 samples one range in 26, or in 9, is left by a
    tenth of its width, and the median is filled to 86 % and more. Calibrated on 2 samples, or at
    half the amplitude, a quarter of them are left so far.

    Args:
        rows: In execution order.
        evidence: One a row.
    """
    spans = [
        (fill, given)
        for row, given in zip(rows, evidence, strict=True)
        if not given.untaken and row.op not in _FIXED and (fill := _fill(given))
    ]
    if len(spans) < _LEAST:
        return OtherSamples()
    filled = median(fill for fill, _ in spans)
    if filled < _HALF:
        text = (
            f"values fill {100 * filled:.2g} % of their ranges, in the median of {len(spans)}: "
            "evaluated with others than calibrated, or preprocessed otherwise"
        )
        return OtherSamples(text, half_empty=True)
    narrow = [(fill, given) for fill, given in spans if overshoot(given) >= FAR]
    if len(narrow) < max(2, len(spans) / 8):
        return OtherSamples()
    averages = AVERAGES if any(given.averaged for _, given in narrow) else ""
    return OtherSamples(
        f"{len(narrow)} of {len(spans)} ranges are too narrow (values span "
        f"{median(fill for fill, _ in narrow):.2g} × as much, in the median of these): calibrate "
        f"on samples like those evaluated, and on more{averages}"
    )


def overshoot(evidence: Evidence) -> float:
    """How far torch's values go beyond a range, as a share of its width."""
    if not _fill(evidence):
        return 0.0
    assert evidence.reach is not None
    assert evidence.reference is not None
    (low, high), (least, greatest) = evidence.reach, evidence.reference
    return max(greatest - high, low - least, 0.0) / (high - low)


def _fill(evidence: Evidence) -> float:
    """How wide torch's values are, as a share of what codes reach; 0 where that is not known."""
    if evidence.reach is None or evidence.reference is None:
        return 0.0
    (low, high), (least, greatest) = evidence.reach, evidence.reference
    # A range has 0 in it, however far from it all values lie.
    span = max(greatest, 0.0) - min(least, 0.0)
    return span / (high - low) if high > low and math.isfinite(span) else 0.0
