"""
Which operand of an op is an input, which a weight, which a bias.

The operand order of each op is the kernel's own
(tensorflow/lite/kernels/<op>.cc, the constants `kInputTensor`, `kWeightsTensor`, `kBiasTensor`).
"""

from __future__ import annotations

from dataclasses import dataclass

from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.subgraph import Op, Subgraph, Tensor


@dataclass(frozen=True, slots=True)
class _Operands:
    """Positions by role; an operand in none of them is an argument, such as a shape or an axis."""

    inputs: tuple[int, ...]
    weights: tuple[int, ...] = ()
    biases: tuple[int, ...] = ()


# Gates, peepholes, projection, layer normalization.
_LSTM_WEIGHTS = (*range(1, 12), 16, *range(20, 24))
_LSTM_BIASES = (12, 13, 14, 15, 17)

_WEIGHTED = {
    "CONV_2D": _Operands((0,), (1,), (2,)),
    "DEPTHWISE_CONV_2D": _Operands((0,), (1,), (2,)),
    "CONV_3D": _Operands((0,), (1,), (2,)),
    "FULLY_CONNECTED": _Operands((0,), (1,), (2,)),
    # Operand 0 is the shape of the output.
    "TRANSPOSE_CONV": _Operands((2,), (1,), (3,)),
    "CONV_3D_TRANSPOSE": _Operands((2,), (1,), (3,)),
    "EMBEDDING_LOOKUP": _Operands((0,), (1,)),
    "EMBEDDING_LOOKUP_SPARSE": _Operands((0, 3), (4,)),
    "PRELU": _Operands((0,), (1,)),
    "SVDF": _Operands((0,), (1, 2), (3,)),
    "RNN": _Operands((0,), (1, 2), (3,)),
    "UNIDIRECTIONAL_SEQUENCE_RNN": _Operands((0,), (1, 2), (3,)),
    "LSTM": _Operands((0,), _LSTM_WEIGHTS, _LSTM_BIASES),
    "UNIDIRECTIONAL_SEQUENCE_LSTM": _Operands((0,), _LSTM_WEIGHTS, _LSTM_BIASES),
}

# Ops with operands that say how, not what: shapes, axes, begins, sizes, paddings, indices.
_FIRST_ONLY = {
    name: _Operands((0,))
    for name in (
        "ARG_MAX",
        "ARG_MIN",
        "BATCH_TO_SPACE_ND",
        "BROADCAST_TO",
        "CUMSUM",
        "EXPAND_DIMS",
        "GATHER_ND",
        "MEAN",
        "MIRROR_PAD",
        "PAD",
        "REDUCE_ALL",
        "REDUCE_ANY",
        "REDUCE_MAX",
        "REDUCE_MIN",
        "REDUCE_PROD",
        "RESHAPE",
        "RESIZE_BILINEAR",
        "RESIZE_NEAREST_NEIGHBOR",
        "REVERSE_V2",
        "RFFT2D",
        "SEGMENT_SUM",
        "SLICE",
        "SPACE_TO_BATCH_ND",
        "SPLIT_V",
        "STRIDED_SLICE",
        "SUM",
        "TILE",
        "TOPK_V2",
        "TRANSPOSE",
        "UNSORTED_SEGMENT_MAX",
        "UNSORTED_SEGMENT_MIN",
        "UNSORTED_SEGMENT_PROD",
        "UNSORTED_SEGMENT_SUM",
    )
}
_ARGUMENTS = _FIRST_ONLY | {
    "SPLIT": _Operands((1,)),
    "PADV2": _Operands((0, 2)),
    "FILL": _Operands((1,)),
    "ONE_HOT": _Operands((0, 2, 3)),
    "DYNAMIC_UPDATE_SLICE": _Operands((0, 1)),
    "SCATTER_ND": _Operands((1,)),
    "REVERSE_SEQUENCE": _Operands((0,)),
    "SPARSE_TO_DENSE": _Operands((2, 3)),
}

