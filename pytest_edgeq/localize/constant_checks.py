"""Compare the constants of a file, biases included, with those of its float form."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pytest_edgeq.tflite.boundary import code_range, qparams
from pytest_edgeq.tflite.constants import Constant, read_constant
from pytest_edgeq.tflite.differences import ComparedConstant, explain, pair_of
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.ops import INPUT_AT
from pytest_edgeq.tflite.roles import roles_of
from pytest_edgeq.tflite.same import ratio_text
from pytest_edgeq.tflite.subgraph import Op

Array: TypeAlias = npt.NDArray[Any]

# Relative tolerance of float32 for a folded constant. A weight behind a batch norm is w·γ/√(σ² +
# ε): five operations, each rounded by 2⁻²⁴ of its result, and a quotient by the scale; libraries
# order them differently. 2⁻²⁰ leaves room for sixteen.
FOLDED = 2.0**-20

# Half a step of bfloat16, whose mantissa has 7 bits. ai-edge-quantizer 0.10.0 writes the scales of
# blocks so (`transformations/quantize_tensor.py`), also of codes that torchao chose for the scales
# before they were rounded.
_BFLOAT16 = 2.0**-8

# Smallest scale that a quantizer chooses for any values: torchao's observers 2⁻¹² or float32's
# epsilon, ai-edge-quantizer a range of 1e-9 (over 127 for int8, over 7 for int4).
_LEAST_SCALE = 2.0**-12
_FLOAT32 = (float(np.finfo(np.float32).min), float(np.finfo(np.float32).max))


def check_stored_weight(
    op_name: str, stored: Constant, reference: Array, *, kept: Callable[[], bool] | None = None
) -> tuple[str, ...]:
    """
    Return a sentence for each defect of a weight, the most important first.

    Every code must be the nearest to its value in the file's own scale; floats must be equal within
    folding tolerance. A value may exceed its scale, and have the last code, if the quantizer clips
    weights: not if the other scales of the weight cover all of their values.
    """
    reference = reference.astype(np.float64)
    if stored.scales is None:
        # The converter writes an infinite value, as of a mask, as the largest finite one.
        reference = np.clip(reference, *_FLOAT32)
        actual = stored.values.astype(np.float64)
        ends = np.clip(actual, *_FLOAT32)
        actual = np.where(np.isinf(actual) & (ends == reference), ends, actual)
        tolerance = np.abs(reference) * FOLDED + half_spacing(stored.dtype, reference)
        # A folded difference of two parameters is as exact as the larger one.
        tolerance += np.abs(reference).max(initial=0.0) * 2.0**-24
        floats = replace(stored, values=actual)
        claim = pair_of(op_name, floats, reference, tolerance)
        return () if claim.holds.all() else (f"the weight ({stored.dtype}): " + explain(claim),)
    if not (np.isfinite(stored.scales).all() and (stored.scales > 0).all()):
        return ("the weight has a scale that is zero, negative or not finite",)
    target = reference / stored.scales
    # Half a step, and the float32 rounding of the value and the quotient.
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
    """Return the maximum error of rounding to a shorter float: half the spacing."""
    if dtype == "bfloat16":
        halves: Array = np.abs(reference) * _BFLOAT16
        return halves
    if dtype != "float16":
        return np.zeros(reference.shape)
    with np.errstate(over="ignore", invalid="ignore"):
        # Beyond the range of float16 it is NaN, which accepts nothing.
        return np.spacing(np.abs(reference).astype(np.float16)).astype(np.float64) / 2


def _beyond(stored: Constant, claim: ComparedConstant, kept: Callable[[], bool]) -> list[str]:
    """Return a finding on values beyond their scale, unless the quantizer clips."""
    over = np.maximum(claim.target - claim.high, claim.low - claim.target)
    wrong = over > claim.tolerance
    if not wrong.any():
        return []
    alike = _least_scales(stored, claim.target, ~wrong)
    cut = np.clip(claim.target, claim.low, claim.high)
    # A quantizer may clip a weight on purpose as long as this costs almost nothing.
    if not (
        _most(alike) or (kept() and _costs_a_bit(claim.target - cut, claim.target, claim.high))
    ):
        return []
    place = np.unravel_index(int(np.where(wrong, over, -1).argmax()), wrong.shape)
    count = int(wrong.sum())
    return [
        f"the weight's codes: {count} of {wrong.size} {'lies' if count == 1 else 'lie'} beyond "
        f"what {'its' if count == 1 else 'their'} scale reaches: {[int(i) for i in place]} is "
        f"{claim.actual[place]:.0f} where the reference has {claim.target[place]:.4g}"
    ]


def cover_all_values(weights: Iterable[tuple[Constant, Array]]) -> bool:
    """
    Whether most scales are the smallest that cover all values of their weights.

    A min/max range has such scales. A range that minimizes an error clips part of each channel, and
    a learned one does not fit the remaining values exactly.
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
    """Return for each scale whether it is the smallest that covers its values."""
    assert stored.scales is not None, "codes have scales"
    scales, shape = stored.scales, steps.shape
    size = int(str(stored.grouping).split("_")[-1]) if _in_blocks(stored) else 0
    if size and shape[-1] % size == 0:
        shape = (*shape[:-1], -1, size)
        scales = np.broadcast_to(scales, steps.shape).reshape(shape)[..., :1]
    steps, right = steps.reshape(shape), right.reshape(shape)
    aside = tuple(i for i, length in enumerate(scales.shape) if length == 1)
    if not aside:
        # After a change of layout each value has a scale: their groups are unknown.
        return []
    low, high = code_range(stored.dtype)
    least, greatest = steps.min(axis=aside, initial=0.0), steps.max(axis=aside, initial=0.0)
    if np.any(stored.zero_points):
        reach, codes, more = greatest - least, high - low, [0.0]
    else:
        # torch may divide by one more code than there is: half of it lies beyond either end.
        reach, codes, more = np.maximum(greatest, -least), high, [0.0, 0.5]
    counted = right.all(axis=aside) & (reach > 0) & (scales.max(axis=aside) > _LEAST_SCALE)
    slack = FOLDED + (_BFLOAT16 if size else 0)
    covered = np.any([np.abs(reach / (codes + each) - 1) <= slack for each in more], axis=0)
    alike: list[bool] = covered[counted].tolist()
    return alike


