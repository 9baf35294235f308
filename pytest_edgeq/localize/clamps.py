"""Clamps that the converter moves in front of what only moves values."""

from __future__ import annotations

import math
from typing import Any

import torch

from pytest_edgeq.localize.kinds import ACTIVATIONS, CLAMPS, IDENTITIES, VIEWS, base_name
from pytest_edgeq.localize.parameters import shape_of
from pytest_edgeq.tflite.graph import OpGraph

__all__ = ["above_moves", "move_clamps"]

Node = torch.fx.Node

# What the converter makes RESHAPE, TRANSPOSE and DEPTH_TO_SPACE of.
_MOVERS = {*VIEWS, "pixel_shuffle", "pixel_unshuffle", "channel_shuffle"}
_MOVING_OPS = {*IDENTITIES, "DEPTH_TO_SPACE", "SPACE_TO_DEPTH"} - {"QUANTIZE", "DEQUANTIZE"}


def move_clamps(module: torch.fx.GraphModule, graph: OpGraph, subgraph: int) -> None:
    """
    Let clamp(move(x)) be move(clamp(x)), where the file has no clamp behind a move.

    The converter does it where nothing else takes what is moved, and fuses the clamp into what x
    is made by.

    Args:
        module: A graph of small steps, changed in place.
        graph: The file.
        subgraph: Index of the subgraph.
    """
    left = _left_behind(graph, subgraph)
    for node in list(module.graph.nodes):
        # One by another tensor is no op's own.
        if base_name(node) not in CLAMPS or len(node.all_input_nodes) != 1:
            continue
        last: Any = node.args[0]
        above, first = above_moves(last)
        if first is None or tuple(n for n in shape_of(node) if n != 1) in left:
            continue
        node.replace_all_uses_with(last)
        first.prepend(node)
        node.args = (above, *node.args[1:])
        first.replace_input_with(above, node)
        target: Any = node.target
        example = above.meta.get("val")
        if isinstance(example, torch.Tensor):
            node.meta["val"] = target(example.clone(), *node.args[1:], **node.kwargs)


def above_moves(node: Node) -> tuple[Node, Node | None]:
    """
    What a value is before it is moved, and the first node that moves it, None where none does.

    Only what one node alone takes counts for moved.
    """
    first = None
    # Inputs and parameters may be named as functions are.
    while len(node.users) == 1 and node.op == "call_function" and base_name(node) in _MOVERS:
        taken = node.all_input_nodes[0]
        # An expand gives more than it takes.
        if not shape_of(node) or math.prod(shape_of(taken)) != math.prod(shape_of(node)):
            break
        first, node = node, taken
    return node, first


def _left_behind(graph: OpGraph, subgraph: int) -> set[tuple[int, ...]]:
    """The shapes, without axes of 1, of what the file clamps behind what moves it."""
    whole = graph.subgraphs[subgraph]
    found = set()
    for op in whole.ops:
        maker = whole.producer.get(op.inputs[0]) if op.name in ACTIVATIONS else None
        if maker is not None and maker.name in _MOVING_OPS:
            found.add(tuple(n for n in whole.tensors[op.outputs[0]].shape if n != 1))
    return found
