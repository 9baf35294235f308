"""Defects in the operands, options and constants of ops; `defects_file.KINDS` names them."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from tests.bench.detection.edits import ops_of
from tests.bench.detection.flatfile import FlatFile

Done = tuple[str, frozenset[int]] | None

_NOT_COMMUTATIVE = ("SUB", "DIV", "POW", "BATCH_MATMUL", "CONCATENATION", "LESS", "GREATER")
_BETA = 1.25


def _shape(file: FlatFile, tensor: int) -> list[int]:
    shape = file.tensor(tensor).shape
    return [] if shape is None else [int(size) for size in shape]


def softmaxes(file: FlatFile) -> list[int]:
    """Positions of the SOFTMAX ops."""
    return ops_of(file, "SOFTMAX")


def sharper(file: FlatFile, op: int, _: random.Random) -> Done:
    """Multiply the beta of a SOFTMAX."""
    file.operators[op].builtinOptions.beta *= _BETA
    return f"beta of #{op} SOFTMAX × {_BETA}", frozenset((op,))


def ordered_operands(file: FlatFile) -> Iterator[int]:
    """Ops whose first two operands do not commute, and have one shape and dtype."""
    for position, op in enumerate(file.operators):
        if file.name(position) in _NOT_COMMUTATIVE:
            one, other = (int(each) for each in list(op.inputs)[:2])
            same_type = file.tensor(one).type == file.tensor(other).type
            if one != other and same_type and _shape(file, one) == _shape(file, other):
                yield position


def exchange(file: FlatFile, op: int, _: random.Random) -> Done:
    """Exchange the first two operands of an op."""
    first, second, *others = (int(each) for each in file.operators[op].inputs)
    file.operators[op].inputs = [second, first, *others]
    return f"operands of #{op} {file.name(op)} exchanged", frozenset((op,))


def replaceable(file: FlatFile) -> Iterator[tuple[int, int, int]]:
    """Ops, each with the position of an operand and an earlier tensor of its shape and dtype."""
    earlier = [int(each) for each in file.graph.inputs]
    for position, op in enumerate(file.operators):
        for at, tensor in enumerate(int(each) for each in op.inputs):
            if tensor not in earlier:
                continue
            for other in earlier:
                if (
                    other != tensor
                    and file.tensor(other).type == file.tensor(tensor).type
                    and _shape(file, other) == _shape(file, tensor)
                ):
                    yield position, at, other
        earlier += [int(each) for each in op.outputs]


def rewire(file: FlatFile, place: tuple[int, int, int], _: random.Random) -> Done:
    """Replace an operand of an op by another tensor of the same shape and dtype."""
    op, at, other = place
    inputs = [int(each) for each in file.operators[op].inputs]
    words = f"operand {at} of #{op} {file.name(op)}: tensor {inputs[at]} → {other}"
    inputs[at] = other
    file.operators[op].inputs = inputs
    return words, frozenset((op, *_behind(file, [op])))


def transposes(file: FlatFile) -> list[int]:
    """Positions of the TRANSPOSE ops."""
    return ops_of(file, "TRANSPOSE")


def permute(file: FlatFile, op: int, rng: random.Random) -> Done:
    """Exchange two axes of equal size in a permutation, so that the shape of an op holds."""
    tensor, permutation = (int(each) for each in file.operators[op].inputs)
    axes = file.constant(permutation)
    if axes is None:
        return None
    shape = _shape(file, tensor)
    pairs = [
        (i, j)
        for i in range(len(axes))
        for j in range(i)
        if shape[axes[i]] == shape[axes[j]] and shape[axes[i]] > 1
    ]
    if not pairs:
        return None
    i, j = rng.choice(pairs)
    axes[[i, j]] = axes[[j, i]]
    return _stored(file, permutation, axes, f"{axes.tolist()}")


def constants(file: FlatFile) -> Iterator[tuple[int, int]]:
    """Ops with the float or int8 constants that are no layer's weight or bias."""
    layered = {each.tensor for each in file.constants("weight", "bias")}
    kinds = (schema.TensorType.FLOAT32, *(schema.TensorType.INT8, schema.TensorType.INT16))
    for position, op in enumerate(file.operators):
        for tensor in (int(each) for each in op.inputs):
            if tensor < 0 or tensor in layered or file.tensor(tensor).type not in kinds:
                continue
            if file.constant(tensor) is not None:
                yield position, tensor


def erase(file: FlatFile, place: tuple[int, int], rng: random.Random) -> Done:
    """Set the largest value of a constant to zero, in every op that reads it."""
    del rng  # one way only
    tensor = place[1]
    values = file.constant(tensor)
    assert values is not None, "constants() gives those that have values"
    flat, zero = values.reshape(-1), 0
    if file.is_quantized(tensor):
        points = file.tensor(tensor).quantization.zeroPoint
        zero = int(points[0])
    at = int(np.argmax(np.abs(flat.astype(np.float64) - zero)))
    if flat[at] == zero:
        return None
    flat[at] = zero
    return _stored(file, tensor, values, f"its largest value, [{at}], zeroed")


def roll(file: FlatFile, place: tuple[int, int], rng: random.Random) -> Done:
    """Roll a constant by one, in every op that reads it."""
    del rng  # one way only
    tensor = place[1]
    values = file.constant(tensor)
    assert values is not None, "constants() gives those that have values"
    rolled = np.roll(values.reshape(-1), 1).reshape(values.shape)
    if np.array_equal(rolled, values):
        return None
    return _stored(file, tensor, rolled, "rolled by one")


def _stored(file: FlatFile, tensor: int, values: np.ndarray, words: str) -> Done:
    file.store(tensor, values)
    readers = file.readers(tensor)
    names = ", ".join(f"#{op} {file.name(op)}" for op in readers)
    return f"constant of {names}: {words}", frozenset((*readers, *_behind(file, readers)))


def _behind(file: FlatFile, ops: list[int]) -> list[int]:
    """Return the readers of what these ops dequantize: the float form has no DEQUANTIZE."""
    through = [op for op in ops if file.name(op) == "DEQUANTIZE"]
    made = [int(tensor) for op in through for tensor in file.operators[op].outputs]
    return [reader for tensor in made for reader in file.readers(tensor)]
