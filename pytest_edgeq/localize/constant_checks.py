"""Compare the constants of a file, biases included, with those of its float form."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pytest_edgeq.tflite.boundary import code_range, qparams
from pytest_edgeq.tflite.constants import Constant, read_constant
from pytest_edgeq.tflite.differences import ConstantPair, explain, pair_of
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.ops import INPUT_AT
from pytest_edgeq.tflite.roles import roles_of
from pytest_edgeq.tflite.same import ratio_text
from pytest_edgeq.tflite.subgraph import Op

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
    kept: Callable[[], bool] | None = None,
) -> tuple[str, ...]:
    """
    Hold a weight of the file against floats in the file's own layout.

    Every code must be the nearest to its value in the file's own scale; floats must be equal within
    what folding rounds. A value may lie beyond its scale, and have the last code, where the
    quantizer cuts values off: not where other scales of the weight are those that hold them all.

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
        claim = pair_of(op_name, floats, reference, tolerance)
        return () if claim.holds.all() else (f"the weight ({stored.dtype}): " + explain(claim),)
    if not (np.isfinite(stored.scales).all() and (stored.scales > 0).all()):
        return ("the weight has a scale that is zero, negative or not finite",)
    target = reference / stored.scales
    # Half a step, and what float32 makes of the value and the quotient.
    rounded = FOLDED + (_BFLOAT16 if _in_blocks(stored) else 0)
    claim = pair_of(op_name, stored, target, 0.5 + np.abs(target) * rounded)
    if not claim.holds.all():
        return ("the weight's codes: " + explain(claim),)
    if kept is None:
        return ()
    return tuple(_beyond(stored, claim, kept) or _unused_range(stored, claim))


def _in_blocks(stored: Constant) -> bool:
    return (stored.grouping or "").startswith("blockwise")


def half_spacing(dtype: str, reference: Array) -> Array:
    """Return the greatest error of rounding to a shorter float: half the spacing."""
    if dtype == "bfloat16":
        halves: Array = np.abs(reference) * _BFLOAT16
        return halves
    if dtype != "float16":
        return np.zeros(reference.shape)
    with np.errstate(over="ignore", invalid="ignore"):
        # Beyond the range of float16 it is NaN, which nothing is within.
        return np.spacing(np.abs(reference).astype(np.float16)).astype(np.float64) / 2


def _beyond(stored: Constant, claim: ConstantPair, kept: Callable[[], bool]) -> list[str]:
    """Return a finding on values beyond their scale, unless the quantizer cuts others as well."""
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
    """Return, for each scale of right values, whether it is the least that holds them."""
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
    """
    wider = float((np.abs(steps) / high).max(initial=0.0))
    return bool(np.square(lost).mean() + 1 / 12 > 4 * wider**2 / 12)


def _unused_range(stored: Constant, claim: ConstantPair) -> list[str]:
    """
    Return a finding on codes that use less than half of their range: a bit is wasted.

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


_ROUNDED_PRODUCT = 2.0**-22
"""Relative tolerance of a bias's scale: libraries round its factors, or the product, in turn."""

SAME_SCALE = 2.0**-8
"""
Of two scales that an observer may have given one tensor, how far they are apart at most, relative.

Of two quantize nodes behind one tensor, each observed by itself, the converter (litert-torch
0.10.0) keeps one for the tensor and writes the bias by the other. Histograms of the same values
differ by a thousandth, and move a bias by as much; more is no sound file's.
"""

_INT32 = np.iinfo(np.int32)

# Not an op: it has the axis names of none, so that its last axis is called a channel.
_BIAS = "bias"


