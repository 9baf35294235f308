"""
How a constant differs from what it should be, in the words of what must have happened.

Every explanation is tried out: it is given only where the constant, so explained, is right in
every element.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pytest_edgeq.tflite.boundary import code_range
from pytest_edgeq.tflite.constants import Constant

Array: TypeAlias = npt.NDArray[Any]

_LISTED = 3
"""So many channels are told one by one."""


@dataclass(frozen=True, eq=False)
class Claim:
    """
    What a constant must be. All arrays have its shape, in the file's layout.

    Attributes:
        actual: What is stored, in steps from the zero point; floats as they are.
        target: What it must be, in steps, not rounded.
        tolerance: How far the two may lie apart.
        low: The lowest step that a code can say.
        high: The highest.
        unit: What a step is worth; 1 for floats.
        axes: What to call an index along each axis.
        channel_axis: Along which the channels lie.
        quantized: Steps are codes.
        others: Gives constants of the same shape that may have taken this one's place, in floats,
            with their names; None where none can.
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
    others: Callable[[], Iterator[tuple[str, Array]]] | None

    @cached_property
    def holds(self) -> Array:
        """Where it is as it must be."""
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
    others: Callable[[], Iterator[tuple[str, Array]]] | None = None,
) -> Claim:
    """Say what must hold, in the units of the stored values: steps of the scale, or floats."""
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
        others=others,
    )


_AXES = {
    "CONV_2D": ("output channel", "row", "column", "input channel"),
    "DEPTHWISE_CONV_2D": ("batch", "row", "column", "channel"),
    "TRANSPOSE_CONV": ("output channel", "row", "column", "input channel"),
    "CONV_3D": ("layer", "row", "column", "input channel", "output channel"),
    "CONV_3D_TRANSPOSE": ("layer", "row", "column", "output channel", "input channel"),
    "FULLY_CONNECTED": ("output channel", "input channel"),
    "EMBEDDING_LOOKUP": ("row", "column"),
    "GATHER": ("row", "column"),
}


def _axis_names(op_name: str, ndim: int) -> tuple[str, ...]:
    """Return a name for each axis of an op's constant."""
    names = _AXES.get(op_name, ())
    if len(names) == ndim:
        return names
    return (*(f"index of axis {i}" for i in range(ndim - 1)), "channel")


def _channel_axis(names: tuple[str, ...]) -> int:
    """Along which of the named axes the output channels lie."""
    return next((i for i, name in enumerate(names) if name in ("output channel", "channel")), 0)


def explain(claim: Claim) -> str:
    """Explain how a constant differs from its reference."""
    ways: tuple[Callable[[Claim], str | None], ...] = (
        _nonfinite,
        _all_zero,
        _one_element,
        _negated,
        _turned,
        _by_axis,
        _another,
        _by_channel,
        _scaled,
        _shifted,
    )
    return next(filter(None, (way(claim) for way in ways)), None) or _at_large(claim)


def _count(claim: Claim) -> str:
    wrong, total = int((~claim.holds).sum()), claim.actual.size
    return f"{wrong} of {total} {'differ' if wrong != 1 else 'differs'}"


def _nonfinite(claim: Claim) -> str | None:
    wrong = int((~np.isfinite(claim.actual)).sum())
    return f"{wrong} of {claim.actual.size} are NaN or infinite" if wrong else None


def _all_zero(claim: Claim) -> str | None:
    if claim.actual.any():
        return None
    return f"all {claim.actual.size} are zero"


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
    how = _how(claim, place, actual, nearest)
    return f"{_count(claim)}: {index} is {actual} where the reference gives {nearest}{how}"


def _how(claim: Claim, place: tuple[Any, ...], actual: int, nearest: int) -> str:
    if actual == -nearest:
        largest = abs(nearest) == np.rint(np.abs(claim.target).max())
        return f" (its sign{', of the largest' if largest else ''})"
    # Bits of the code as it is stored, in two's complement; the zero point is 0 or the low limit's.
    flipped = actual ^ nearest
    width = int(claim.high[place] - claim.low[place]).bit_length()
    flipped &= 2**width - 1
    if flipped.bit_count() == 1:
        return f" (bit {flipped.bit_length() - 1})"
    return ""


def _negated(claim: Claim) -> str | None:
    if claim.fits(-claim.target).all():
        return "negated"
    return None


def _turned(claim: Claim) -> str | None:
    """Laid out in another way."""
    shape = claim.actual.shape
    for order in itertools.permutations(range(len(shape))):
        moved = [i for i, axis in enumerate(order) if i != axis]
        if not moved or tuple(shape[axis] for axis in order) != shape:
            continue
        if any(shape[axis] == 1 for axis in moved):
            continue
        for target in _in_place_of(claim, functools.partial(np.transpose, axes=order)):
            if claim.fits(target).all():
                names = " and ".join(f"{claim.axes[axis]}s" for axis in moved)
                return f"transposed ({names} exchanged)"
    return None


