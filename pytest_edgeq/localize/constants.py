"""
The constants of a file, held against the reference's.

One wrong bit of one weight moves a few activation codes by 1 LSB, which is what rounding does, too:
outputs cannot tell. The constants can, because how they come about leaves them no freedom. A code
is the nearest to its value; a bias has the scale input × weight
(https://ai.google.dev/edge/litert/models/quantization_spec). So every rule here is derived, and
what breaks one is a defect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pytest_edgeq.localize.differences import Claim, explain
from pytest_edgeq.tflite.boundary import code_range
from pytest_edgeq.tflite.constants import Constant

__all__ = ["FOLDED", "check_stored_weight", "claim_of", "half_spacing", "hold_all"]

Array: TypeAlias = npt.NDArray[Any]

FOLDED = 2.0**-20
"""
How far, relatively, float32 may carry a folded constant from the exact one.

A weight behind a batch norm is w·γ/√(σ² + ε): five operations, each rounded by 2⁻²⁴ of its result,
and a quotient by the scale; libraries order them differently. 2⁻²⁰ leaves room for sixteen.
"""

_BFLOAT16 = 2.0**-8
"""
Half a step of bfloat16, whose mantissa has 7 bits.

ai-edge-quantizer 0.10.0 writes the scales of blocks so (`transformations/quantize_tensor.py`), also
of codes that torchao chose for the scales before they were rounded.
"""

# What a quantizer takes for the least scale, whatever the values: torchao's observers 2⁻¹² or
# float32's epsilon, ai-edge-quantizer a range of 1e-9 (over 127 for int8, over 7 for int4).
_LEAST_SCALE = 2.0**-12
_FLOAT32 = (float(np.finfo(np.float32).min), float(np.finfo(np.float32).max))


def check_stored_weight(
    op_name: str,
    stored: Constant,
    reference: Array,
    *,
    others: Callable[[], Iterator[tuple[str, Array]]] | None = None,
    kept: Callable[[], bool] | None = None,
) -> tuple[str, ...]:
    """
    Hold a weight of the file against floats in the file's own layout.

    Every code must be the nearest to its value in the file's own scale; floats must be equal within
    what folding rounds. A value may lie beyond its scale, and have the last code, where the
    quantizer cuts values off: not where other scales of the weight are those that hold them all.

    Args:
        op_name: The op of the file.
        stored: As `read_constant` gives it.
        reference: Floats of its shape, of a float file of the same model.
        others: Gives other weights of that file, of the same shape, by the name that a finding is
            to call them: where one was put in place of this one, the finding says so. It is called
            only to look for that.
        kept: Gives whether scales of the whole file are those that hold all values; None of an
            operand whose scale is another tensor's, so that it may cut values off.

    Returns:
        A sentence for each thing that is wrong, most telling first; none where it is sound.
    """
    reference = reference.astype(np.float64)
    if stored.scales is None:
        # The converter writes an infinite value, as of a mask, as the largest finite one.
        reference = np.clip(reference, *_FLOAT32)
        actual = stored.values.astype(np.float64)
        ends = np.clip(actual, *_FLOAT32)
        actual = np.where(np.isinf(actual) & (ends == reference), ends, actual)
        tolerance = np.abs(reference) * FOLDED + half_spacing(stored.dtype, reference)
        # Where a difference of two parameters was folded, it is as exact as the larger one.
        tolerance += np.abs(reference).max(initial=0.0) * 2.0**-24
        floats = replace(stored, values=actual)
        claim = claim_of(op_name, floats, reference, tolerance, others=others)
        return () if claim.holds.all() else (f"the weight ({stored.dtype}): " + explain(claim),)
    if not (np.isfinite(stored.scales).all() and (stored.scales > 0).all()):
        return ("the weight has a scale that is zero, negative or not finite",)
    target = reference / stored.scales
    # Half a step, and what float32 makes of the value and the quotient.
    rounded = FOLDED + (_BFLOAT16 if _in_blocks(stored) else 0)
    claim = claim_of(op_name, stored, target, 0.5 + np.abs(target) * rounded, others=others)
    if not claim.holds.all():
        return ("the weight's codes: " + explain(claim),)
    if kept is None:
        return ()
    return tuple(_beyond(stored, claim, kept) or _unused_range(stored, claim))


def claim_of(
    op_name: str,
    stored: Constant,
    target: Array,
    tolerance: Array | float,
    *,
    exact: bool = False,
    others: Callable[[], Iterator[tuple[str, Array]]] | None = None,
) -> Claim:
    """
    Say what must hold, in the units of the stored values: steps of the scale, or floats.

    Args:
        op_name: The op that takes the constant; a name that no op has for a bias.
        stored: As `read_constant` gives it.
        target: What it must be, in those units.
        tolerance: How far it may be off, likewise.
        exact: Whether the target is codes, which may be the lowest one, too.
        others: As for `check_stored_weight`.
    """
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
    """What to call an index along each axis of an op's constant."""
    names = _AXES.get(op_name, ())
    if len(names) == ndim:
        return names
    return (*(f"index of axis {i}" for i in range(ndim - 1)), "channel")


def _channel_axis(names: tuple[str, ...]) -> int:
    """Along which of the named axes the output channels lie."""
    return next((i for i, name in enumerate(names) if name in ("output channel", "channel")), 0)


