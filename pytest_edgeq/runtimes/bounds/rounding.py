"""
Error bounds of quantized kernels, beyond half an LSB.

A kernel that rounds the real result r/S + zp once is within 1/2. Each rule returns the error that
the kernel's own arithmetic adds.
"""

from __future__ import annotations

from collections.abc import Callable

from pytest_edgeq.runtimes.bounds import functions, linear
from pytest_edgeq.runtimes.bounds.site import Site, scale_of, site_of
from pytest_edgeq.runtimes.bounds.xnnpack import xnnpack_excess
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.ops import OPS
from pytest_edgeq.tflite.subgraph import Op


def rounding_bound(
    graph: OpGraph, op: Op, *, output: int = 0, runtime: str = "builtin"
) -> float | None:
    """
    Return the error of a sound kernel's codes beyond half an LSB.

    Holds for |code − clip(r/S + zp)|, where r is the real result on the op's own dequantized
    inputs, with the file's weights and the bias before it was rounded to codes, summed in float64.

    Returns:
        The excess in LSB of the worst channel, 0 for ops that copy codes; None for an output
        without one scale and codes of 8 or 16 bits, and for an op without a rule.

    Raises:
        ValueError: There are no rules for this runtime.
    """
    if runtime not in ("builtin", "reference", "xnnpack"):
        raise ValueError(f"no rounding bounds are known for runtime {runtime!r}")
    site = site_of(graph, op, output)
    if site is None or op.name not in _RULES:
        return None
    rule, count = _RULES[op.name]
    scales = [scale_of(site.input(position)) for position in range(count)]
    excess = None if None in scales else rule(site, *scales)
    if not excess or runtime == "builtin":
        return excess
    if runtime == "reference":
        return max(excess, linear.summed_whole(site)) if op.name == "SUM" else excess
    return excess + xnnpack_excess(site)


def _copied(site: Site) -> float | None:
    """Codes are copied, or compared and copied: nothing is computed."""
    operands = (site.input(position) for position in range(len(site.op.inputs)))
    return 0.0 if any(scale_of(tensor) is not None for tensor in operands) else None


# Rules by op, and of how many inputs they get the scale.
_RULES: dict[str, tuple[Callable[..., float | None], int]] = {
    "ABS": (linear.rescaled, 1),
    "ADD": (linear.added, 2),
    "AVERAGE_POOL_2D": (linear.averaged, 1),
    "BATCH_MATMUL": (linear.product(0, 1, None), 0),
    "CONCATENATION": (linear.joined, 0),
    "CONV_2D": (linear.product(0, 1, 2), 0),
    "DEPTHWISE_CONV_2D": (linear.product(0, 1, 2), 0),
    "DIV": (linear.divided, 2),
    "ELU": (functions.table, 0),
    "EXP": (functions.table, 0),
    "FULLY_CONNECTED": (linear.product(0, 1, 2), 0),
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
    "TRANSPOSE_CONV": (linear.product(2, 1, 3), 0),
}
_RULES |= {name: (_copied, 0) for name, op in OPS.items() if op.copies}