def _in_place_of(claim: Claim, move: Callable[[Array], Array]) -> Iterator[Array]:
    """Targets where values were moved: without the scales, which stay, and with them."""
    yield move(claim.target)
    if claim.quantized and np.ptp(claim.unit) > 0:
        yield move(claim.target * claim.unit) / claim.unit


def _by_axis(claim: Claim) -> str | None:
    """Moved along one axis."""
    order = sorted(range(claim.actual.ndim), key=lambda axis: axis != claim.channel_axis)
    for axis in order:
        if claim.actual.shape[axis] > 1:
            found = _moved(claim, axis)
            if found:
                return found
    return None


def _moved(claim: Claim, axis: int) -> str | None:
    name, length = claim.axes[axis], claim.actual.shape[axis]
    aside = tuple(i for i in range(claim.actual.ndim) if i != axis)
    wrong = np.flatnonzero(~claim.holds.all(axis=aside))
    if len(wrong) < 2:
        return None
    slices = _Slices(claim, axis)
    first = int(wrong[0])
    for by in ((first - source) % length for source in slices.like(first)):
        for target in _in_place_of(claim, functools.partial(np.roll, shift=by, axis=axis)):
            if claim.fits(target).all():
                if length == 2:
                    return f"{name}s 0 and 1 are exchanged"
                by = by if by <= length // 2 else by - length
                return f"permuted: the {name}s are rolled by {by}".replace("-", "−")
    for target in _in_place_of(claim, lambda each: np.flip(each, axis)):
        if claim.fits(target).all():
            return f"permuted: the {name}s are in reverse order"
    sources = _sources(slices, wrong)
    if sources is None or sorted(sources) != wrong.tolist():
        return None
    if len(wrong) == 2:
        return f"permuted: {name}s {wrong[0]} and {wrong[1]} are exchanged"
    return f"permuted: {len(wrong)} of {length} {name}s stand in each other's place"


def _slice(axis: int, index: int) -> tuple[Any, ...]:
    return (*(slice(None) for _ in range(axis)), index)


class _Slices:
    """The slices of a claim along an axis, each laid flat."""

    def __init__(self, claim: Claim, axis: int) -> None:
        self.length = claim.actual.shape[axis]
        self.actual, self.target, self.tolerance, self.unit, self.low, self.high = (
            np.moveaxis(each, axis, 0).reshape(self.length, -1)
            for each in (
                claim.actual,
                claim.target,
                claim.tolerance,
                claim.unit,
                claim.low,
                claim.high,
            )
        )
        # A few elements tell most slices apart.
        self.some = np.unique(np.linspace(0, self.actual.shape[1] - 1, 16).astype(int))

    def like(self, index: int) -> list[int]:
        """Whose target a slice holds, with its own scales or with those of the place."""
        sources = np.flatnonzero(self._holds(index, np.arange(self.length), self.some))
        everything = np.arange(self.actual.shape[1])
        return [
            int(source)
            for source in sources
            if source != index and self._holds(index, np.array([source]), everything)[0]
        ]

    def _holds(self, index: int, sources: Array, at: Array) -> Array:
        steps = self.target[np.ix_(sources, at)]
        worth = steps * self.unit[np.ix_(sources, at)] / self.unit[index, at]
        low, high = self.low[index, at], self.high[index, at]
        close = [
            (np.abs(self.actual[index, at] - np.clip(each, low, high)) <= self.tolerance[index, at])
            for each in (steps, worth)
        ]
        found: Array = close[0].all(axis=1) | close[1].all(axis=1)
        return found


def _sources(slices: _Slices, wrong: Array) -> list[int] | None:
    """For each slice that is wrong, whose it is; None where one is nobody's or several ones'."""
    sources: list[int] = []
    for index in wrong.tolist():
        like = [source for source in slices.like(index) if source not in sources]
        if not like:
            return None
        sources.append(like[0])
    return sources


def _another(claim: Claim) -> str | None:
    """Another constant in its place, with its own scales or with this one's."""
    for name, values in claim.others() if claim.others is not None else ():
        target = values / claim.unit
        alike = claim.fits(target).all() or (claim.quantized and _proportional(claim, values))
        if alike:
            return f"the same as the weight of {name} (swapped, or the op reads another's input)"
    return None


