"""What a tensor of the file stands for in torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pytest_edgeq.localize.kinds import base_name
from pytest_edgeq.localize.views import View
from pytest_edgeq.tflite.graph import Op

__all__ = ["Match", "Reading", "module_of", "typed", "values_taken"]

Node = torch.fx.Node


@dataclass(frozen=True, slots=True)
class Reading:
    """
    A node that a tensor of the file stands for.

    Attributes:
        node: The node.
        view: How the tensor reads as its value.
    """

    node: Node
    view: View


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """
    What a tensor of the file stands for, and from what it was made.

    Attributes:
        tensor: Its index in the subgraph.
        op: The op that made it; None for an input of the file.
        readings: All nodes of this value, in the order of the graph.
        sources: The matched tensors that it was made from.
        ops: Indices of the ops that made it from these, `op` the last.
        same: The tensor whose values it holds, where the op only holds them in another way.
        forced: No node was near; this one was told by kind.
    """

    tensor: int
    op: Op | None
    readings: tuple[Reading, ...]
    sources: tuple[int, ...] = ()
    ops: tuple[int, ...] = ()
    same: int | None = None
    forced: bool = False

    @property
    def last(self) -> Reading:
        """The last of its nodes."""
        return self.readings[-1]


def typed(node: Node, value: torch.Tensor, *, double: bool = False) -> torch.Tensor:
    """The dtype that a node's value has in torch: ids are int64 there, int32 in the file."""
    example = node.meta.get("val")
    if isinstance(example, torch.Tensor) and not example.is_floating_point():
        # The codes of a quantize node stand for the values that they hold.
        if example.dtype in (torch.int8, torch.uint8) or _is_promoted(node):
            return value
        return value.to(example.dtype)
    if double or not isinstance(example, torch.Tensor):
        return value.to(torch.float64 if double else torch.float32)
    return value.to(example.dtype)


def _is_promoted(node: Node) -> bool:
    """Whether torch takes it with floats alone, as which the file may round what is whole."""
    return bool(node.users) and all(map(_promotes, node.users))


def _promotes(node: Node) -> bool:
    """Whether a node computes with floats, of which some may be whole numbers."""
    example = node.meta.get("val")
    floats = isinstance(example, torch.Tensor) and example.is_floating_point()
    return base_name(node) in _COMPARING or (floats and base_name(node) in _PROMOTING)


_COMPARING = ("le", "lt", "ge", "gt", "eq", "ne")
_PROMOTING = ("add", "sub", "rsub", "mul", "div", "where")


def values_taken(
    sources: Iterable[int], matches: Mapping[int, Match], read: Callable[[int], torch.Tensor]
) -> dict[Node, Any]:
    """
    What matched tensors of the file hold, as the values of torch's nodes.

    Args:
        sources: The tensors.
        matches: What each matched tensor stands for.
        read: Gives a tensor of the file, dequantized.
    """
    found: dict[Node, Any] = {}
    for source in sources:
        file = read(source)
        for reading in matches[source].readings:
            found[reading.node] = typed(reading.node, reading.view.read(file))
    return found


def module_of(node: Node) -> str:
    """Path of the module that called a node, `""` for the model itself."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return str(stack[-1][0]) if stack else ""
