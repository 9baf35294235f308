"""Values that torch computes several times, and the file once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from pytest_edgeq.localize.kinds import base_name
from pytest_edgeq.localize.parameters import shape_of

__all__ = ["merge_equals", "share_maxima", "share_means"]


def share_means(graph: torch.fx.Graph) -> None:
    """Let a mean be that over the same axes which keeps these: the file has one of them."""
    means: dict[tuple[torch.fx.Node, str], list[torch.fx.Node]] = {}
    for node in graph.nodes:
        if base_name(node) == "mean" and len(node.args) > 1 and not node.kwargs:
            means.setdefault((node.args[0], repr(node.args[1])), []).append(node)
    for nodes in means.values():
        keeping = [node for node in nodes if node.args[2:] == (True,)]
        bare = [node for node in nodes if node not in keeping]
        if not keeping or not bare:
            continue
        with graph.inserting_before(nodes[0]):
            whole = graph.node_copy(keeping[0])
        for node in nodes:
            same = whole
            if node in bare:
                shape = list(node.meta["val"].shape)
                with graph.inserting_before(node):
                    same = graph.call_function(torch.ops.aten.reshape.default, (whole, shape))
                same.meta.update(node.meta)
            node.replace_all_uses_with(same)
            graph.erase_node(node)


def share_maxima(graph: torch.fx.Graph) -> None:
    """
    Let a softmax be that of what its maximum was taken from, where another node takes this one.

    The converter finds no softmax in what torch writes it as, then, but in the rest of it: so next
    to a logsumexp of the same values.
    """
    maxima = {node.args[0]: node for node in graph.nodes if _is_last_maximum(node)}
    for node in list(graph.nodes):
        if base_name(node) not in ("softmax", "_softmax") or node.args[0] not in maxima:
            continue
        value, least = node.args[0], maxima[node.args[0]]
        assert isinstance(value, torch.fx.Node), "of which the maximum was taken"
        dim, rank = node.args[1], len(shape_of(value))
        if not isinstance(dim, int) or dim % rank != rank - 1 or shape_of(node) != shape_of(value):
            continue
        aten: Any = torch.ops.aten
        # It may have been taken behind the softmax.
        first = next(each for each in graph.nodes if value in each.all_input_nodes)
        if first is not least:
            first.prepend(least)
        with graph.inserting_before(node):
            lowest = graph.call_function(aten.full.default, ([], -math.inf))
            bounded = graph.call_function(aten.maximum.default, (least, lowest))
            apart = graph.call_function(aten.sub.Tensor, (value, bounded))
        bounded.meta.update(least.meta)
        apart.meta.update(node.meta)
        node.args = (apart, *node.args[1:])


def _is_last_maximum(node: torch.fx.Node) -> bool:
    """Whether it is the maximum over the last axis, which it keeps."""
    if base_name(node) != "amax" or node.args[2:] != (True,):
        return False
    dims: Any = node.args[1]
    rank = len(shape_of(node.args[0]))
    return len(dims) == 1 and rank > 0 and dims[0] % rank == rank - 1


def merge_equals(graph: torch.fx.Graph, numbers: Mapping[str, torch.Tensor]) -> None:
    """
    Let calls of one function on the same values be one node, as the converter lets them.

    Args:
        graph: Changed in place.
        numbers: What torch.export made attributes of, by name: each is one of its own there.
    """
    known: dict[tuple[Any, ...], torch.fx.Node] = {}
    for node in list(graph.nodes):
        if node.op not in ("call_function", "get_attr") or _is_random(node):
            continue
        # As text 1 and 1.0 are two, and nodes have names of their own.
        key: tuple[Any, ...] = (node.target, repr(node.args), repr(node.kwargs))
        if node.op == "get_attr" and (number := numbers.get(str(node.target))) is not None:
            key = ("number", number.dtype, tuple(number.shape), number.item())
        first = known.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _is_random(node: torch.fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