def check_bias(
    op_name: str,
    stored: Constant,
    reference: Array,
    *,
    input_scale: float | None = None,
    weight_scales: Array | None = None,
    wider: float = 1.0,
) -> tuple[str, ...]:
    """
    Hold a bias of the file against the reference's.

    A quantized one is int32 (int64 beside int16 activations) with scale input × weight and zero
    point 0; its code is the nearest. One that is cut off at the INT32 limit would fit, if the
    input had the range of its values, which is `wider` times as wide: nothing is said of it then.

    Returns:
        A sentence for each thing that is wrong, most telling first; none where it is sound.

    Raises:
        ValueError: A quantized bias without the scales of input and weight.
    """
    reference = reference.astype(np.float64)
    if np.isnan(reference).any():
        return ("the reference's bias is NaN",)
    # Folding a batch norm subtracts: what is left has the rounding of the terms, not of itself.
    slack = np.abs(reference) * FOLDED + np.abs(reference).max(initial=0.0) * 2.0**-22
    if stored.scales is None:
        if not np.issubdtype(stored.values.dtype, np.floating):
            return (f"the bias is {stored.dtype} without a scale",)
        slack = slack + half_spacing(stored.dtype, reference)
        claim = pair_of(_BIAS, stored, reference, slack)
        return () if claim.holds.all() else (f"the bias ({stored.dtype}): " + explain(claim),)
    if input_scale is None or weight_scales is None:
        raise ValueError("check_bias: a quantized bias needs input_scale and weight_scales")
    product = np.asarray(weight_scales, np.float64).ravel() * float(input_scale)
    if product.size not in (1, reference.size):
        return (f"the bias has {reference.size} values, and the weight {product.size} scales",)
    if not (np.isfinite(product).all() and (product > 0).all()):
        return ("input scale × weight scale is zero, negative or not finite",)
    product = np.broadcast_to(product, (reference.size,)).reshape(reference.shape)
    found = _bias_codes(stored, reference, product, slack, wider)
    scales = np.broadcast_to(stored.scales, reference.shape)
    # Not `>`, which NaN would pass.
    apart = ~(np.abs(scales / product - 1) <= _ROUNDED_PRODUCT)
    if apart.any():
        ratios = (scales / product)[apart]
        found.append(
            f"the bias's stored scale is not input scale × weight scale, but "
            f"{ratio_text(float(ratios.flat[0]))} × that{_where(apart)}"
        )
    if stored.zero_points is not None and stored.zero_points.any():
        found.append(f"the bias's zero point is {int(stored.zero_points.max())}, which must be 0")
    return tuple(found)


def _bias_codes(
    stored: Constant, reference: Array, product: Array, slack: Array, wider: float
) -> list[str]:
    # Kernels add the codes to the accumulator as they are: the stored scale is not looked at.
    exact = Constant(stored.dtype, stored.values, product, np.zeros(1, np.int64), stored.grouping)
    target = reference / product
    found = []
    limited = (stored.values <= _INT32.min + 1) | (stored.values >= _INT32.max)
    size = np.abs(target)
    cut = limited & ~((size >= _INT32.max) & (size < _INT32.max * wider))
    if cut.any():
        worst = int(np.where(cut, size, -1).argmax())
        found.append(
            f"the bias is at the INT32 limit{_where(cut)}: "
            f"{reference.flat[worst]:.4g} is {target.flat[worst]:.4g} steps of "
            f"{product.flat[worst]:.4g} (input scale × weight scale)"
        )
    tolerance = 0.5 + np.abs(target) * _ROUNDED_PRODUCT + slack / product
    claim = pair_of(_BIAS, exact, target, np.where(limited, np.inf, tolerance))
    if not claim.holds.all():
        found.append("the bias's codes: " + explain(claim))
    return found


def _where(wrong: Array) -> str:
    """In which channels, which lie along the last axis."""
    channels = np.flatnonzero(wrong.any(axis=tuple(range(wrong.ndim - 1))))
    if len(channels) == wrong.shape[-1]:
        return ""
    if len(channels) == 1:
        return f" in channel {channels[0]}"
    listed = ", ".join(map(str, channels[:4])) + (", …" if len(channels) > 4 else "")
    return f" in {len(channels)} of {wrong.shape[-1]} channels ({listed})"


def _input_scale_of(stored: Constant, weight_scales: Array) -> float | None:
    """
    Return the one input scale that a bias was written with.

    Where it is not the input's, and the weight is sound, the input's scale was changed: by the op
    that makes the input, whose own codes are right in its scale.
    """
    if stored.scales is None:
        return None
    weights = np.asarray(weight_scales, np.float64).ravel()
    if not (np.isfinite(weights).all() and (weights > 0).all() and (stored.scales > 0).all()):
        return None
    quotients = np.broadcast_to(stored.scales, stored.values.shape).ravel() / weights
    median = float(np.median(quotients))
    # Two rounded numbers of each channel, and one each of those that are compared.
    close = np.abs(quotients / median - 1) <= 2 * _ROUNDED_PRODUCT
    return median if bool(close.all()) else None


def written_scale(graph: OpGraph, op: Op) -> tuple[float, float] | None:
    """
    The scale of an op's input, and the one that its bias was written with.

    None of an op without one weight, one bias and one scale of its input.
    """
    if op.name not in INPUT_AT:
        return None
    roles = roles_of(graph, op)
    weights, biases = (
        [each for each in stored if each.tensor.is_constant]
        for stored in (roles.weights, roles.biases)
    )
    given = qparams(graph.tensor(op, op.inputs[INPUT_AT[op.name]]))
    if len(weights) != 1 or len(biases) != 1 or given is None:
        return None
    written = _input_scale_of(read_constant(graph, op, biases[0]), weights[0].tensor.scales)
    return None if written is None else (given[0], written)
