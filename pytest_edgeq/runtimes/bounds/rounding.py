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
    rule = _RULES.get(op.name)
    excess = None if site is None or rule is None else rule(site)
    if site is None or not excess or runtime == "builtin":
        return excess
    if runtime == "reference":
        return max(excess, linear.summed_whole(site)) if op.name == "SUM" else excess
    return excess + xnnpack_excess(site)


def _copied(site: Site) -> float | None:
    """Codes are copied, or compared and copied: nothing is computed."""
    operands = (site.input(position) for position in range(len(site.op.inputs)))
    return 0.0 if any(scale_of(tensor) is not None for tensor in operands) else None


_RULES: dict[str, Callable[[Site], float | None]] = {
    "ABS": linear.rescaled,
    "ADD": linear.added,
    "AVERAGE_POOL_2D": linear.averaged,
    "BATCH_MATMUL": linear.product(0, 1, None),
    "CONCATENATION": linear.joined,
    "CONV_2D": linear.product(0, 1, 2),
    "DEPTHWISE_CONV_2D": linear.product(0, 1, 2),
    "DIV": linear.divided,
    "ELU": functions.table,
    "EXP": functions.table,
    "FULLY_CONNECTED": linear.product(0, 1, 2),
    "GELU": functions.table,
    "HARD_SWISH": functions.hard_swish,
    "L2_NORMALIZATION": functions.l2_normalized,
    "LEAKY_RELU": linear.leaky,
    "LOG": functions.table,
    "LOGISTIC": functions.sigmoid,
    "LOG_SOFTMAX": functions.log_softmax,
    "MEAN": linear.mean,
    "MUL": linear.multiplied,
    "PRELU": linear.parametric,
    "QUANTIZE": linear.quantized,
    "RELU": linear.rescaled,
    "RELU6": linear.rescaled,
    "RELU_0_TO_1": linear.rescaled,
    "RELU_N1_TO_1": linear.rescaled,
    "RESIZE_BILINEAR": linear.interpolated,
    "RSQRT": functions.reciprocal_root,
    "SOFTMAX": functions.softmax,
    "SQRT": functions.square_root,
    "SQUARED_DIFFERENCE": linear.squared_difference,
    "SUB": linear.added,
    "SUM": linear.summed,
    "TANH": functions.tanh,
    "TRANSPOSE_CONV": linear.product(2, 1, 3),
}
_RULES |= {name: _copied for name, op in OPS.items() if op.copies}
