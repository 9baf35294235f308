"""Granularity of a weight, robust to fields that a file leaves at their default."""

from __future__ import annotations

from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.tflite.ops import facts_of
from pytest_edgeq.tflite.subgraph import Op, Tensor

_WEIGHT = 1
"""Position of the weight among the operands of every op whose weight has an axis of channels."""


def granularities(edge: EdgeFile, op: Op, tensor: Tensor) -> tuple[str, ...]:
    """
    Return the possible names of a quantized operand's granularity.

    One scale for one channel is `per_tensor` and `per_channel`. A tensor with a single scale has
    `quantized_dimension` 0 whatever its op, so its channels are counted on the op's own axis: axis
    0 of a depthwise weight has length 1 always.
    """
    own = tensor.granularity
    if own is None:
        return ()
    axis = facts_of(op.name).axis
    if own == "per_tensor":
        if axis is None or len(op.inputs) <= _WEIGHT or tensor.index == op.inputs[0]:
            return (own,)
        shape = edge.graph.tensor(op, op.inputs[_WEIGHT]).shape
        return (own, "per_channel") if len(shape) > axis and shape[axis] == 1 else (own,)
    if own == "per_channel":
        along, n_scales = tensor.quantized_dimension, len(tensor.scales)
        length = tensor.shape[along] if 0 <= along < len(tensor.shape) else 0
        if n_scales != length:
            return (f"{n_scales} scales for {length} channels",)
        is_weight = len(op.inputs) > _WEIGHT and tensor.index == op.inputs[_WEIGHT]
        if is_weight and axis is not None and along != axis:
            return (f"per_channel on axis {along} instead of {axis}",)
    return (own,)