def _proportional(claim: Claim, values: Array) -> bool:
    """
    Whether codes are those of other values in a scale that is not known, for each channel.

    The largest code tells the scale to half a code, so that each code may be off by as much beside
    its own half.
    """
    aside = tuple(i for i in range(claim.actual.ndim) if i != claim.channel_axis)
    if np.ptp(claim.unit) == 0:
        aside = tuple(range(claim.actual.ndim))
    largest = np.abs(claim.actual).max(axis=aside, keepdims=True)
    whole = np.abs(values).max(axis=aside, keepdims=True)
    if not (whole > 0).all() or largest.max() < 8:
        return False
    return bool((np.abs(claim.actual - values * (largest / whole)) <= 1).all())


def _by_channel(claim: Claim) -> str | None:
    """One or a few channels wrong, the others right."""
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
        like = _Slices(claim, claim.channel_axis).like(channel)
        if like:
            return f"holds {claim.axes[claim.channel_axis]} {like[0]}"
    elif actual == -np.rint(target):
        return "is negated"
    shift = _shift(claim, at)
    ratio = _scale_ratio(claim, at) if actual.size > 1 else None
    if ratio is not None:
        return f"has a scale of {ratio} × the reference's"
    if shift is not None and claim.quantized:
        return f"is shifted by {shift:+d} codes".replace("-", "−")
    factor = _factor(claim, at)
    if factor is not None:
        return f"is about {factor:.3g} × the reference's"
    wrong = ~claim.holds[at]
    worst = np.abs(actual - target)[wrong].max()
    if not claim.quantized:
        return f"is off in {int(wrong.sum())} of {actual.size} by up to {worst:.3g}"
    return f"is off in {int(wrong.sum())} of {actual.size} codes by up to {worst:.0f}"


def _shift(claim: Claim, at: Any) -> int | None:
    """By how many codes all are too high."""
    gaps = claim.actual[at] - np.clip(claim.target[at], claim.low[at], claim.high[at])
    by = float(np.rint(np.median(gaps)))
    if by == 0 or not np.isfinite(by):
        return None
    shifted = np.clip(claim.target[at] + by, claim.low[at], claim.high[at])
    close = np.abs(claim.actual[at] - shifted) <= claim.tolerance[at]
    return int(by) if close.all() else None


def _scale_ratio(claim: Claim, at: Any = ...) -> str | None:
    """
    By what the scale is too large, if that alone makes the codes wrong.

    A code n of a value x in steps says that the right scale is between x/(n + ½) and x/(n − ½) of
    the stored one; one at a limit has no upper bound on x.
    """
    actual, target = claim.actual[at].ravel(), claim.target[at].ravel()
    steps, sizes = np.abs(actual), np.abs(target)
    if not claim.quantized:
        return _float_ratio(claim, at)
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


def _factor(claim: Claim, at: Any = ...) -> float | None:
    """By what all codes were multiplied and rounded again: two halves off at most, of many."""
    actual, target = claim.actual[at].ravel(), claim.target[at].ravel()
    power = float(target @ target)
    if not claim.quantized or target.size < 2 or power == 0 or np.abs(actual).max() < 32:
        return None
    factor = float(actual @ target) / power
    return factor if abs(factor) > 0 and (np.abs(actual - factor * target) <= 1).all() else None


def _float_ratio(claim: Claim, at: Any) -> str | None:
    actual, target = claim.actual[at], claim.target[at]
    largest = np.unravel_index(np.abs(target).argmax(), target.shape)
    if target[largest] == 0:
        return None
    ratio = actual[largest] / target[largest]
    # A float times a factor is rounded once more.
    close = np.abs(actual - ratio * target) <= claim.tolerance[at] * max(1.0, abs(ratio)) * 4
    return f"{ratio:.4g}" if close.all() else None


def _scaled(claim: Claim) -> str | None:
    if claim.actual.size < 2:
        return None
    ratio = _scale_ratio(claim)
    if ratio is not None:
        return f"the scale is {ratio} × the reference's ({_count(claim)})"
    if not claim.quantized or np.ptp(claim.unit) == 0:
        return None
    ratios = [
        _scale_ratio(claim, _slice(claim.channel_axis, i))
        for i in range(claim.actual.shape[claim.channel_axis])
    ]
    known = [float(ratio) for ratio in ratios if ratio is not None]
    if len(known) < len(ratios) or claim.actual.size // len(ratios) < 2:
        return None
    low, high = min(known), max(known)
    # As many digits as it takes to tell the two apart.
    form = ".3g" if high - low >= 1e-2 else ".6g"
    return f"the scale is {low:{form}} to {high:{form}} × the reference's ({_count(claim)})"


def _shifted(claim: Claim) -> str | None:
    by = _shift(claim, ...)
    if by is None or not claim.quantized:
        return None
    return f"all are shifted by {by:+d}".replace("-", "−")


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
    """In per cent as far as these are easily read."""
    if share >= 10:
        return f"{share:.0f} × their size"
    return f"{100 * share:.0f} %" if share >= 1 else f"{100 * share:.2g} %"
