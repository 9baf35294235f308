"""
Explain how a constant differs from its reference.

An explanation is named only if every element of the constant agrees with it.
"""

from __future__ import annotations

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
"""Channels that are described individually."""


@dataclass(frozen=True, eq=False)
class ComparedConstant:
    """A stored constant and its reference; all arrays have its shape and layout."""

    actual: Array  # the stored values, in steps from the zero point; floats unchanged
    target: Array  # the reference, in steps, not rounded
    tolerance: Array  # the greatest allowed difference
    low: Array  # the lowest step that a code can represent
    high: Array  # the highest
    unit: Array  # the size of a step; 1 for floats
    axes: tuple[str, ...]  # the name of an index along each axis
    channel_axis: int  # the axis of the channels
    quantized: bool  # whether steps are codes
    reference: str  # name of the reference in texts

    @cached_property
    def holds(self) -> Array:
        """Mask of the elements that agree with the reference."""
        return self.fits(self.target)

    def fits(self, target: Array, at: Any = ...) -> Array:
        """Return where the stored steps agree with others, rounded and clipped."""
        clipped = np.clip(target, self.low[at], self.high[at])
        result: Array = np.abs(self.actual[at] - clipped) <= self.tolerance[at]
        return result


def pair_of(
    op_name: str,
    stored: Constant,
    target: Array,
    tolerance: Array | float,
    *,
    exact: bool = False,
    reference: str = "the reference",
) -> ComparedConstant:
    """Return a constant with its reference, in steps of its scale or as floats."""
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
    named = next((i for i, name in enumerate(axes) if name in ("output channel", "channel")), 0)
    return ComparedConstant(
        actual=steps.astype(np.float64),
        target=target,
        tolerance=np.broadcast_to(tolerance, shape),
        low=np.broadcast_to(low, shape),
        high=np.broadcast_to(high, shape),
        unit=np.broadcast_to(unit, shape),
        axes=axes,
        channel_axis=channels[0] if len(channels) == 1 else named,
        quantized=stored.scales is not None,
        reference=reference,
    )


def _axis_names(op_name: str, ndim: int) -> tuple[str, ...]:
    """Return a name for each axis of an op's constant."""
    names = facts_of(op_name).axes
    if len(names) == ndim:
        return names
    return (*(f"index of axis {i}" for i in range(ndim - 1)), "channel")


def explain(pair: ComparedConstant) -> str:
    """Explain how a constant differs from its reference."""
    if strange := int((~np.isfinite(pair.actual)).sum()):
        return f"{strange} of {pair.actual.size} are NaN or infinite"
    if not pair.actual.any():
        return f"all {pair.actual.size} are zero"
    one = _one_element(pair)
    if one is None and pair.fits(-pair.target).all():
        return "negated"
    return one or _by_channel(pair) or _scaled(pair) or _at_large(pair)


def _count(pair: ComparedConstant) -> str:
    wrong, total = int((~pair.holds).sum()), pair.actual.size
    return f"{wrong} of {total} {'differ' if wrong != 1 else 'differs'}"


def _one_element(pair: ComparedConstant) -> str | None:
    wrong = np.flatnonzero(~pair.holds)
    if len(wrong) != 1:
        return None
    place = np.unravel_index(int(wrong[0]), pair.actual.shape)
    index = [int(i) for i in place]
    if not pair.quantized:
        actual, target = float(pair.actual[place]), float(pair.target[place])
        return f"{_count(pair)}: {index} is {actual:.6g} where {pair.reference} has {target:.6g}"
    actual = int(pair.actual[place])
    wanted = np.clip(pair.target[place], pair.low[place], pair.high[place])
    nearest = int(np.rint(wanted))
    sign = " (its sign)" if actual == -nearest else ""
    return f"{_count(pair)}: {index} is {actual} where {pair.reference} has {nearest}{sign}"


def _slice(axis: int, index: int) -> tuple[Any, ...]:
    return (*(slice(None) for _ in range(axis)), index)


def _by_channel(pair: ComparedConstant) -> str | None:
    """Describe the wrong channels, if at least as many are right."""
    aside = tuple(i for i in range(pair.actual.ndim) if i != pair.channel_axis)
    right = pair.holds.all(axis=aside)
    wrong = np.flatnonzero(~right)
    if not len(wrong) or right.sum() < len(wrong):
        return None
    name = pair.axes[pair.channel_axis]
    parts = [f"{name} {channel} {_channel(pair, int(channel))}" for channel in wrong[:_LISTED]]
    more = f" and {len(wrong) - _LISTED} more {name}s" if len(wrong) > _LISTED else ""
    return f"{', '.join(parts)}{more} ({_count(pair)})"


