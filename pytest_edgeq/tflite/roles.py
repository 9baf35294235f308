"""Sort the operands of an op into inputs, weights and biases."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.ops import CARRYING, facts_of
from pytest_edgeq.tflite.subgraph import Op, Subgraph, Tensor


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """A constant operand as stored in the file."""

    tensor: Tensor  # the stored tensor
    dequantized: bool  # whether a DEQUANTIZE lies between it and the op
    operand: Tensor  # the tensor that the op reads: the stored one, or the result of ops between


@dataclass(frozen=True, slots=True, eq=False)
class Roles:
    """The operands of one op by role."""

    inputs: tuple[Tensor, ...]
    weights: tuple[StoredTensor, ...]
    biases: tuple[StoredTensor, ...]
    outputs: tuple[Tensor, ...]


def stored_constant(subgraph: Subgraph, index: int) -> StoredTensor | None:
    """
    Return the constant of an operand, also behind DEQUANTIZE, DENSIFY, CAST and layout ops.

    Returns None if the operand is computed from an input.
    """
    operand = index
    dequantized = False
    while index >= 0:
        if subgraph.tensors[index].is_constant:
            return StoredTensor(subgraph.tensors[index], dequantized, subgraph.tensors[operand])
        op = subgraph.producer.get(index)
        if op is None or op.name not in CARRYING:
            return None
        dequantized = dequantized or op.name == "DEQUANTIZE"
        index = op.inputs[0]
    return None


def roles_of(graph: OpGraph, op: Op) -> Roles:
    """
    Sort the operands of an op by role; omitted optional ones are in none.

    A constant operand of an op without weights, such as ADD, is an input.
    """
    subgraph = graph.subgraphs[op.subgraph]
    data, weighting = _inputs_and_weights(subgraph, op)
    inputs = [subgraph.tensors[i] for i in present(op, data)]
    weights = []
    for index in present(op, weighting):
        stored = stored_constant(subgraph, index)
        if stored is None:
            # A weight computed at run time (a hypernetwork) is one more input.
            inputs.append(subgraph.tensors[index])
        else:
            weights.append(stored)
    biases = []
    for index in present(op, facts_of(op.name).biases):
        tensor = subgraph.tensors[index]
        biases.append(stored_constant(subgraph, index) or StoredTensor(tensor, False, tensor))
    outputs = tuple(subgraph.tensors[i] for i in op.outputs if i >= 0)
    return Roles(tuple(inputs), tuple(weights), tuple(biases), outputs)


def role_of(graph: OpGraph, op: Op, tensor: int) -> str | None:
    """Return whether an op reads a tensor as `weight` or `bias`, else None."""
    roles = roles_of(graph, op)
    for name, each in (("weight", roles.weights), ("bias", roles.biases)):
        if any(stored.operand.index == tensor for stored in each):
            return name
    return None


def present(op: Op, positions: Iterable[int]) -> list[int]:
    """Return the tensors of the operands at these positions that were not left out."""
    return [op.inputs[i] for i in positions if i < len(op.inputs) and op.inputs[i] >= 0]


def _inputs_and_weights(subgraph: Subgraph, op: Op) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if op.name == "GATHER":
        # If the table is a constant, it is a weight and the indices are the input; otherwise the
        # indices are an argument, as in SLICE.
        is_table = stored_constant(subgraph, op.inputs[0]) is not None
        return ((1,), (0,)) if is_table else ((0,), ())
    if op.name == "BATCH_MATMUL":
        constants = [stored_constant(subgraph, index) is not None for index in op.inputs[:2]]
        if constants == [False, True]:
            return (0,), (1,)
        if constants == [True, False]:
            return (1,), (0,)
        return (0, 1), ()
    facts = facts_of(op.name)
    return facts.inputs or tuple(range(len(op.inputs))), facts.weights
