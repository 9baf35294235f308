"""Find the floats that a constant of a file was rounded from, by its values."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.localize.structure import ConstantPair
from pytest_edgeq.tflite.boundary import code_range

__all__ = [
    "axis_orders",
    "half_a_step_off",
    "is_rounded_to",
    "nearest_constants",
    "times_a_number",
]

Array = npt.NDArray[Any]

_SLACK = 2.0**-9
"""Tolerance for float32 arithmetic, relative to one step."""

_LOOSE = 0.5
"""Steps that a value may be off in addition while a factor is only estimated."""

_NEAR = 2.0**-8
"""How far a factor that is estimated from rounded values may be off, relative."""

_ROUNDED = 2.0**-20
"""Tolerance of a constant that both sides compute in float32, relative to its greatest value."""


def is_rounded_to(pair: ConstantPair, floats: Array, *, cut: bool = False) -> bool:
    """
    Whether a constant of the file is the rounding of floats.

    Args:
        pair: The constant; `pair.floats` is what it stands for.
        floats: Of the same shape.
        cut: Whether a number that is all of the constant may lie beyond the last code, too.
    """
    given, steps = pair.floats, _steps(pair)
    near = _apart(given, floats) <= steps * (0.5 + _SLACK) + _slack(floats)
    if pair.stored.values.dtype.kind == "i" and not near.all():
        # A bias may have been written for another scale than that of the input.
        stored = pair.stored.floats.reshape(given.shape)
        near = _apart(stored, floats) <= steps * (0.5 + _SLACK) + _slack(floats)
    codes = pair.stored.values.reshape(given.shape)
    if cut and pair.stored.scales is not None and codes.size and not np.ptp(codes):
        low, high = code_range(codes.dtype.name)
        near |= ((codes == low) & (floats < given)) | ((codes == high) & (floats > given))
    return bool(near.all())


def half_a_step_off(pair: ConstantPair, floats: Array) -> Array:
    """Return floats that a constant was rounded from, each half a step off, at random."""
    signs = np.random.default_rng(0).choice((-0.5, 0.5), floats.shape)
    values: Array = floats + signs * _steps(pair)
    return values


def times_a_number(pair: ConstantPair, floats: Array) -> Array | None:
    """
    Return floats times the whole number, or divided by the one, that a constant was rounded from.

    A converter may fold the 1/N of a mean into the weights behind it.

    Args:
        pair: The constant; `pair.floats` is what it stands for.
        floats: Of the same shape.

    Returns:
        The product; None where it is not, within half a step, most of the constant.
    """
    given, steps = pair.floats, _steps(pair)
    large = np.abs(floats) >= np.median(np.abs(floats))
    if not floats.size or not floats[large].all() or floats.dtype.kind != "f":
        return None
    ratio = float(np.median(given[large] / floats[large]))
    for _ in range(2):
        near = _apart(given, ratio * floats) <= steps * (0.5 + _LOOSE) + _slack(given)
        if 2 * np.count_nonzero(near) <= near.size or not np.isfinite(ratio) or not ratio:
            return None
        ratio = float((given[near] * floats[near]).sum() / np.square(floats[near]).sum())
    number = round(ratio) if abs(ratio) > 1 else round(1 / ratio)
    exact = float(number) if abs(ratio) > 1 else 1.0 / number
    return None if abs(number) < 2 or abs(exact / ratio - 1) > _NEAR else exact * floats


def nearest_constants(
    candidates: Iterable[tuple[Array, Array]], constants: Iterable[ConstantPair]
) -> dict[tuple[int, int], Array]:
    """
    Return the floats that the constants of a file were before they were rounded.

    A constant is looked up by its values: it is the candidate within half of the file's own step of
    it, in any order of its axes.

    Args:
        candidates: Constants of torch, as the file was made from them and before.
        constants: Operands of the file's ops; `floats` holds the dequantized values.

    Returns:
        By the number of the op and the position of the operand, floats of its shape. What torch has
        nothing like is left out.
    """
    by_size: dict[int, list[tuple[Array, Array]]] = {}
    for rounded, exact in candidates:
        by_size.setdefault(rounded.size, []).append((rounded, exact))
    found: dict[tuple[int, int], Array] = {}
    for pair in constants:
        best: tuple[float, Array] | None = None
        for rounded, exact in by_size.get(pair.floats.size, ()) if _is_told(pair) else ():
            order = _order(rounded, pair)
            if order is None:
                continue
            turned = rounded.transpose(order).reshape(pair.floats.shape)
            furthest = float(np.abs(turned - pair.floats).max(initial=0.0))
            if best is None or furthest < best[0]:
                best = furthest, exact.transpose(order).reshape(pair.floats.shape)
        if best is not None:
            found[pair.op.index, pair.place] = best[1]
    return found


def _order(value: Array, pair: ConstantPair) -> tuple[int, ...] | None:
    """Return the order of the axes in which the file has a value; None if in no order."""
    for order in axis_orders(value.shape):
        if is_rounded_to(pair, value.transpose(order).reshape(pair.floats.shape)):
            return order
    return None


def _apart(one: Array, other: Array) -> Array:
    with np.errstate(invalid="ignore"):
        apart: Array = np.where(one == other, 0.0, np.abs(one - other))
    return apart


def _slack(floats: Array) -> float:
    return _ROUNDED * float(np.abs(floats[np.isfinite(floats)]).max(initial=0.0))


def _is_told(pair: ConstantPair) -> bool:
    return pair.floats.dtype.kind == "f" and pair.floats.size > 0


def _steps(pair: ConstantPair) -> Array:
    steps = np.zeros(()) if pair.stored.scales is None else pair.stored.scales
    return np.broadcast_to(steps, pair.stored.values.shape).reshape(pair.floats.shape)


def axis_orders(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Give every order of the axes that are longer than 1, the others in front."""
    long = [axis for axis, length in enumerate(shape) if length > 1]
    short = [axis for axis, length in enumerate(shape) if length <= 1]
    for order in itertools.permutations(long):
        yield (*short, *order)
