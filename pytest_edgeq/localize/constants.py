"""
The constants of a file, held against the reference's.

One wrong bit of one weight moves a few activation codes by 1 LSB, which is what rounding does, too:
outputs cannot tell. The constants can, because how they come about leaves them no freedom. A code
is the nearest to its value, or the one that torch chose; a bias has the scale input × weight
(https://ai.google.dev/edge/litert/models/quantization_spec). So every rule here is derived, and
what breaks one is a defect.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pytest_edgeq.localize.differences import Claim, explain
from pytest_edgeq.localize.layouts import axis_names, channel_axis, to_file_layout
from pytest_edgeq.tflite.boundary import code_range
from pytest_edgeq.tflite.constants import Constant

__all__ = [
    "FOLDED",
    "Context",
    "check_stored_weight",
    "check_weight",
    "costs_a_bit",
    "half_spacing",
    "hold_all",
    "ratio",
    "where",
]

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


def check_weight(
    op_name: str,
    stored: Constant,
    reference: Array | None = None,
    *,
    expected: Constant | None = None,
    others: Mapping[str, Array] | None = None,
    torch_op: str | None = None,
    narrowed: bool = False,
    kept: Callable[[], bool] = lambda: False,
) -> tuple[str, ...]:
    """
    Hold a weight of the file against the reference's.

    With `expected`, codes, scales and zero points must be those. With `reference`, every code must
    be the nearest to its value in the file's own scale; floats must be equal within what folding
    rounds. Both may be given. A value may lie beyond its scale, and have the last code, where the
    quantizer cuts values off: not where other scales of the weight are those that hold them all.

    Weights that were not rounded to the nearest (GPTQ), or that were scaled or rotated before
    (OSCAR and Hadamard recipes), have no reference here: give what they became, or nothing.

    Args:
        op_name: The op of the file.
        stored: As `read_constant` gives it.
        reference: Float, in torch's layout, with what was folded into it.
        expected: Codes that torch chose, in torch's layout.
        others: Other weights of the model, in torch's layout, by the name that a finding is to
            call them: where one was put in place of this one, the finding says so.
        torch_op: As for `to_file_layout`.
        narrowed: The lowest code was taken for the next one (−128 → −127) on purpose.
        kept: Gives whether scales of the whole file are those that hold all values.

    Returns:
        A sentence for each thing that is wrong, most telling first; none where it is sound.

    Raises:
        ValueError: Neither `reference` nor `expected`.
    """
    if reference is None and expected is None:
        raise ValueError("check_weight: give reference, expected or both")
    given = expected.values if expected is not None else reference
    assert given is not None
    if reference is not None and np.isnan(reference).any():
        undefined = int(np.isnan(reference).sum())
        return (f"the reference's weight is NaN in {undefined} of {reference.size} places",)
    shape = stored.values.shape
    layouts = to_file_layout(op_name, given, shape, torch_op=torch_op)
    if not layouts:
        return (
            f"the weight is {list(shape)}, which is no layout of the reference's "
            f"{list(given.shape)}",
        )

    def laid_out(values: Array, which: int) -> Array:
        if values is given:
            return layouts[which]
        return to_file_layout(op_name, values, shape, torch_op=torch_op)[which]

    first: tuple[str, ...] | None = None
    for which in range(len(layouts)):
        context = Context(op_name, others or {}, torch_op, given)
        found: list[str] = []
        if expected is not None:
            full = expected.values.shape
            turned = [
                None if each is None else laid_out(np.broadcast_to(each, full), which)
                for each in (expected.values, expected.scales, expected.zero_points)
            ]
            assert turned[0] is not None
            wanted = Constant(expected.dtype, turned[0], turned[1], turned[2], expected.grouping)
            found += _against_codes(stored, wanted, context, narrowed)
        if reference is not None and not found:
            found += _against_floats(stored, laid_out(reference, which), context, kept)
        if not found:
            return ()
        first = first or tuple(found)
    return first or ()


def check_stored_weight(
    op_name: str,
    stored: Constant,
    reference: Array,
    *,
    others: Mapping[str, Array] | None = None,
    kept: Callable[[], bool] | None = None,
) -> tuple[str, ...]:
    """
    Hold a weight of the file against floats in the file's own layout, as `check_weight` does.

    Args:
        op_name: The op of the file.
        stored: As `read_constant` gives it.
        reference: Floats of its shape, of a float file of the same model.
        others: Other weights of that file, by the name that a finding is to call them.
        kept: Gives whether scales of the whole file are those that hold all values; None of an
            operand whose scale is another tensor's, so that it may cut values off.

    Returns:
        A sentence for each thing that is wrong, most telling first; none where it is sound.
    """
    context = Context(op_name, others or {}, None, reference, as_stored=True)
    return tuple(_against_floats(stored, reference, context, kept))


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """What an explanation may draw on."""

    op_name: str
    others: Mapping[str, Array]
    torch_op: str | None
    raw: Array
    as_stored: bool = False

    def claim(
        self, stored: Constant, target: Array, tolerance: Array | float, *, exact: bool = False
    ) -> Claim:
        """What must hold, in the units of the stored values: steps of the scale, or floats."""
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
        return Claim(
            actual=steps.astype(np.float64),
            target=target,
            tolerance=np.broadcast_to(tolerance, shape),
            low=np.broadcast_to(low, shape),
            high=np.broadcast_to(high, shape),
            unit=np.broadcast_to(unit, shape),
            axes=axis_names(self.op_name, len(shape)),
            channel_axis=channels[0] if len(channels) == 1 else channel_axis(self.op_name, shape),
            quantized=stored.scales is not None,
            untransposed=(self.raw.reshape(shape) if self.raw.size == math.prod(shape) else None),
            others=functools.partial(self._alike, shape),
        )

    def _alike(self, shape: tuple[int, ...]) -> Iterator[tuple[str, Array]]:
        for name, other in self.others.items():
            if self.as_stored:
                if other.shape == shape:
                    yield name, other
                continue
            for each in to_file_layout(self.op_name, other, shape, torch_op=self.torch_op)[:1]:
                yield name, each


def _against_codes(
    stored: Constant, wanted: Constant, context: Context, narrowed: bool
) -> list[str]:
    if stored.scales is None:
        # The op stayed in float, with the values that the codes stand for.
        return _float_against_floats(stored, wanted.floats, context)
    if wanted.scales is None or wanted.zero_points is None or stored.zero_points is None:
        return [f"the weight is {stored.dtype}, and the reference's {wanted.dtype}"]
    codes = wanted.values
    if narrowed:
        codes = np.where(codes == code_range(stored.dtype)[0], codes + 1, codes)
    found = []
    if stored.grouping != wanted.grouping and np.ptp(wanted.scales) > 0:
        found.append(
            f"the weight's scales are {stored.grouping}, and the reference's {wanted.grouping}"
        )
    if not np.array_equal(stored.values, codes):
        # Integers: what is not equal differs by 1 at least.
        steps = (codes - wanted.zero_points).astype(np.float64)
        claim = context.claim(stored, steps, 0.25, exact=True)
        shifted = stored.values - codes
        moved = stored.zero_points - wanted.zero_points
        if not np.array_equal(shifted, np.broadcast_to(moved, shifted.shape)):
            found.append("the weight's codes: " + explain(claim))
    given = _as_bfloat16(wanted.scales) if _in_blocks(stored) else wanted.scales
    scales = _ratio_sentence(stored.scales, given, context, stored.values.shape)
    if scales:
        found.append(scales)
    offsets = np.broadcast_to(stored.zero_points - wanted.zero_points, stored.values.shape)
    if offsets.any():
        found.append(
            f"the weight's zero point is {_signed(offsets)} from the reference's"
            f"{where(offsets != 0, context, stored.values.shape)}"
        )
    return found


def _in_blocks(stored: Constant) -> bool:
    return (stored.grouping or "").startswith("blockwise")


def _as_bfloat16(values: Array) -> Array:
    """Round to the nearest, of two the even one; the last 16 bits of a float32 go."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    floats: Array = rounded.astype(np.uint32).view(np.float32)
    return floats


