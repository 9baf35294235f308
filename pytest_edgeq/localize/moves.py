"""Where ops that only move what they take have each element from."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pytest_edgeq.localize.kinds import IDENTITIES, VIEWS
from pytest_edgeq.tflite.graph import Op

__all__ = ["MOVING", "moved"]

# Nodes that only move what they take.
MOVING = {
    *VIEWS,
    *("slice", "narrow", "select", "split", "chunk", "getitem", "split_with_sizes", "flip"),
    *("unbind", "quantize_per_tensor", "dequantize_per_tensor"),
}


# Ops whose constant operands say where to.
_BY_OPERANDS = ("TRANSPOSE", "REVERSE_V2", "SLICE", "SPLIT")


def moved(
    op: Op,
    output: int,
    shape: tuple[int, ...],
    labels: torch.Tensor,
    constant: Callable[[int], torch.Tensor | None],
) -> torch.Tensor | None:
    """
    Labels of an op's input, moved as the op moves its elements.

    Args:
        op: The op.
        output: Which tensor of its outputs is wanted, by its index in the subgraph.
        shape: That one's.
        labels: In the shape of what it takes.
        constant: Gives a constant operand by its index in the subgraph, None of what is none.

    Returns:
        Labels of that shape; None of an op that does more, or that is not known here.
    """
    operands = []
    if op.name in _BY_OPERANDS:
        given = [None if index < 0 else constant(index) for index in op.inputs]
        operands = [each.reshape(-1).tolist() for each in given if each is not None]
    if op.name == "TRANSPOSE":
        found = labels.permute(operands[0]) if operands else None
    elif op.name == "REVERSE_V2" and len(operands) == 1:
        found = labels.flip(operands[0])
    elif op.name == "SLICE" and len(operands) == 2:
        found = labels
        for axis, (start, size) in enumerate(zip(*operands, strict=True)):
            # −1 stands for all that is left.
            found = found.narrow(axis, start, size if size >= 0 else labels.shape[axis] - start)
    elif op.name == "SPLIT" and len(operands) == 1:
        found = labels.chunk(len(op.outputs), operands[0][0])[op.outputs.index(output)]
    else:
        found = labels if op.name in IDENTITIES else None
    return None if found is None or found.numel() != _size(shape) else found.reshape(shape)


def _size(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())