def _channel(pair: ComparedConstant, channel: int) -> str:
    at = _slice(pair.channel_axis, channel)
    actual, target = pair.actual[at], pair.target[at]
    if not actual.any():
        return "is zero"
    if actual.size > 1:
        if pair.fits(-target, at).all():
            return "is negated"
        other_channel = _other_channel(pair, channel)
        if other_channel is not None:
            return f"holds {pair.axes[pair.channel_axis]} {other_channel}"
    elif actual == -np.rint(target):
        return "is negated"
    ratio = _scale_ratio(pair, at) if pair.quantized and actual.size > 1 else None
    if ratio is not None:
        return f"has a scale of {ratio} × {pair.reference}'s"
    wrong = ~pair.holds[at]
    worst = np.abs(actual - target)[wrong].max()
    unit, digits = (" codes", ".0f") if pair.quantized else ("", ".3g")
    return f"is off in {int(wrong.sum())} of {actual.size}{unit} by up to {worst:{digits}}"


def _other_channel(pair: ComparedConstant, channel: int) -> int | None:
    """Return another channel whose values this one holds, in either one's scale."""
    at = _slice(pair.channel_axis, channel)
    for other in range(pair.actual.shape[pair.channel_axis]):
        there = _slice(pair.channel_axis, other)
        steps = pair.target[there]
        if other != channel and any(
            pair.fits(each, at).all() for each in (steps, steps * pair.unit[there] / pair.unit[at])
        ):
            return other
    return None


def _scale_ratio(pair: ComparedConstant, at: Any = ...) -> str | None:
    """
    Return the stored scale over the right one, if it explains all wrong codes.

    With a code n of a value x in steps, the right scale is between x/(n + ½) and x/(n − ½) of the
    stored one; a code at a limit has no upper bound on x.
    """
    actual, target = pair.actual[at].ravel(), pair.target[at].ravel()
    steps, sizes = np.abs(actual), np.abs(target)
    if ((actual * target < 0) & (sizes > 0.5)).any():
        return None
    at_limit = (actual >= pair.high[at].ravel()) | (actual <= pair.low[at].ravel())
    bounded = ~at_limit
    lower = (sizes[bounded] / (steps[bounded] + 0.5)).max(initial=0.0)
    counted = (steps > 0) & (sizes > 0)
    upper = (sizes[counted] / (steps[counted] - 0.5)).min(initial=np.inf)
    # float32's rounding of the bounds.
    if not 0 < lower <= upper * (1 + 1e-6) < np.inf:
        return None
    inverse = 2 / (lower + upper)
    return f"{inverse:.3g}" if abs(inverse - 1) >= 5e-3 else f"{inverse:.6f}"


def _scaled(pair: ComparedConstant) -> str | None:
    if pair.actual.size < 2 or not pair.quantized:
        return None
    ratio = _scale_ratio(pair)
    if ratio is not None:
        return f"the scale is {ratio} × {pair.reference}'s ({_count(pair)})"
    if np.ptp(pair.unit) == 0:
        return None
    ratios = [
        _scale_ratio(pair, _slice(pair.channel_axis, i))
        for i in range(pair.actual.shape[pair.channel_axis])
    ]
    known = [float(ratio) for ratio in ratios if ratio is not None]
    if len(known) < len(ratios) or pair.actual.size // len(ratios) < 2:
        return None
    low, high = min(known), max(known)
    # Enough digits to distinguish the two.
    form = ".3g" if high - low >= 1e-2 else ".6g"
    return f"the scale is {low:{form}} to {high:{form}} × {pair.reference}'s ({_count(pair)})"


def _at_large(pair: ComparedConstant) -> str:
    wrong = ~pair.holds
    gaps = np.where(wrong, np.abs(pair.actual - pair.target), -1)
    place = np.unravel_index(int(gaps.argmax()), gaps.shape)
    aside = tuple(i for i in range(wrong.ndim) if i != pair.channel_axis)
    channels = int(wrong.any(axis=aside).sum())
    name = pair.axes[pair.channel_axis]
    shape = "g" if not pair.quantized else ".1f"
    signal = np.sqrt(np.mean((pair.target * pair.unit) ** 2))
    noise = np.sqrt(np.mean(((pair.actual - pair.target) * pair.unit) ** 2))
    share = f"; off by {_times(noise / signal)} (rms)" if signal else ""
    return (
        f"{_count(pair)}, in {channels} of {wrong.shape[pair.channel_axis]} {name}s, most at "
        f"{[int(i) for i in place]}: {pair.actual[place]:g} where {pair.reference} has "
        f"{pair.target[place]:{shape}}{share}"
    )


def _times(share: float) -> str:
    """Format a ratio in per cent, or as a factor from 10 on."""
    if share >= 10:
        return f"{share:.0f} × their size"
    return f"{100 * share:.0f} %" if share >= 1 else f"{100 * share:.2g} %"