# Between a constant in the file and the op that reads it: kernels that change how it is held, not
# what it is.
_CARRIERS = {"DEQUANTIZE", "QUANTIZE", "DENSIFY", "TRANSPOSE", "RESHAPE", "CAST"}


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """
    A constant as the file holds it.

    Attributes:
        tensor: What is stored.
        dequantized: It reaches the op through a DEQUANTIZE.
        operand: What the op reads: the stored tensor, or what was made of it on the way.
    """

    tensor: Tensor
    dequantized: bool
    operand: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Roles:
    """The operands of one op by role."""

    inputs: tuple[Tensor, ...]
    weights: tuple[StoredTensor, ...]
    biases: tuple[StoredTensor, ...]
    outputs: tuple[Tensor, ...]


def stored_constant(subgraph: Subgraph, index: int) -> StoredTensor | None:
    """
    Find the constant that an operand holds: behind DEQUANTIZE, DENSIFY, CAST and layout ops, too.

    Returns:
        None where the operand is computed from an input.
    """
    operand = index
    dequantized = False
    # A damaged file may lead in a circle.
    seen: set[int] = set()
    while index >= 0 and index not in seen:
        if subgraph.tensors[index].is_constant:
            return StoredTensor(subgraph.tensors[index], dequantized, subgraph.tensors[operand])
        seen.add(index)
        op = subgraph.producer.get(index)
        if op is None or op.name not in _CARRIERS or not op.inputs:
            return None
        dequantized = dequantized or op.name == "DEQUANTIZE"
        index = op.inputs[0]
    return None


def roles_of(graph: OpGraph, op: Op) -> Roles:
    """
    Sort the operands of an op by role; optional ones that were left out are in none.

    An operand of an op that has no weights by nature (ADD with a constant, say) is an input.
    """
    subgraph = graph.subgraphs[op.subgraph]
    operands = _operands(subgraph, op)
    inputs = [subgraph.tensors[i] for i in _present(op, operands.inputs)]
    weights = []
    for index in _present(op, operands.weights):
        stored = stored_constant(subgraph, index)
        if stored is None:
            # A weight computed at run time (a hypernetwork) is one more input.
            inputs.append(subgraph.tensors[index])
        else:
            weights.append(stored)
    biases = [
        stored_constant(subgraph, index) or _computed(subgraph.tensors[index])
        for index in _present(op, operands.biases)
    ]
    outputs = tuple(subgraph.tensors[i] for i in op.outputs if i >= 0)
    return Roles(tuple(inputs), tuple(weights), tuple(biases), outputs)


def role_of(graph: OpGraph, op: Op, tensor: int) -> str | None:
    """Return whether an op reads a tensor as its weight or as its bias; else None."""
    roles = roles_of(graph, op)
    for name, each in (("weight", roles.weights), ("bias", roles.biases)):
        if any(stored.operand.index == tensor for stored in each):
            return name
    return None


def _computed(tensor: Tensor) -> StoredTensor:
    return StoredTensor(tensor, False, tensor)


def _present(op: Op, positions: tuple[int, ...]) -> list[int]:
    return [op.inputs[i] for i in positions if i < len(op.inputs) and op.inputs[i] >= 0]


def _operands(subgraph: Subgraph, op: Op) -> _Operands:
    if op.name in _WEIGHTED:
        return _WEIGHTED[op.name]
    if op.name in _ARGUMENTS:
        return _ARGUMENTS[op.name]
    if op.name == "GATHER" and op.inputs:
        # A table in the file is a weight and the indices are what comes in; otherwise the indices
        # are an argument, as in SLICE.
        is_table = stored_constant(subgraph, op.inputs[0]) is not None
        return _Operands((1,), (0,)) if is_table else _Operands((0,))
    if op.name == "BATCH_MATMUL":
        constants = [stored_constant(subgraph, index) is not None for index in op.inputs[:2]]
        if constants == [False, True]:
            return _Operands((0,), (1,))
        if constants == [True, False]:
            return _Operands((1,), (0,))
        return _Operands((0, 1))
    return _Operands(tuple(range(len(op.inputs))))
