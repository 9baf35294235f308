"""
The biases of a file and the parameters of its activations, held against the reference's.

A bias has the scale input × weight, so that it tells with which input scale it was written.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pytest_edgeq.localize.constants import FOLDED, claim_of, half_spacing
from pytest_edgeq.localize.differences import explain
from pytest_edgeq.tflite.constants import Constant, read_constant
from pytest_edgeq.tflite.graph import Op, OpGraph, Tensor
from pytest_edgeq.tflite.roles import roles_of

__all__ = [
    "INPUT_AT",
    "SAME_SCALE",
    "check_bias",
    "is_of_parameters",
    "qparams",
    "unexpected_qparams",
    "written_scale",
]

Array: TypeAlias = npt.NDArray[Any]

_ROUNDED_PRODUCT = 2.0**-22
"""Of a bias's scale: one product, by libraries that round the factors first, or the result, too."""

SAME_SCALE = 2.0**-8
"""
Of two scales that an observer may have given one tensor, how far they are apart at most, relative.

Of two quantize nodes behind one tensor, each observed by itself, the converter (litert-torch
0.10.0) keeps one for the tensor and writes the bias by the other. Histograms of the same values
differ by a thousandth, and move a bias by as much; more is no sound file's.
"""

INPUT_AT = {
    **dict.fromkeys(("CONV_2D", "DEPTHWISE_CONV_2D", "CONV_3D", "FULLY_CONNECTED"), 0),
    **dict.fromkeys(("TRANSPOSE_CONV", "CONV_3D_TRANSPOSE"), 2),
}
"""Where ops with a bias have their input."""

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
) -> tuple[str, ...]:
    """
    Hold a bias of the file against the reference's.

    A quantized one is int32 (int64 beside int16 activations) with scale input × weight and zero
    point 0; its code is the nearest.

    Args:
        op_name: The op of the file.
        stored: As `read_constant` gives it.
        reference: Floats of its shape, of a float file of the same model.
        input_scale: Of the op's input; needed where the bias is quantized.
        weight_scales: Of its weight, one or one a channel; likewise.

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
        claim = claim_of(_BIAS, stored, reference, slack)
        return () if claim.holds.all() else (f"the bias ({stored.dtype}): " + explain(claim),)
    if input_scale is None or weight_scales is None:
        raise ValueError("check_bias: a quantized bias needs input_scale and weight_scales")
    product = np.asarray(weight_scales, np.float64).ravel() * float(input_scale)
    if product.size not in (1, reference.size):
        return (f"the bias has {reference.size} values, and the weight {product.size} scales",)
    if not (np.isfinite(product).all() and (product > 0).all()):
        return ("input scale × weight scale is zero, negative or not finite",)
    product = np.broadcast_to(product, (reference.size,)).reshape(reference.shape)
    found = _bias_codes(stored, reference, product, slack)
    scales = np.broadcast_to(stored.scales, reference.shape)
    # Not `>`, which NaN would pass.
    apart = ~(np.abs(scales / product - 1) <= _ROUNDED_PRODUCT)
    if apart.any():
        ratios = (scales / product)[apart]
        found.append(
            f"the bias's stored scale is not input scale × weight scale, but "
            f"{_ratio(float(ratios.flat[0]))} × that{_where(apart)}"
        )
    if stored.zero_points is not None and stored.zero_points.any():
        found.append(f"the bias's zero point is {int(stored.zero_points.max())}, which must be 0")
    return tuple(found)


def _bias_codes(stored: Constant, reference: Array, product: Array, slack: Array) -> list[str]:
    # Kernels add the codes to the accumulator as they are: the stored scale is not looked at.
    exact = Constant(stored.dtype, stored.values, product, np.zeros(1, np.int64), stored.grouping)
    target = reference / product
    found = []
    limited = (stored.values <= _INT32.min + 1) | (stored.values >= _INT32.max)
    if limited.any():
        worst = int(np.where(limited, np.abs(target), -1).argmax())
        found.append(
            f"the bias is at the INT32 limit{_where(limited)}: "
            f"{reference.flat[worst]:.4g} is {target.flat[worst]:.4g} steps of "
            f"{product.flat[worst]:.4g} (input scale × weight scale)"
        )
    tolerance = 0.5 + np.abs(target) * _ROUNDED_PRODUCT + slack / product
    claim = claim_of(_BIAS, exact, target, np.where(limited, np.inf, tolerance))
    if not claim.holds.all():
        found.append("the bias's codes: " + explain(claim))
    return found


def _ratio(value: float) -> str:
    """Four digits, or as many as it takes to see that it is not 1."""
    if abs(value - 1) < 5e-4:
        return f"(1 {'+' if value > 1 else '−'} {abs(value - 1):.2g})"
    return f"{value:.4g}"


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
    Tell the one input scale with which a bias was written.

    Where it is not the input's, and the weight is sound, the input's scale was changed: by the op
    that makes the input, whose own codes are right in its scale.

    Args:
        stored: The bias.
        weight_scales: One or one a channel.

    Returns:
        None for a bias without scales, or with one for each of several inputs.
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
        [each for each in stored if each.tensor.is_constant and not each.tensor.is_sparse]
        for stored in (roles.weights, roles.biases)
    )
    given = qparams(graph.tensor(op, op.inputs[INPUT_AT[op.name]]))
    if len(weights) != 1 or len(biases) != 1 or given is None:
        return None
    written = _input_scale_of(read_constant(graph, op, biases[0]), weights[0].tensor.scales)
    return None if written is None else (given[0], written)


def is_of_parameters(finding: str) -> bool:
    """
    Whether a finding is about scale or zero point of an output.

    Of a file that was built again these follow from a weight that is another.
    """
    return finding.startswith("its output has ")


def qparams(tensor: Tensor) -> tuple[float, int] | None:
    """Scale and zero point of a tensor that has one of each."""
    if not tensor.is_quantized or len(tensor.scales) != 1:
        return None
    return float(tensor.scales[0]), int(tensor.zero_points[0])


def unexpected_qparams(
    what: str, actual: tuple[float, int], expected: tuple[float, int], whose: str = "the reference"
) -> str | None:
    """
    Hold the parameters of an activation against others, exactly as float32.

    Args:
        what: What to call it, such as `its output`.
        actual: Scale and zero point in the file.
        expected: What they must be.
        whose: Whose those are.

    Returns:
        A sentence, or None where they are the same.
    """
    (scale, zero_point), (wanted, wanted_point) = actual, expected
    parts = []
    if np.float32(scale) != np.float32(wanted):
        times = _ratio(float(np.float64(np.float32(scale)) / np.float32(wanted)))
        parts.append(f"scale {scale:.6g}, which is {times} × {whose}'s {wanted:.6g}")
    if zero_point != wanted_point:
        parts.append(
            f"zero point {zero_point}, where {whose} has {wanted_point} "
            f"({zero_point - wanted_point:+d})".replace("(-", "(−")
        )
    return f"{what} has {' and '.join(parts)}" if parts else None
