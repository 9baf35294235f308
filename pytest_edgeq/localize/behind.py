"""What stands behind a value and is of the same op: nodes that pass it on, clamps in the op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pytest_edgeq.localize.alike import changes_nothing, is_taken_twice
from pytest_edgeq.localize.kinds import (
    ACTIVATIONS,
    CLAMPS,
    IDENTITIES,
    VIEWS,
    base_name,
    is_dequantize,
    is_quantize,
)
from pytest_edgeq.localize.matches import Match, Reading
from pytest_edgeq.localize.reference import ReferenceGraph
from pytest_edgeq.localize.views import best_view
from pytest_edgeq.tflite.graph import Op, Subgraph

__all__ = ["Wholes"]

Node = torch.fx.Node


class Wholes:
    """
    Matches with all that stands behind and is of the same op.

    Args:
        subgraph: Of the file.
        reference: The torch graph.
        values: Gives a tensor's value for the sample by its index, as floats.
    """

    def __init__(
        self,
        subgraph: Subgraph,
        reference: ReferenceGraph,
        values: Callable[[int], torch.Tensor],
    ) -> None:
        self._subgraph = subgraph
        self._reference = reference
        self._values = values

    def of(self, index: int, op: Op | None, readings: Sequence[Reading]) -> Match:
        """
        Take in the nodes behind that only pass the value on, and clamps that the op has to hold.

        A clamp that no op of the file stands for is held by the op in front: fused, or in the range
        of its output.
        """
        reference = self._reference
        by_node = {reading.node: reading for reading in readings}
        clamps_follow = self._is_clamped_behind(index)
        # A sum with zeros, or a product with ones, that the file has no op of.
        left = not any(
            each.name in ("ADD", "MUL") and self._takes_constants(each, index)
            for each in self._subgraph.consumers[index]
        )
        file = self._values(index)
        # Labels instead of values: what is wrong in these, or alike, turns nothing.
        labels = torch.arange(file.numel()).reshape(file.shape)
        start = readings[-1]
        values: dict[Node, Any] = {start.node: start.view.read(labels)}
        queue = list(values)
        while queue:
            node = queue.pop(0)
            for user in node.users:
                if user in by_node or user.op != "call_function" or user.all_input_nodes[0] != node:
                    continue
                if any(reference.varies(n) for n in user.all_input_nodes[1:]):
                    continue
                name = base_name(user)
                clamp = name in CLAMPS and op is not None
                if clamps_follow and op is not None:
                    # That is the last of two: the first one may be fused.
                    clamp = clamp and bool(op.fused_activation) and self._is_clamped_again(user)
                if clamp and is_taken_twice(node):
                    clamp = False
                passed = name in VIEWS or is_quantize(user) or is_dequantize(user)
                if not (clamp or passed or (left and changes_nothing(reference, user))):
                    continue
                view = by_node[node].view
                values[user] = values[node]
                if _turns(user):
                    values[user] = reference.compute(user, values, quantized=True)
                    found = best_view(labels, values[user])
                    if found is None or found[0] > 0:
                        continue
                    view = found[1]
                by_node[user] = Reading(user, view)
                queue.append(user)
        ordered = sorted(by_node.values(), key=lambda reading: reference.order(reading.node))
        return Match(index, op, tuple(ordered))

    def _is_clamped_again(self, node: Node) -> bool:
        """Whether all that takes a value in torch clamps it, as it is or in codes."""
        users = list(node.users)
        passing = [each for each in users if is_quantize(each) or is_dequantize(each)]
        return bool(users) and all(
            self._is_clamped_again(each) if each in passing else base_name(each) in CLAMPS
            for each in users
        )

    def _is_clamped_behind(self, index: int) -> bool:
        """Whether an op clamps this tensor, or what only holds it in another way."""
        for op in self._subgraph.consumers[index]:
            if op.name in ACTIVATIONS and self._takes_constants(op, index):
                return True
            if op.name in IDENTITIES and any(map(self._is_clamped_behind, op.outputs)):
                return True
        return False

    def _takes_constants(self, op: Op, index: int) -> bool:
        """Whether all that an op takes beside a tensor is constant."""
        return all(self._subgraph.tensors[i].is_constant for i in op.inputs if i != index)


def _turns(node: Node) -> bool:
    """Whether it lays its elements out anew."""
    before, after = (each.meta.get("val") for each in (node.all_input_nodes[0], node))
    if base_name(node) in ("permute", "transpose", "t", "mT", "numpy_T", "movedim", "swapaxes"):
        return True
    shapes = [tuple(each.shape) for each in (before, after) if isinstance(each, torch.Tensor)]
    return base_name(node) in VIEWS and (len(shapes) < 2 or shapes[0] != shapes[1])
