"""How far ops may be off together, that stand for torch nodes only as a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pytest_edgeq.localize.biases import qparams
from pytest_edgeq.localize.kernels import rounding_bound
from pytest_edgeq.localize.kernels.floats import reduction_length
from pytest_edgeq.localize.kernels.site import reach_of
from pytest_edgeq.tflite.constants import read_constant
from pytest_edgeq.tflite.graph import Op, OpGraph, Tensor
from pytest_edgeq.tflite.roles import roles_of

__all__ = ["group_bound"]

# Ops whose result moves by no more than what they take moves.
_AS_MUCH = {
    *("TRANSPOSE", "RESHAPE", "SQUEEZE", "EXPAND_DIMS", "SLICE", "STRIDED_SLICE", "SPLIT", "PAD"),
    *("CONCATENATION", "PACK", "UNPACK", "GATHER", "GATHER_ND", "TILE", "BROADCAST_TO", "PADV2"),
    *("QUANTIZE", "DEQUANTIZE", "RELU", "RELU6", "RELU_N1_TO_1", "RELU_0_TO_1", "ABS", "NEG"),
    *("MAXIMUM", "MINIMUM", "REDUCE_MAX", "REDUCE_MIN", "MAX_POOL_2D", "AVERAGE_POOL_2D", "MEAN"),
    *("RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR", "TANH", "REVERSE_V2", "MIRROR_PAD", "SPLIT_V"),
    *("SPACE_TO_DEPTH", "DEPTH_TO_SPACE"),
}

# The steepest slope of curves, where it is not 1: that of x·relu6(x + 3)/6 is at x = 3.
_SLOPES = {"LOGISTIC": 0.25, "HARD_SWISH": 1.5}

# By product, the axes of its weight that one value sums over.
_SUMMED = {"CONV_2D": (1, 2, 3), "DEPTHWISE_CONV_2D": (0, 1, 2), "FULLY_CONNECTED": (1,)}


def group_bound(graph: OpGraph, ops: Sequence[Op]) -> float | None:
    """
    What a group's codes may be off beyond half an LSB of its last output, no range cutting within.

    Each op rounds once, by ½ LSB of its own output and what its kernel adds, and hands on what it
    is given by its steepest slope.

    Args:
        graph: The file.
        ops: In order; what they take from others is exact.

    Returns:
        In LSB of the last output; None where an op has no slope that is known.
    """
    off: dict[int, float] = {}
    excess = 0.0
    for op in ops:
        given = _handed_on(graph, op, off)
        if given is None:
            return None
        for place, index in enumerate(op.outputs):
            tensor = graph.tensor(op, index)
            parameters = qparams(tensor)
            if parameters is None:
                if given and not tensor.is_floating_point:
                    # A comparison that turns over changes all behind.
                    return None
                off[index] = given
                continue
            own = rounding_bound(graph, op, output=place)
            if own is None:
                return None
            excess = given / parameters[0] + own
            off[index] = (excess + (0.5 if own else 0.0)) * parameters[0]
    return excess


def _handed_on(graph: OpGraph, op: Op, off: Mapping[int, float]) -> float | None:
    """How far an op's result is off because of what it takes, in its own unit."""
    taken = [(graph.tensor(op, i), off.get(i, 0.0)) for i in op.inputs if i >= 0]
    if op.name in ("ADD", "SUB", "MUL"):
        # A number in torch's code is rounded to a code.
        taken = [
            (tensor, each + float(tensor.scales.max()) / 2 if _is_number(tensor) else each)
            for tensor, each in taken
        ]
    errors = [each for _, each in taken]
    if not any(errors):
        return 0.0
    if op.name in _AS_MUCH:
        return max(errors)
    if op.name in _SLOPES:
        return max(errors) * _SLOPES[op.name]
    if op.name in ("ADD", "SUB"):
        return sum(errors)
    if op.name == "SUM":
        return max(errors) * reduction_length(graph, op)
    if op.name in ("SELECT", "SELECT_V2"):
        return None if errors[0] else max(errors)
    if op.name in ("MUL", "BATCH_MATMUL"):
        return _product(graph, op, taken)
    row = _greatest_row(graph, op) if op.name in _SUMMED and not any(errors[1:]) else None
    return None if row is None else errors[0] * row


def _greatest_row(graph: OpGraph, op: Op) -> float | None:
    """The greatest Σ|w| of a product with one constant."""
    stored = roles_of(graph, op).weights
    if len(stored) != 1 or not stored[0].tensor.is_constant or stored[0].tensor.is_sparse:
        return None
    weights = np.abs(read_constant(graph, op, stored[0]).floats)
    return float(weights.sum(axis=_SUMMED[op.name]).max(initial=0.0))


def _is_number(tensor: Tensor) -> bool:
    return tensor.is_constant and len(tensor.scales) == 1 and not any(n > 1 for n in tensor.shape)


def _product(graph: OpGraph, op: Op, taken: Sequence[tuple[Tensor, float]]) -> float | None:
    """(a + e)(b + f) − ab, as often as it is summed."""
    reaches = [
        reach_of(tensor) * float(tensor.scales[0]) if len(tensor.scales) == 1 else None
        for tensor, _ in taken
    ]
    if len(taken) != 2 or reaches[0] is None or reaches[1] is None:
        return None
    (_, first), (_, second) = taken
    once = reaches[0] * second + reaches[1] * first + first * second
    return once * (reduction_length(graph, op) if op.name == "BATCH_MATMUL" else 1)
