"""
Error bounds of quantized kernels, beyond half an LSB.

A kernel that rounds the real result r/S + zp once is within 1/2. Each rule returns the error that
the kernel's own arithmetic adds.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from pytest_edgeq.runtimes.bounds import functions, linear
from pytest_edgeq.runtimes.bounds.site import (
    ULP,
    Site,
    magnitude,
    reach_of,
    scale_of,
    site_of,
)
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.ops import OPS
from pytest_edgeq.tflite.subgraph import Op, Tensor


def rounding_bound(
    graph: OpGraph, op: Op, *, output: int = 0, runtime: str = "builtin"
) -> float | None:
    """
    Return the error of a sound kernel's codes beyond half an LSB, in LSB of the worst channel.

    Holds for |code − clip(r/S + zp)|, where r is the real result on the op's own dequantized
    inputs, with the file's weights and the bias before it was rounded to codes, summed in float64.
    It is 0 for ops that copy codes; None for an output without one scale and codes of 8 or 16 bits,
    and for an op without a rule.
    """
    if runtime not in ("builtin", "reference", "xnnpack"):
        raise ValueError(f"no rounding bounds are known for runtime {runtime!r}")
    site = site_of(graph, op, output)
    if site is None or op.name not in _RULES:
        return None
    rule, count = _RULES[op.name]
    found = (scale_of(site.input(position)) for position in range(count))
    scales = [scale for scale in found if scale is not None]
    excess = rule(site, *scales) if len(scales) == count else None
    if not excess or runtime == "builtin":
        return excess
    if runtime == "reference":
        return max(excess, linear.summed_whole(site, *scales)) if op.name == "SUM" else excess
    return excess + _xnnpack_excess(site)


def _copied(site: Site) -> float | None:
    """Codes are copied, or compared and copied: nothing is computed."""
    return 0.0 if any(scale_of(tensor) is not None for tensor in site.operands) else None


# Rules by op, and of how many inputs they get the scale.
_RULES: dict[str, tuple[Callable[..., float | None], int]] = {
    "ABS": (linear.rescaled, 1),
    "ADD": (linear.added, 2),
    "AVERAGE_POOL_2D": (linear.averaged, 1),
    "BATCH_MATMUL": (linear.product, 0),
    "CONCATENATION": (linear.joined, 0),
    "CONV_2D": (linear.product, 0),
    "DEPTHWISE_CONV_2D": (linear.product, 0),
    "DIV": (linear.divided, 2),
    "ELU": (functions.table, 0),
    "EXP": (functions.table, 0),
    "FULLY_CONNECTED": (linear.product, 0),
    "GELU": (functions.table, 0),
    "HARD_SWISH": (functions.hard_swish, 1),
    "L2_NORMALIZATION": (functions.l2_normalized, 0),
    "LEAKY_RELU": (linear.leaky, 1),
    "LOG": (functions.table, 0),
    "LOGISTIC": (functions.sigmoid, 1),
    "LOG_SOFTMAX": (functions.log_softmax, 1),
    "MEAN": (linear.mean, 1),
    "MUL": (linear.multiplied, 2),
    "PRELU": (linear.parametric, 2),
    "QUANTIZE": (linear.quantized, 0),
    "RELU": (linear.rescaled, 1),
    "RELU6": (linear.rescaled, 1),
    "RELU_0_TO_1": (linear.rescaled, 1),
    "RELU_N1_TO_1": (linear.rescaled, 1),
    "RESIZE_BILINEAR": (linear.interpolated, 1),
    "RSQRT": (functions.reciprocal_root, 1),
    "SOFTMAX": (functions.softmax, 1),
    "SQRT": (functions.square_root, 0),
    "SQUARED_DIFFERENCE": (linear.squared_difference, 2),
    "SUB": (linear.added, 2),
    "SUM": (linear.summed, 1),
    "TANH": (functions.tanh, 1),
    "TRANSPOSE_CONV": (linear.product, 0),
}
_RULES |= {name: (_copied, 0) for name, op in OPS.items() if op.copies}


def _xnnpack_excess(site: Site) -> float:
    """
    Return the error to add to the bound of TFLite's own kernels, which run all other ops.

    (`src/microparams-init.c` below XNNPACK's own folder, August 2026.)
    """
    first = site.input(0)
    s_in = scale_of(first)
    if s_in is None or site.output.dtype == "int16":
        return 0.0
    if site.op.name in ("QUANTIZE", "LEAKY_RELU") and first.dtype == site.output.dtype:
        return _in_256ths(site, first, s_in / site.scale)
    if site.op.name in ("ADD", "SUB"):
        return _added(site)
    if site.op.name == "RESIZE_BILINEAR":
        # Shares of pixels in whole 1/2048, in two directions (`src/indirection.c`,
        # `xnn_indirection_init_resize_bilinear2d_hwc_q11`).
        return 2 * 2.0**-12 * 255 + 4 * ULP * magnitude(site)
    # Everything else is rescaled in floats: sum, scale, product and rounding are a unit each.
    return 6 * ULP * magnitude(site)


def _in_256ths(site: Site, first: Tensor, real: float) -> float:
    """
    Requantization and LEAKY_RELU multiply codes by a multiple of 1/256.

    (`xnn_init_qs8_cvt_scalar_params`, `xnn_init_qs8_lrelu_scalar_params`)
    """
    is_leaky = site.op.name == "LEAKY_RELU"
    slope = abs(float(site.graph.option(site.op, "Alpha", 0.0))) if is_leaky else 0.0
    factors = (real, real * slope)
    return max(_multiplier_excess(each, reach_of(first), site.reach) for each in factors)


def _multiplier_excess(real: float, input_reach: float, output_reach: float) -> float:
    """Return the error of rounding a multiplier, on codes of such ranges."""
    off = abs(round(256 * real) / 256 - real)
    return min(off * input_reach, off / real * output_reach) if real else 0.0


def _added(site: Site) -> float:
    """ADD and SUB multiply each side by 20 bits and an exponent (`xnn_init_qs8_add_…_params`)."""
    sides = site.input(0), site.input(1)
    scales = [float(np.max(tensor.scales)) / site.scale for tensor in sides]
    unit = 2.0 ** (math.floor(math.log2(max(scales))) - 20)
    return 0.5 * unit * sum(reach_of(tensor) for tensor in sides) + 4 * ULP * magnitude(site)
