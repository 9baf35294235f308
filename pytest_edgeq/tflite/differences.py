"""
Explain how a constant differs from its reference.

An explanation is named only if every element of the constant agrees with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pytest_edgeq.tflite.boundary import code_range
from pytest_edgeq.tflite.constants import Constant
from pytest_edgeq.tflite.ops import facts_of

Array: TypeAlias = npt.NDArray[Any]

_LISTED = 3
"""Channels that are described one by one."""


@dataclass(frozen=True, eq=False)
class Claim:
    """
    A stored constant and its reference. All arrays have its shape, in the file's layout.

    Attributes:
        actual: The stored values, in steps from the zero point; floats as they are.
        target: The reference, in steps, not rounded.
        tolerance: The greatest allowed difference.
        low: The lowest step that a code can stand for.
        high: The highest.
        unit: The size of a step; 1 for floats.
        axes: The name of an index along each axis.
        channel_axis: The axis of the channels.
        quantized: Steps are codes.
    """

    actual: Array
    target: Array
    tolerance: Array
    low: Array
    high: Array
    unit: Array
    axes: tuple[str, ...]
    channel_axis: int
    quantized: bool

    @cached_property
    def holds(self) -> Array:
        """Where the stored value agrees with the reference."""
        return self.fits(self.target)

    def fits(self, target: Array, at: Any = ...) -> Array:
        """Where the stored steps are these, if rounded to the nearest and cut off at the limits."""
        clipped = np.clip(target, self.low[at], self.high[at])
        result: Array = np.abs(self.actual[at] - clipped) <= self.tolerance[at]
        return result


def claim_of(
    op_name: str,
    stored: Constant,
    target: Array,
    tolerance: Array | float,
    *,
    exact: bool = False,
) -> Claim:
    """Return what must hold, in the units of the stored values: steps of the scale, or floats."""
    shape = stored.values.shape
    low: Array = np.full((1,) * len(shape), -np.inf)
    high, unit, steps = -low, np.ones_like(low), stored.values
    if stored.scales is not None and stored.zero_points is not None:
        steps, unit = stored.values - stored.zero_points, stored.scales
        limits = code_range(stored.dtype)
        # A symmetric range leaves the lowest code out, as far as can be seen.
        narrow = not (exact or stored.zero_points.any() or (stored.values == limits[0]).any())
        low = limits[0] + narrow - stored.zero_points.astype(np.float64)
        high = limits[1] - stored.zero_points.astype(np.float64)
    channels = [i for i, length in enumerate(np.shape(unit)) if length > 1]
    axes = _axis_names(op_name, len(shape))
    return Claim(
        actual=steps.astype(np.float64),
        target=target,
        tolerance=np.broadcast_to(tolerance, shape),
        low=np.broadcast_to(low, shape),
        high=np.broadcast_to(high, shape),
        unit=np.broadcast_to(unit, shape),
        axes=axes,
        channel_axis=channels[0] if len(channels) == 1 else _channel_axis(axes),
        quantized=stored.scales is not None,
    )


def _axis_names(op_name: str, ndim: int) -> tuple[str, ...]:
    """Return a name for each axis of an op's constant."""
    names = facts_of(op_name).axes
    if len(names) == ndim:
        return names
    return (*(f"index of axis {i}" for i in range(ndim - 1)), "channel")


def _channel_axis(names: tuple[str, ...]) -> int:
    """Return the axis of the output channels."""
    return next((i for i, name in enumerate(names) if name in ("output channel", "channel")), 0)


def explain(claim: Claim) -> str:
    """Explain how a constant differs from its reference."""
    ways: tuple[Callable[[Claim], str | None], ...] = (
        _nonfinite,
        _all_zero,
        _one_element,
        _negated,
        _by_channel,
        _scaled,
    )
    return next(filter(None, (way(claim) for way in ways)), None) or _at_large(claim)


def _count(claim: Claim) -> str:
    wrong, total = int((~claim.holds).sum()), claim.actual.size
    return f"{wrong} of {total} {'differ' if wrong != 1 else 'differs'}"


def _nonfinite(claim: Claim) -> str | None:
    wrong = int((~np.isfinite(claim.actual)).sum())
    return f"{wrong} of {claim.actual.size} are NaN or infinite" if wrong else None


def _all_zero(claim: Claim) -> str | None:
    return None if claim.actual.any() else f"all {claim.actual.size} are zero"


def _one_element(claim: Claim) -> str | None:
    wrong = np.flatnonzero(~claim.holds)
    if len(wrong) != 1:
        return None
    place = np.unravel_index(int(wrong[0]), claim.actual.shape)
    index = [int(i) for i in place]
    if not claim.quantized:
        actual, target = float(claim.actual[place]), float(claim.target[place])
        return f"{_count(claim)}: {index} is {actual:.6g} where the reference gives {target:.6g}"
    actual = int(claim.actual[place])
    wanted = np.clip(claim.target[place], claim.low[place], claim.high[place])
    nearest = int(np.rint(wanted))
    sign = " (its sign)" if actual == -nearest else ""
    return f"{_count(claim)}: {index} is {actual} where the reference gives {nearest}{sign}"


def _negated(claim: Claim) -> str | None:
    return "negated" if claim.fits(-claim.target).all() else None


def _slice(axis: int, index: int) -> tuple[Any, ...]:
    return (*(slice(None) for _ in range(axis)), index)


