"""What the ops behind a tensor say of its range, which need not be that of its values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pytest_edgeq.localize.biases import qparams
from pytest_edgeq.tflite.boundary import code_range
from pytest_edgeq.tflite.constants import read_constant
from pytest_edgeq.tflite.graph import Op, OpGraph
from pytest_edgeq.tflite.op_facts import ACTIVATIONS, MOVING
from pytest_edgeq.tflite.roles import stored_constant

if TYPE_CHECKING:
    from pytest_edgeq.localize.measured import Measured

__all__ = ["Readers"]

_SELECTS = ("SELECT", "SELECT_V2")

# Ops that give some of the values that they take.
_TAKE_A_PART = {
    *(*_SELECTS, *ACTIVATIONS),
    *("SLICE", "STRIDED_SLICE", "GATHER", "SPLIT", "SPLIT_V", "UNPACK"),
}

# Ops whose kernels want one scale of all values that they choose from or join.
_JOINS = ("CONCATENATION", "PACK", "MAXIMUM", "MINIMUM", *_SELECTS)

# Ops whose output has a range that a constant operand can take for itself.
_WITH_CONSTANTS = (*_JOINS, "ADD", "SUB", "PADV2")

# Shares of a constant that its own rounding to 8 bits may take.
_ALIKE = 0.01


class Readers:
    """
    The ops of a subgraph, by what they take.

    Args:
        graph: The file.
        subgraph: Index of the subgraph.
    """

    def __init__(self, graph: OpGraph, subgraph: int) -> None:
        self._graph = graph
        self._subgraph = graph.subgraphs[subgraph]

    def untaken(self, measured: Mapping[int, Sequence[tuple[int, Measured]]]) -> set[int]:
        """
        Ops whose losses a SELECT, a SLICE or a clamp behind does not take.

        That of a branch may be all in values that are never chosen (those of a softplus beyond 20,
        what is sliced from another copy in its own range), or beyond what is clamped, whose range a
        quantizer gives to what stands before it: what is lost there is not lost behind, where
        torch's whole model is held against it.

        Args:
            measured: By op, its outputs, each with its errors.

        Returns:
            Indices of ops.
        """
        found = set()
        for number, tensor, own in ((n, *each) for n, every in measured.items() for each in every):
            behind = self._of(tensor)
            if not behind or any(op.name not in _TAKE_A_PART for op in behind):
                continue
            there = [each for op in behind for _, each in measured.get(op.index, ())]
            # A quarter of the power is half of the size.
            most = 0.25 * own.noise / max(own.elements, 1)
            if there and all(
                each.cumulative_noise / max(each.elements, 1) < most for each in there
            ):
                found.add(number)
        return found

    def widens(self, op: Op) -> str | None:
        """
        Say whose range an op's output has, if not that of its values, and the way out.

        Returns:
            A sentence; None where it is nobody else's.
        """
        tensor = self._graph.tensor(op, op.outputs[0])
        own = qparams(tensor)
        if own is None:
            return None
        ends = [(code - own[1]) * own[0] for code in code_range(tensor.dtype)]
        for reader in (op, *self._of(op.outputs[0])):
            for value in self._constants(reader):
                if any(abs(end) > 0 and abs(value - end) <= _ALIKE * abs(end) for end in ends):
                    return (
                        f"that is the constant {value:.3g} of {reader.name} #{reader.index}: of a "
                        "mask, −30 does as much; else leave that op in float"
                    ).replace("-", "−")
            taken = [i for i in reader.inputs if stored_constant(self._subgraph, i) is None]
            scales = [qparams(self._graph.tensor(reader, i)) for i in taken if i >= 0]
            if reader is not op and reader.name in _JOINS and scales.count(own) > 1:
                return (
                    f"{reader.name} #{reader.index} has one scale for all that it takes: bring "
                    "these to like ranges, or leave it in float"
                )
        return None

    def _of(self, tensor: int) -> list[Op]:
        """The ops that take a tensor, or its values as one op holds them in another way."""
        behind = self._subgraph.consumers[tensor]
        while len(behind) == 1 and behind[0].name in MOVING:
            behind = self._subgraph.consumers[behind[0].outputs[0]]
        return behind

    def _constants(self, op: Op) -> Iterator[float]:
        """The least and the greatest value of each constant that an op adds, joins or chooses."""
        for index in op.inputs if op.name in _WITH_CONSTANTS else ():
            stored = stored_constant(self._subgraph, index)
            if stored is None or stored.tensor.is_sparse or not stored.tensor.is_quantized:
                continue
            floats = read_constant(self._graph, op, stored).floats
            if floats.size:
                yield from (float(np.min(floats)), float(np.max(floats)))