def _in_blocks(stored: Constant) -> bool:
    return (stored.grouping or "").startswith("blockwise")


def half_spacing(dtype: str, reference: Array) -> Array:
    """What rounding to a shorter float may take: half the distance to the next one."""
    if dtype == "bfloat16":
        halves: Array = np.abs(reference) * _BFLOAT16
        return halves
    if dtype != "float16":
        return np.zeros(reference.shape)
    with np.errstate(over="ignore", invalid="ignore"):
        # Beyond the range of float16 it is NaN, which nothing is within.
        return np.spacing(np.abs(reference).astype(np.float16)).astype(np.float64) / 2


def _beyond(stored: Constant, claim: Claim, kept: Callable[[], bool]) -> list[str]:
    """Tell of values that lie beyond their scale, where those beside them do not on purpose."""
    over = np.maximum(claim.target - claim.high, claim.low - claim.target)
    wrong = over > claim.tolerance
    if not wrong.any():
        return []
    alike = _least_scales(stored, claim.target, ~wrong)
    cut = np.clip(claim.target, claim.low, claim.high)
    # What is cut off in a weight of its own may be so on purpose: as far as it costs next to none.
    if not (
        _most(alike) or (kept() and _costs_a_bit(claim.target - cut, claim.target, claim.high))
    ):
        return []
    place = np.unravel_index(int(np.where(wrong, over, -1).argmax()), wrong.shape)
    count = int(wrong.sum())
    return [
        f"the weight's codes: {count} of {wrong.size} {'lies' if count == 1 else 'lie'} beyond "
        f"what {'its' if count == 1 else 'their'} scale reaches: {[int(i) for i in place]} is "
        f"{claim.actual[place]:.0f} where the reference gives {claim.target[place]:.4g}"
    ]


def hold_all(weights: Iterable[tuple[Constant, Array]]) -> bool:
    """
    Whether most scales of several weights are the least that hold all of their values.

    So are those of a range from the least to the greatest value. One that minimises an error cuts
    off more or less of each channel, and one that learned is not of the values that are left.

    Args:
        weights: Constants, each with its floats in the file's layout.
    """
    found: list[bool] = []
    for stored, reference in weights:
        if stored.scales is not None:
            steps = reference.astype(np.float64) / stored.scales
            found += _least_scales(stored, steps, np.ones(steps.shape, bool))
    return _most(found)


def _most(alike: list[bool]) -> bool:
    return 2 * sum(alike) > len(alike)


def _least_scales(stored: Constant, steps: Array, right: Array) -> list[bool]:
    """Of each scale whose values are all right whether it is the least that holds them."""
    assert stored.scales is not None, "codes have scales"
    scales, shape = stored.scales, steps.shape
    size = int(str(stored.grouping).split("_")[-1]) if _in_blocks(stored) else 0
    if size and shape[-1] % size == 0:
        shape = (*shape[:-1], -1, size)
        scales = np.broadcast_to(scales, steps.shape).reshape(shape)[..., :1]
    steps, right = steps.reshape(shape), right.reshape(shape)
    aside = tuple(i for i, length in enumerate(scales.shape) if length == 1)
    if not aside:
        # Laid out anew, a scale for each value: whose it is cannot be told.
        return []
    low, high = code_range(stored.dtype)
    least, greatest = steps.min(axis=aside, initial=0.0), steps.max(axis=aside, initial=0.0)
    if np.any(stored.zero_points):
        reach, codes, more = greatest - least, high - low, [0.0]
    else:
        # torch may divide by a code more than there is: half of it lies beyond either end.
        reach, codes, more = np.maximum(greatest, -least), high, [0.0, 0.5]
    counted = right.all(axis=aside) & (reach > 0) & (scales.max(axis=aside) > _LEAST_SCALE)
    slack = FOLDED + (_BFLOAT16 if size else 0)
    held = np.any([np.abs(reach / (codes + each) - 1) <= slack for each in more], axis=0)
    alike: list[bool] = held[counted].tolist()
    return alike


def _costs_a_bit(lost: Array, steps: Array, high: Array) -> bool:
    """
    Whether cutting values off costs more than a bit: four times the power of what rounding takes.

    No quantizer does so on purpose: a scale that holds all values loses less.

    Args:
        lost: How far values lie beyond the ends, in steps.
        steps: The values, in steps from the zero point.
        high: The last step.
    """
    wider = float((np.abs(steps) / high).max(initial=0.0))
    return bool(np.square(lost).mean() + 1 / 12 > 4 * wider**2 / 12)


def _unused_range(stored: Constant, claim: Claim) -> list[str]:
    """
    Tell of codes whose range is less than half used: a bit is wasted.

    A range from the values gives its ends to the largest of them, one that clips them, too, and a
    scale that is a power of two uses more than half.
    """
    high = code_range(stored.dtype)[1]
    assert stored.scales is not None
    largest = float(np.abs(claim.actual).max(initial=0.0))
    if not 0 < largest < high // 2 or float(stored.scales.max()) <= _LEAST_SCALE:
        return []
    return [
        f"the weight uses codes up to {largest:.0f} of {high} only: its scale is "
        f"{high / largest:.3g} × what its values need"
    ]
