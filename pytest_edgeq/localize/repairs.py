"""Find the wrong op of a float file: its replacement makes the outputs correct."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from pytest_edgeq.localize.float_forms import axis_orders
from pytest_edgeq.localize.measured import difference
from pytest_edgeq.localize.structure import OF_QUANTIZATION, paired
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.runtimes.runner import Copied
from pytest_edgeq.tflite.ops import HOLDING, LAYOUT
from pytest_edgeq.tflite.roles import stored_constant
from pytest_edgeq.tflite.same import option_differences
from pytest_edgeq.tflite.subgraph import Op
from pytest_edgeq.tflite.writing import Graft, write_transposed, write_with

_MOST = 32  # maximum number of replacements to try: each costs a conversion of the file and a run
_ARRANGING = HOLDING | LAYOUT | {"BROADCAST_TO"}  # ops that determine the order of values
_NEAR = 2.0**-10  # relative tolerance of two float constants, to the greatest value


def repaired_op(form: EdgeFile, other: EdgeFile, is_right: Callable[[EdgeFile], bool]) -> Op | None:
    """Return the first op whose replacement by its partner makes the outputs correct."""
    finder = _GraftFinder(form, other)
    for count, grafts in enumerate(finder.candidates()):
        if count >= _MOST:
            return None
        parts = list(grafts[0].parts()) if len(grafts) == 1 else []
        for chosen in (grafts, *([part] for part in parts if len(parts) > 1)):
            if _repairs(write_with(form.graph, other.graph, chosen), form, is_right):
                return grafts[0].op
    return None


def _repairs(content: bytes, form: EdgeFile, is_right: Callable[[EdgeFile], bool]) -> bool:
    """Return whether the outputs of a changed copy of a file are correct."""
    try:
        written = EdgeFile(
            content, runtimes=form.runtimes, copied=Copied("a changed copy of the file")
        )
        return is_right(written.at(form.key))
    except RuntimeError:  # kernels refuse the shape or the number of axes
        return False


def misordered_op(form: EdgeFile, op: Op, is_right: Callable[[EdgeFile], bool]) -> Op | None:
    """
    Return the op in front of another one that lacks a permutation.

    Axes of equal length may be exchanged without an error: the converter (litert-torch 0.10.0) does
    so with an image as high and as wide as it has channels, and with a constant that is expanded.
    """
    found = None
    for maker, order in itertools.islice(_reorderings(form, op), _MOST):
        if _repairs(write_transposed(form.graph, maker, order), form, is_right):
            if maker.name == "TRANSPOSE":
                return maker
            found = found or maker
    return found


def _reorderings(form: EdgeFile, op: Op) -> Iterator[tuple[Op, tuple[int, ...]]]:
    """Yield the layout ops in front of an op with other axis orders of the same shape."""
    subgraph = form.graph.subgraphs[op.subgraph]
    for index in op.inputs:
        maker = subgraph.producer.get(index)
        while maker is not None and maker.name in _ARRANGING:
            shape = subgraph.tensors[maker.outputs[0]].shape
            for order in itertools.islice(axis_orders(shape), 1, None):
                if tuple(shape[axis] for axis in order) == shape:
                    yield maker, order
            maker = subgraph.producer.get(maker.inputs[0])


class _GraftFinder:
    """Finder of ops that differ from their partners in another float file."""

    def __init__(self, form: EdgeFile, other: EdgeFile) -> None:
        self._form, self._other = form.graph, other.graph
        self._ours = form.subgraph
        self._theirs = other.subgraph
        self._pairs = paired(form, other)

    def candidates(self) -> Iterator[Sequence[Graft]]:
        """Yield replacements in order, float constants last, and one for all readers."""
        grafts = [graft for op in self._ours.ops for graft in self._grafts(op)]
        for graft in sorted(grafts, key=self._has_only_float_constants):
            constants = () if self._has_only_float_constants(graft) else graft.constants
            shared = {graft.op.inputs[place] for place in constants}
            others = [
                each for each in grafts if shared & {each.op.inputs[p] for p in each.constants}
            ]
            yield [graft, *(each for each in others if each is not graft)]

    def _has_only_float_constants(self, graft: Graft) -> bool:
        """Whether only float constants differ, which the converter may fold differently."""
        return (
            not graft.replaces_kind
            and not graft.operands
            and all(
                self._theirs.tensors[graft.donor.inputs[place]].is_floating_point
                for place in graft.constants
            )
        )

    def _grafts(self, op: Op) -> Iterator[Graft]:
        """Yield the replacements for an op, and for a RESHAPE in front."""
        donor = self._pairs.ops.get(op.index)
        if donor is None:
            return
        is_other = op.name != donor.name or any(
            option_differences(self._other, self._form, donor, op, ignored=OF_QUANTIZATION)
        )
        operands: dict[int, int] = {}
        constants: set[int] = set()
        # One of the two may omit its bias.
        for place, (here, there) in enumerate(zip(op.inputs, donor.inputs, strict=False)):
            if here < 0 or there < 0:
                continue
            if self._theirs.tensors[there].is_constant:
                if self._is_another_constant(here, there):
                    constants.add(place)
                continue
            wanted = self._pairs.counterparts.get(self._pairs.float_source(there))
            if wanted is not None and self._pairs.source(here) != self._pairs.source(wanted):
                tensor = self._with_shape(wanted, self._theirs.tensors[there].shape, op)
                maker = self._ours.producer.get(here)
                if tensor is not None:
                    operands[place] = tensor
                elif maker is not None and self._can_read(maker, wanted):
                    yield Graft(maker, donor, operands={0: wanted})
        if is_other or operands or constants:
            yield Graft(op, donor, is_other, operands, frozenset(constants))

    def _can_read(self, maker: Op, wanted: int) -> bool:
        """Whether an op is a RESHAPE that can read a tensor instead."""
        own, new = self._ours.tensors[maker.inputs[0]], self._ours.tensors[wanted]
        first = self._ours.producer.get(wanted)
        in_front = first is None or first.index < maker.index
        return maker.name in HOLDING and in_front and math.prod(own.shape) == math.prod(new.shape)

    def _with_shape(self, wanted: int, shape: tuple[int, ...], op: Op) -> int | None:
        """Return a tensor with another one's elements in a shape, computed before an op."""
        for tensor in (wanted, *self._pairs.sources):
            maker = self._ours.producer.get(tensor)
            in_front = maker is None or maker.index < op.index
            is_same = self._pairs.source(tensor) == self._pairs.source(wanted)
            if is_same and in_front and self._ours.tensors[tensor].shape == shape:
                return tensor
        return None

    def _is_another_constant(self, here: int, there: int) -> bool:
        ours, theirs = self._ours.tensors[here], self._theirs.tensors[there]
        if not ours.is_constant or ours.dtype != theirs.dtype:
            return stored_constant(self._ours, here) is None
        one, two = (
            graph.constant(tensor) for graph, tensor in ((self._form, ours), (self._other, theirs))
        )
        if ours.dtype != "float32":
            return not np.array_equal(one, two)
        values, wanted = one.view(np.float32), two.view(np.float32)
        if values.shape != wanted.shape:
            return False
        return bool((difference(values, wanted) > _NEAR * np.abs(wanted).max(initial=0)).any())
