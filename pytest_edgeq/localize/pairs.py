"""Pair the ops of a quantized file with those of a float file of the same model."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from pytest_edgeq.sequences import common
from pytest_edgeq.tflite.graph import Op, Subgraph
from pytest_edgeq.tflite.op_facts import HOLDING

__all__ = ["Pairs", "pair_ops"]


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

    @property
    def is_whole(self) -> bool:
        """Whether every op of both files has a partner."""
        return not self.unpaired and not self.unused

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
    Pair the ops of two files.

    Ops are paired in order, by name and output shape; between two pairs, where shapes differ, by
    name alone, and where as many are left on both sides, by shape alone: one may stand in place of
    another. Those left over, and TRANSPOSE, which converters put elsewhere, are paired by what they
    take, and else in order again.

    Args:
        file: Of the quantized file.
        form: Of the float file.
        inputs: By input of the quantized file, that of the float file.
    """
    ours, theirs = (
        [op for op in each.ops if op.name not in HOLDING and op.name != "TRANSPOSE"]
        for each in (file, form)
    )
    places = common(
        [(op.name, _lengths(file, op)) for op in ours],
        [(op.name, _lengths(form, op)) for op in theirs],
    )
    filled = []
    last = (-1, -1)
    for place in [*places, (len(ours), len(theirs))]:
        one, two = (range(a + 1, b) for a, b in zip(last, place, strict=True))
        between = common([ours[i].name for i in one], [theirs[i].name for i in two])
        named = [(one[i], two[j]) for i, j in between]
        filled += sorted([*named, *_left_over(file, form, ours, theirs, one, two, named)])
        filled += [place] if place != (len(ours), len(theirs)) else []
        last = place
    pairs = _Pairing(file, form, dict(inputs))
    for i, j in filled:
        pairs.add(ours[i], theirs[j])
    pairs.add_by_wiring()
    for by_shape in (True, False):
        left, others = pairs.left()
        keys = [
            [(op.name, by_shape and _lengths(each, op)) for op in ops]
            for each, ops in ((file, left), (form, others))
        ]
        for i, j in common(*keys):
            pairs.add(left[i], others[j])
    left, others = pairs.left()
    tensors = {here: there for here, there in pairs.tensors.items() if here >= 0}
    return Pairs(pairs.ops, tuple(left), tuple(others), tensors, pairs.held, pairs.float_held)


class _Pairing:
    """Pairs that are being found; attributes as of `Pairs`."""

    def __init__(self, file: Subgraph, form: Subgraph, tensors: dict[int, int]) -> None:
        self._file, self._form = file, form
        self.tensors = tensors
        self.ops: dict[int, Op] = {}
        self._used: set[int] = set()
        self.held, self.float_held = _held(file), _held(form)

    def add(self, op: Op, partner: Op) -> None:
        """Pair two ops."""
        self.ops[op.index] = partner
        self._used.add(partner.index)
        # A damaged file may give an op fewer outputs: `same` tells of that.
        self.tensors.update(zip(op.outputs, partner.outputs, strict=False))

    def left(self) -> tuple[list[Op], list[Op]]:
        """Return the ops of both files without a partner, but for those that hold their input."""
        return (
            [o for o in self._file.ops if o.name not in HOLDING and o.index not in self.ops],
            [o for o in self._form.ops if o.name not in HOLDING and o.index not in self._used],
        )

    def add_by_wiring(self) -> None:
        """Pair ops of one name and shape whose inputs, constants aside, stand for each other."""
        by_wiring: dict[Hashable, list[Op]] = {}
        left, others = self.left()
        for op in others:
            given = [self.float_held.get(index, index) for index in op.inputs]
            live = tuple(i for i in given if i in self._form.producer or i in self._form.inputs)
            by_wiring.setdefault((op.name, _lengths(self._form, op), live), []).append(op)
        for op in left:
            given = [self.held.get(index, index) for index in op.inputs]
            known = [i for i in given if i in self._file.producer or i in self._file.inputs]
            stands = [self.tensors.get(index) for index in known]
            live = tuple(self.float_held.get(each, each) for each in stands if each is not None)
            found = by_wiring.get((op.name, _lengths(self._file, op), live))
            if found and live and len(live) == len(known):
                self.add(op, found.pop(0))


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