def _by_channel(claim: Claim) -> str | None:
    """Describe the channels that are wrong, where at least as many are right."""
    aside = tuple(i for i in range(claim.actual.ndim) if i != claim.channel_axis)
    right = claim.holds.all(axis=aside)
    wrong = np.flatnonzero(~right)
    if not len(wrong) or right.sum() < len(wrong):
        return None
    name = claim.axes[claim.channel_axis]
    told = [f"{name} {channel} {_channel(claim, int(channel))}" for channel in wrong[:_LISTED]]
    more = f" and {len(wrong) - _LISTED} more {name}s" if len(wrong) > _LISTED else ""
    return f"{', '.join(told)}{more} ({_count(claim)})"


def _channel(claim: Claim, channel: int) -> str:
    at = _slice(claim.channel_axis, channel)
    actual, target = claim.actual[at], claim.target[at]
    if not actual.any():
        return "is zero"
    if actual.size > 1:
        if claim.fits(-target, at).all():
            return "is negated"
        held = _held(claim, channel)
        if held is not None:
            return f"holds {claim.axes[claim.channel_axis]} {held}"
    elif actual == -np.rint(target):
        return "is negated"
    ratio = _scale_ratio(claim, at) if claim.quantized and actual.size > 1 else None
    if ratio is not None:
        return f"has a scale of {ratio} × the reference's"
    wrong = ~claim.holds[at]
    worst = np.abs(actual - target)[wrong].max()
    unit, digits = (" codes", ".0f") if claim.quantized else ("", ".3g")
    return f"is off in {int(wrong.sum())} of {actual.size}{unit} by up to {worst:{digits}}"


def _held(claim: Claim, channel: int) -> int | None:
    """Return the channel whose values another one holds, in either one's scale."""
    at = _slice(claim.channel_axis, channel)
    for other in range(claim.actual.shape[claim.channel_axis]):
        there = _slice(claim.channel_axis, other)
        steps = claim.target[there]
        if other != channel and any(
            claim.fits(each, at).all()
            for each in (steps, steps * claim.unit[there] / claim.unit[at])
        ):
            return other
    return None


def _scale_ratio(claim: Claim, at: Any = ...) -> str | None:
    """
    Return the stored scale over the right one, if that alone makes the codes wrong.

    With a code n of a value x in steps, the right scale is between x/(n + ½) and x/(n − ½) of the
    stored one; one at a limit has no upper bound on x.
    """
    actual, target = claim.actual[at].ravel(), claim.target[at].ravel()
    steps, sizes = np.abs(actual), np.abs(target)
    if ((actual * target < 0) & (sizes > 0.5)).any():
        return None
    at_limit = (actual >= claim.high[at].ravel()) | (actual <= claim.low[at].ravel())
    bounded = ~at_limit
    lower = (sizes[bounded] / (steps[bounded] + 0.5)).max(initial=0.0)
    counted = (steps > 0) & (sizes > 0)
    upper = (sizes[counted] / (steps[counted] - 0.5)).min(initial=np.inf)
    # float32's rounding of the bounds.
    if not 0 < lower <= upper * (1 + 1e-6) < np.inf:
        return None
    inverse = 2 / (lower + upper)
    return f"{inverse:.3g}" if abs(inverse - 1) >= 5e-3 else f"{inverse:.6f}"


def _scaled(claim: Claim) -> str | None:
    if claim.actual.size < 2 or not claim.quantized:
        return None
    ratio = _scale_ratio(claim)
    if ratio is not None:
        return f"the scale is {ratio} × the reference's ({_count(claim)})"
    if np.ptp(claim.unit) == 0:
        return None
    ratios = [
        _scale_ratio(claim, _slice(claim.channel_axis, i))
        for i in range(claim.actual.shape[claim.channel_axis])
    ]
    known = [float(ratio) for ratio in ratios if ratio is not None]
    if len(known) < len(ratios) or claim.actual.size // len(ratios) < 2:
        return None
    low, high = min(known), max(known)
    # As many digits as it takes to distinguish the two.
    form = ".3g" if high - low >= 1e-2 else ".6g"
    return f"the scale is {low:{form}} to {high:{form}} × the reference's ({_count(claim)})"


def _at_large(claim: Claim) -> str:
    wrong = ~claim.holds
    gaps = np.where(wrong, np.abs(claim.actual - claim.target), -1)
    place = np.unravel_index(int(gaps.argmax()), gaps.shape)
    aside = tuple(i for i in range(wrong.ndim) if i != claim.channel_axis)
    channels = int(wrong.any(axis=aside).sum())
    name = claim.axes[claim.channel_axis]
    shape = "g" if not claim.quantized else ".1f"
    signal = np.sqrt(np.mean((claim.target * claim.unit) ** 2))
    noise = np.sqrt(np.mean(((claim.actual - claim.target) * claim.unit) ** 2))
    share = f"; off by {_times(noise / signal)} (rms)" if signal else ""
    return (
        f"{_count(claim)}, in {channels} of {wrong.shape[claim.channel_axis]} {name}s, most at "
        f"{[int(i) for i in place]}: {claim.actual[place]:g} where the reference gives "
        f"{claim.target[place]:{shape}}{share}"
    )


def _times(share: float) -> str:
    """Return a ratio in per cent as far as these are easily read."""
    if share >= 10:
        return f"{share:.0f} × their size"
    return f"{100 * share:.0f} %" if share >= 1 else f"{100 * share:.2g} %"