def _signed(offsets: Array) -> str:
    low, high = int(offsets.min()), int(offsets.max())
    values = {value for value in (low, high) if value}
    return " to ".join(f"{value:+d}".replace("-", "−") for value in sorted(values))


def _ratio_sentence(
    stored: Array, wanted: Array, context: Context, shape: tuple[int, ...]
) -> str | None:
    """Scales must be equal in the type in which the file holds them."""
    actual, given = (np.broadcast_to(each, shape).astype(np.float32) for each in (stored, wanted))
    wrong = actual != given
    if not wrong.any():
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = (actual.astype(np.float64) / given)[wrong]
    how = f"{ratio(ratios.min())} ×"
    if ratios.max() > ratios.min() * (1 + 1e-3):
        how = f"{ratio(ratios.min())} to {ratio(ratios.max())} ×"
    return f"the weight's scale is {how} the reference's{where(wrong, context, shape)}"


def ratio(value: float) -> str:
    """Four digits, or as many as it takes to see that it is not 1."""
    if abs(value - 1) < 5e-4:
        return f"(1 {'+' if value > 1 else '−'} {abs(value - 1):.2g})"
    return f"{value:.4g}"


def where(wrong: Array, context: Context, shape: tuple[int, ...]) -> str:
    """In which channels."""
    axis = channel_axis(context.op_name, shape)
    channels = np.flatnonzero(wrong.any(axis=tuple(i for i in range(len(shape)) if i != axis)))
    if len(channels) == shape[axis]:
        return ""
    name = axis_names(context.op_name, len(shape))[axis]
    if len(channels) == 1:
        return f" in {name} {channels[0]}"
    listed = ", ".join(map(str, channels[:4])) + (", …" if len(channels) > 4 else "")
    return f" in {len(channels)} of {shape[axis]} {name}s ({listed})"


