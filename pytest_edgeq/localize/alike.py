"""Of nodes that are near to what an op gives, the one that it stands for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pytest_edgeq.localize.codes import clipped, code_limits, is_near
from pytest_edgeq.localize.kinds import (
    ACTIVATIONS,
    CLAMPS,
    HEAVY,
    HEAVY_OPS,
    IDENTITIES,
    TWINS,
    base_name,
    fits,
)
from pytest_edgeq.localize.matches import Match, module_of, typed, values_taken
from pytest_edgeq.localize.moves import MOVING, moved
from pytest_edgeq.localize.parameters import shape_of
from pytest_edgeq.localize.reference import Reached, ReferenceGraph
from pytest_edgeq.localize.views import View, best_view, distance
from pytest_edgeq.tflite.graph import Op, Subgraph, Tensor
from pytest_edgeq.tflite.roles import stored_constant

__all__ = ["Chooser", "Near", "changes_nothing", "is_taken_twice"]

Node = torch.fx.Node

Near = tuple[float, Reached, View]
"""How far a node's value is from the file's (rms), the node, and how the file reads as it."""

_FUSED_CLAMPS = ("RELU", "RELU6", "RELU_N1_TO_1")

# Codes in use below which rounding moves a value as far as other functions do.
_FEW = 8


def is_taken_twice(node: Node) -> bool:
    """Whether two calls take a value, or the model gives it away beside one that does."""
    return sum(user.op in ("call_function", "output") for user in node.users) > 1


def changes_nothing(reference: ReferenceGraph, node: Node) -> bool:
    """
    Whether a node adds zeros alone or multiplies by ones alone: no op is left of it.

    So do a recurrent layer's first state, and the scale and shift of an untrained norm.
    """
    neutral = {"add": 0, "add_": 0, "mul": 1, "mul_": 1}.get(base_name(node))
    varying = [n for n in node.all_input_nodes if reference.varies(n)]
    fixed = [n for n in node.all_input_nodes if not reference.varies(n)]
    if neutral is None or len(fixed) != 1 or len(varying) != 1 or node.kwargs:
        return False
    if shape_of(node) != shape_of(varying[0]):
        return False  # to some shape that it spreads over
    return bool(torch.all(reference.constant(fixed[0], quantized=False) == neutral))


class Chooser:
    """
    Chooses by what an op does, where its values tell no node from another.

    Args:
        subgraph: Of the file.
        reference: The torch graph.
        values: Gives a tensor's value for the sample by its index, as floats.
        module_of: The torch module path of an op, None where it cannot be told.
    """

    def __init__(
        self,
        subgraph: Subgraph,
        reference: ReferenceGraph,
        values: Callable[[int], torch.Tensor],
        module_of: Callable[[Op], str | None],
    ) -> None:
        self._subgraph = subgraph
        self._reference = reference
        self._values = values
        self._module_of = module_of

    def choose(
        self,
        op: Op,
        index: int,
        near: list[Near],
        sources: tuple[int, ...],
        ops: tuple[int, ...],
        matches: Mapping[int, Match],
    ) -> tuple[Near, list[Near]]:
        """
        Give the one node of several, and those that might be it as well.

        Args:
            op: The op.
            index: Of the tensor that it makes.
            near: All whose values are near to that one's.
            sources: The matched tensors that it was made from.
            ops: Indices of the ops that made it from these.
            matches: What is matched so far, by tensor.
        """
        taken = {reading.node for i in sources for reading in matches[i].readings}
        near = self._clamping(op, near)
        near = self._own(op, ops, near, taken) or self._told(op, index, near)
        near = self._of_module(op, index, near, taken)
        least = min(each[0] for each in near)
        kinds = [each for each in near if each[0] <= 1.5 * least + 1e-9]
        kinds = self._by_constant(op, index, kinds, sources, matches)
        fitting = [e for e in kinds if fits(op.name, self._reference.kind(e[1].node))]
        return self._told_apart(fitting or kinds, index, sources, ops, matches), near

    def _clamping(self, op: Op, near: list[Near]) -> list[Near]:
        """
        Of an op that clamps those that do, and of one with a clamp in it, too.

        In a range that begins at 0 both are as near; where the same is also taken as it is, the
        file has an op for each.
        """
        own = [each for each in near if base_name(each[1].node) in CLAMPS]
        if op.name in ACTIVATIONS:
            return own or near
        if op.fused_activation not in _FUSED_CLAMPS:
            return near
        return own if any(self._is_beside(each[1].node) for each in own) else near

    def _is_beside(self, node: Node) -> bool:
        """Whether what a clamp takes is taken as it is, too, from where it is computed on."""
        first = self._reference.computing(node)
        while node is not first:
            node = node.all_input_nodes[0]
            if is_taken_twice(node):
                return True
        return False

    def _of_module(self, op: Op, index: int, near: list[Near], taken: set[Node]) -> list[Near]:
        """
        Those of a layer's own module, where values tell no other.

        Layers beside each other give the same where all is less than a step, as next to an outlier.
        So does what follows them: where few codes are in use, the kind tells more than values.
        """
        if op.name not in HEAVY_OPS or len(near) < 2:
            return near
        module = self._module_of(op)
        own = []
        for each in near:
            between = self._reference.between(each[1].node, taken)
            if {module_of(node) for node in between if base_name(node) in HEAVY} == {module}:
                own.append(each)
        near = own or near
        limits, file = code_limits(self._tensor(index)), self._values(index)
        if limits is None or not file.numel() or file.max() - file.min() >= _FEW * limits[2]:
            return near
        return [each for each in near if fits(op.name, self._reference.kind(each[1].node))] or near

    def _by_constant(
        self,
        op: Op,
        index: int,
        alike: list[Near],
        sources: tuple[int, ...],
        matches: Mapping[int, Match],
    ) -> list[Near]:
        """
        Leave out those that are only alike because their constant is rounded as another one.

        What adds 1 is as near as what adds an ε, where the file's scale for the ε reaches no 1.
        """
        held = any(stored_constant(self._subgraph, i) is not None for i in op.inputs)
        if (
            op.name in HEAVY_OPS
            or not held
            or len({self._reference.computing(e[1].node) for e in alike}) < 2
        ):
            return alike
        given = values_taken(sources, matches, self._values)
        found = []
        for each in alike:
            values = dict(given)
            for node in self._reference.between(each[1].node, set(given)):
                values[node] = self._reference.compute(node, values, quantized=False)
            value = clipped(self._tensor(index), values[each[1].node])
            rms = distance(each[2].read(self._values(index)), value)
            if is_near(rms, self._tensor(index), value):
                found.append(each)
        return found or alike

    def _own(self, op: Op, ops: tuple[int, ...], near: list[Near], taken: set[Node]) -> list[Near]:
        """
        Those that do to what the op takes what the op does, and nothing else.

        Others may be as near by chance: what adds an ε behind is, within a step of the range.
        """
        if any(self._subgraph.ops[each].name not in IDENTITIES for each in ops if each != op.index):
            return []

        def is_own(node: Node) -> bool:
            computing = self._reference.computing(node)
            varying = [n for n in computing.all_input_nodes if self._reference.varies(n)]
            return base_name(computing) in TWINS.get(op.name, ()) and all(
                n in taken or self._reference.computing(n) in taken for n in varying
            )

        return [each for each in near if is_own(each[1].node)]

    def _told(self, op: Op, index: int, near: list[Near]) -> list[Near]:
        """Leave out what is near because it is clipped throughout, where another one may be it."""
        limits = code_limits(self._tensor(index))
        if len(near) == 1 or limits is None:
            return near
        low, high, scale, zero_point = limits
        floor, ceiling = (low - zero_point) * scale, (high - zero_point) * scale

        def varies(value: torch.Tensor) -> bool:
            return bool(((value > floor) & (value < ceiling)).any())

        if varies(min(near, key=lambda each: each[0])[1].value):
            return near
        told = [
            e for e in near if fits(op.name, self._reference.kind(e[1].node)) and varies(e[1].value)
        ]
        return told or near

    def _told_apart(
        self,
        alike: Sequence[Near],
        index: int,
        sources: tuple[int, ...],
        ops: tuple[int, ...],
        matches: Mapping[int, Match],
    ) -> Near:
        """
        Of nodes whose values are alike, the first that has its elements from where the file has.

        Steps of a sequence that hold the same token are told by nothing else.
        """
        if len(alike) == 1 or len(sources) > 1:
            return alike[0]
        source = self._values(sources[0])
        given = torch.arange(source.numel()).reshape(source.shape)
        labels: dict[int, torch.Tensor] = {sources[0]: given}
        for position in ops:
            op = self._subgraph.ops[position]
            taken = [labels[i] for i in op.inputs if i in labels]
            for output in op.outputs if len(taken) == 1 else ():
                shape = tuple(self._values(output).shape)
                found = moved(op, output, shape, taken[0], self._constant)
                if found is not None:
                    labels[output] = found
        if index not in labels:
            return alike[0]
        known: dict[Node, Any] = {
            reading.node: typed(reading.node, reading.view.read(given))
            for reading in matches[sources[0]].readings
        }
        for apart, reached, _ in alike:
            between = self._reference.between(reached.node, set(known))
            if not all(base_name(node) in MOVING for node in between):
                continue
            values = dict(known)
            for node in between:
                values[node] = self._reference.compute(node, values, quantized=False)
            laid_out = best_view(labels[index], values[reached.node])
            if laid_out is not None and not laid_out[0]:
                return apart, reached, laid_out[1]
        return alike[0]

    def _constant(self, index: int) -> torch.Tensor | None:
        return self._values(index) if self._tensor(index).is_constant else None

    def _tensor(self, index: int) -> Tensor:
        return self._subgraph.tensors[index]