def _costs_a_bit(lost: Array, steps: Array, high: Array) -> bool:
    """Whether clipping costs more than a bit, four times the rounding error's power."""
    wider = float((np.abs(steps) / high).max(initial=0.0))
    return bool(np.square(lost).mean() + 1 / 12 > 4 * wider**2 / 12)


def _unused_range(stored: Constant, claim: ComparedConstant) -> list[str]:
    """Return a finding on codes that use less than half of their range, as no quantizer's do."""
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
"""Relative tolerance of a bias's scale: libraries round its factors or the product."""

# Maximum relative difference of two scales that observers may compute for one tensor.
# If two quantize nodes behind one tensor have separate observers, the converter (litert-torch
# 0.10.0) keeps one scale for the tensor and writes the bias by the other. Histograms of the same
# values differ by a thousandth, and move a bias by as much; no sound file has more.
SAME_SCALE = 2.0**-8

_INT32 = np.iinfo(np.int32)

_BIAS = "bias"  # not the name of an op: texts then call the last axis a channel


def check_bias(
    stored: Constant,
    reference: Array,
    *,
    input_scale: float | None = None,
    weight_scales: Array | None = None,
    wider: float = 1.0,
) -> tuple[str, ...]:
    """
    Return a sentence for each defect of a bias, the most important first.

    A quantized one is int32 (int64 with int16 activations) with scale input × weight and zero point
    0; its code is the nearest. A bias that is clipped at the INT32 limit is accepted if it would
    fit an input range that is `wider` times as wide, as its values need.
    """
    reference = reference.astype(np.float64)
    if np.isnan(reference).any():
        return ("the reference's bias is NaN",)
    # Folding a batch norm subtracts: the difference has the rounding error of its terms.
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
    wrong = ~(np.abs(scales / product - 1) <= _ROUNDED_PRODUCT)
    if wrong.any():
        ratios = (scales / product)[wrong]
        found.append(
            f"the bias's stored scale is not input scale × weight scale, but "
            f"{ratio_text(float(ratios.flat[0]))} × that{_where(wrong)}"
        )
    if stored.zero_points is not None and stored.zero_points.any():
        found.append(f"the bias's zero point is {int(stored.zero_points.max())}, which must be 0")
    return tuple(found)


def _bias_codes(
    stored: Constant, reference: Array, product: Array, slack: Array, wider: float
) -> list[str]:
    # Kernels add the codes to the accumulator and ignore the stored scale.
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
    """Return the affected channels, which lie along the last axis, as text."""
    channels = np.flatnonzero(wrong.any(axis=tuple(range(wrong.ndim - 1))))
    if len(channels) == wrong.shape[-1]:
        return ""
    if len(channels) == 1:
        return f" in channel {channels[0]}"
    listed = ", ".join(map(str, channels[:4])) + (", …" if len(channels) > 4 else "")
    return f" in {len(channels)} of {wrong.shape[-1]} channels ({listed})"


def _input_scale_of(stored: Constant, weight_scales: Array) -> float | None:
    """
    Return the input scale of a bias if all channels agree on one.

    If it differs from the input's scale, and the weight is sound, the input's scale was changed by
    its producer, whose own codes fit the new scale.
    """
    if stored.scales is None:
        return None
    weights = np.asarray(weight_scales, np.float64).ravel()
    if not (np.isfinite(weights).all() and (weights > 0).all() and (stored.scales > 0).all()):
        return None
    quotients = np.broadcast_to(stored.scales, stored.values.shape).ravel() / weights
    median = float(np.median(quotients))
    # Scale and quotient of each channel are rounded, and so is the median.
    close = np.abs(quotients / median - 1) <= 2 * _ROUNDED_PRODUCT
    return median if bool(close.all()) else None


def written_scale(graph: OpGraph, op: Op) -> tuple[float, float] | None:
    """Return an op's input scale and the one implied by its bias, if it has one of each."""
    if op.name not in INPUT_AT:
        return None
    roles = roles_of(graph, op)
    weights, biases = (
        [each for each in stored if each.tensor.is_constant]
        for stored in (roles.weights, roles.biases)
    )
    parameters = qparams(graph.tensor(op, op.inputs[INPUT_AT[op.name]]))
    if len(weights) != 1 or len(biases) != 1 or parameters is None:
        return None
    written = _input_scale_of(read_constant(graph, op, biases[0]), weights[0].tensor.scales)
    return None if written is None else (parameters[0], written)