def _against_floats(
    stored: Constant, reference: Array, context: Context, kept: Callable[[], bool] | None
) -> list[str]:
    reference = reference.astype(np.float64)
    if stored.scales is None:
        return _float_against_floats(stored, reference, context)
    if not (np.isfinite(stored.scales).all() and (stored.scales > 0).all()):
        return ["the weight has a scale that is zero, negative or not finite"]
    target = reference / stored.scales
    # Half a step, and what float32 makes of the value and the quotient.
    rounded = FOLDED + (_BFLOAT16 if _in_blocks(stored) else 0)
    claim = context.claim(stored, target, 0.5 + np.abs(target) * rounded)
    if not claim.holds.all():
        return ["the weight's codes: " + explain(claim)]
    if kept is None:
        return []
    return _beyond(stored, claim, kept) or _unused_range(stored, claim)


def _float_against_floats(stored: Constant, reference: Array, context: Context) -> list[str]:
    # The converter writes an infinite value, as of a mask, as the largest finite one.
    reference = np.clip(reference, *_FLOAT32)
    actual = stored.values.astype(np.float64)
    if np.isposinf(actual).any() or np.isneginf(actual).any():
        ends = np.clip(actual, *_FLOAT32)
        actual = np.where(ends == reference, ends, actual)
    tolerance = np.abs(reference) * FOLDED + half_spacing(stored.dtype, reference)
    # Where a difference of two parameters was folded, it is as exact as the larger one.
    tolerance += np.abs(reference).max(initial=0.0) * 2.0**-24
    claim = context.claim(replace(stored, values=actual), reference, tolerance)
    return [] if claim.holds.all() else [f"the weight ({stored.dtype}): " + explain(claim)]


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
    if not (_most(alike) or (kept() and costs_a_bit(claim.target - cut, claim.target, claim.high))):
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


def costs_a_bit(lost: Array, steps: Array, high: Array | float) -> bool:
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
