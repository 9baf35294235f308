"""
What of the build is remembered beside its errors: changes that these may not show.

Of a range that was too narrow a much wider one makes the errors better, and leaves few codes. One
sample may have nearly the range of many by chance. Asymmetric weights lose less, and are what int8
kernels and accelerators do not take (the quantization specification of TensorFlow Lite, "Symmetric
vs asymmetric": the zero point of int8 weights is 0). An op that hands codes on, and has another
scale than what it takes, rounds once more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["build_problem", "describe_build"]

_HALF = 0.5
"""A bit: another order of the same data moves averaged ranges by some per cent, others not."""


def build_problem(data: Mapping[str, Any]) -> str:
    """Tell what is wrong with what is remembered of a build, as it was read."""
    scales = data.get("scales", {})
    if not isinstance(scales, dict) or not all(map(_is_scale, scales.values())):
        return "data.scales is not a scale for each of some ops"
    calibrated = data.get("n_calibrated", 0)
    if isinstance(calibrated, bool) or not isinstance(calibrated, int):
        return "data.n_calibrated is not a whole number"
    for key in ("asymmetric", "shared"):
        ops = data.get(key, [])
        if not isinstance(ops, list) or not all(isinstance(each, str) for each in ops):
            return f"data.{key} is not a list of ops"
    return ""


def _is_scale(value: object) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and 0 <= value < math.inf  # type: ignore[operator]


def describe_build(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Tell what of a build is another than remembered, a line each."""
    return [*_ranges(old, new), *_samples(old, new), *_weights(old, new), *_sharing(old, new)]


def _ranges(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Activations whose range is another by a bit; the op-dtype map tells of ops not in both."""
    before, after = old.get("scales", {}), new.get("scales", {})
    ratios = {
        where: after[where] / scale for where, scale in before.items() if where in after and scale
    }
    moved = {where: ratio for where, ratio in ratios.items() if not _HALF <= ratio <= 1 / _HALF}
    if not moved:
        return []
    where = max(moved, key=lambda each: abs(math.log(moved[each] or math.ulp(0.0))))
    return [
        f"activation ranges moved: {where}: expected a scale within 2 × of {before[where]:.4g}, "
        f"got {after[where]:.4g} ({len(moved)} of {len(ratios)} activations): calibrated with "
        "other data, an outlier, or other preprocessing"
    ]


def _samples(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Calibration samples of which less than half are left; a loaded file tells of none."""
    before, after = old.get("n_calibrated", 0), new.get("n_calibrated", 0)
    if not after or after >= _HALF * before:
        return []
    return [
        f"calibrated on fewer samples: expected at least half of the {before} different ones that "
        f"were remembered, got {after}: what they do not reach will be clipped"
    ]


def _weights(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    before, after = set(old.get("asymmetric", [])), set(new.get("asymmetric", []))
    lines = []
    for changed, expected, got in (
        (after - before, "symmetric", "asymmetric"),
        (before - after, "asymmetric", "symmetric"),
    ):
        if changed:
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            lines.append(
                f"weights became {got}: {min(changed)}{more}: expected {expected} ones, got "
                f"{'zero points other than 0' if got == 'asymmetric' else 'zero points of 0'}"
            )
    return lines


def _sharing(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Ops that no longer give the scale and zero point that they take; known ones alone."""
    known = set(new.get("scales", {}))
    parted = [op for op in old.get("shared", []) if op in known and op not in new.get("shared", [])]
    if not parted:
        return []
    more = f" and {len(parted) - 1} more" if len(parted) > 1 else ""
    return [
        f"parameters no longer shared: {parted[0]}{more}: expected the scale and zero point of its "
        "input, got others: it rounds once more"
    ]
