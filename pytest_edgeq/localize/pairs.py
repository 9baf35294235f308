"""Pair the ops of a quantized file with those of a float file of the same model."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pytest_edgeq.tflite.float_form import CASTS
from pytest_edgeq.tflite.graph import Op, Subgraph

__all__ = ["HOLDING", "Pairs", "pair_ops"]

HOLDING = CASTS | {"RESHAPE", "EXPAND_DIMS", "SQUEEZE"}
"""Ops that hold the elements of their input, in their order."""


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """
    Ops of two files that stand for each other.

    A tensor is told by the one that it holds: behind casts and reshapes it is that in front.

    Attributes:
        ops: By the index of an op of the quantized file, its partner in the float file.
        unpaired: Ops of the quantized file without one, but for those that hold their input.
        unused: Ops of the float file without one, likewise.
        tensors: By a tensor of the quantized file that is an input or that a paired op gives, the
            tensor of the float file.
        held: By a tensor of the quantized file, the one that it holds; others hold themselves.
        float_held: The same of the float file.
    """

    ops: Mapping[int, Op]
    unpaired: tuple[Op, ...]
    unused: tuple[Op, ...]
    tensors: Mapping[int, int]
    held: Mapping[int, int]
    float_held: Mapping[int, int]

    def source(self, tensor: int) -> int:
        """Return the tensor of the quantized file whose elements one holds."""
        return self.held.get(tensor, tensor)

    def float_source(self, tensor: int) -> int:
        """Return the tensor of the float file whose elements one holds."""
        return self.float_held.get(tensor, tensor)

    def partner(self, tensor: int) -> int | None:
        """Return the tensor of the float file that stands for one of the quantized file."""
        found = self.tensors.get(self.source(tensor))
        return None if found is None else self.float_source(found)


def pair_ops(file: Subgraph, form: Subgraph, inputs: Mapping[int, int]) -> Pairs:
    """
    Pair as many ops as keep their order.

    Ops are paired by name and output shape; between two pairs, where shapes differ, by name alone,
    and where as many are left on both sides, by shape alone: one may stand in place of another.

    Args:
        file: Of the quantized file.
        form: Of the float file.
        inputs: By input of the quantized file, that of the float file.
    """
    ours = [op for op in file.ops if op.name not in HOLDING]
    theirs = [op for op in form.ops if op.name not in HOLDING]
    places = _aligned(
        [(op.name, _lengths(file, op)) for op in ours],
        [(op.name, _lengths(form, op)) for op in theirs],
    )
    filled = []
    last = (-1, -1)
    for place in [*places, (len(ours), len(theirs))]:
        one, two = (range(a + 1, b) for a, b in zip(last, place, strict=True))
        between = _aligned([ours[i].name for i in one], [theirs[i].name for i in two])
        named = [(one[i], two[j]) for i, j in between]
        filled += sorted([*named, *_left_over(file, form, ours, theirs, one, two, named)])
        filled += [place] if place != (len(ours), len(theirs)) else []
        last = place
    pairs = {ours[i].index: theirs[j] for i, j in filled}
    tensors = dict(inputs)
    for i, j in filled:
        # A damaged file may give an op fewer outputs: `same` tells of that.
        tensors.update(zip(ours[i].outputs, theirs[j].outputs, strict=False))
    tensors.pop(-1, None)
    used = {op.index for op in pairs.values()}
    return Pairs(
        pairs,
        tuple(op for op in ours if op.index not in pairs),
        tuple(op for op in theirs if op.index not in used),
        tensors,
        _held(file),
        _held(form),
    )


def _left_over(
    file: Subgraph,
    form: Subgraph,
    ours: Sequence[Op],
    theirs: Sequence[Op],
    one: Sequence[int],
    two: Sequence[int],
    named: Sequence[tuple[int, int]],
) -> list[tuple[int, int]]:
    """Pair what is left between two pairs, if it is as much and of the same shapes."""
    left = [i for i in one if i not in {i for i, _ in named}]
    others = [j for j in two if j not in {j for _, j in named}]
    shapes = [_lengths(file, ours[i]) for i in left]
    if shapes != [_lengths(form, theirs[j]) for j in others]:
        return []
    return list(zip(left, others, strict=True))


def _lengths(subgraph: Subgraph, op: Op) -> tuple[int, ...]:
    """The axes of the first output, in any order, without those of length 1."""
    shape = subgraph.tensors[op.outputs[0]].shape if op.outputs and op.outputs[0] >= 0 else ()
    return tuple(sorted(length for length in shape if length != 1))


def _held(subgraph: Subgraph) -> dict[int, int]:
    held: dict[int, int] = {}
    for op in subgraph.ops:
        if op.name in HOLDING:
            held[op.outputs[0]] = held.get(op.inputs[0], op.inputs[0])
    return held


def _aligned(one: Sequence[Hashable], two: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Return the places of a longest common subsequence."""
    start = 0
    while start < min(len(one), len(two)) and one[start] == two[start]:
        start += 1
    end = 0
    while end < min(len(one), len(two)) - start and one[-1 - end] == two[-1 - end]:
        end += 1
    first, second = one[start : len(one) - end], two[start : len(two) - end]
    # Lengths of the longest common subsequences of what is left of both.
    codes = {key: number for number, key in enumerate(dict.fromkeys([*first, *second]))}
    others = np.array([codes[key] for key in second], np.int64)
    left = np.zeros((len(first) + 1, len(second) + 1), np.int32)
    for i in range(len(first) - 1, -1, -1):
        equal = others == codes[first[i]]
        here = np.maximum(left[i + 1, :-1], np.where(equal, left[i + 1, 1:] + 1, 0))
        # What comes behind counts as well: from the end on, the greatest so far.
        left[i, :-1] = np.maximum.accumulate(here[::-1])[::-1]
    places = [(i, i) for i in range(start)]
    i = j = 0
    while i < len(first) and j < len(second):
        if first[i] == second[j] and left[i, j] == left[i + 1, j + 1] + 1:
            places.append((start + i, start + j))
            i, j = i + 1, j + 1
        elif left[i + 1, j] >= left[i, j + 1]:
            i += 1
        else:
            j += 1
    tail = ((len(one) - n, len(two) - n) for n in range(end, 0, -1))
    return [*places, *tail]
