"""Transposed convolutions of several groups, which the converter makes one of each group of."""

from __future__ import annotations

from typing import Any

import torch

from pytest_edgeq.localize.kinds import base_name
from pytest_edgeq.localize.parameters import shape_of

__all__ = ["is_grouped", "part_groups"]

Node = torch.fx.Node

# By function, how many axes follow that of the channels.
_SPATIAL = {f"conv_transpose{n}d": n for n in (1, 2, 3)}
_GROUPS_AT = 6


def is_grouped(node: Node) -> bool:
    """Whether it is a transposed convolution of several groups."""
    groups: Any = node.args[_GROUPS_AT] if len(node.args) > _GROUPS_AT else 1
    return base_name(node) in _SPATIAL and groups > 1


def part_groups(graph: torch.fx.Graph) -> None:
    """
    Let each group be a transposed convolution of its own channels, and add the bias behind.

    So the converter has it, which knows groups of convolutions forwards alone.

    Args:
        graph: Its nodes have examples; changed in place.
    """
    for node in filter(is_grouped, list(graph.nodes)):
        _part(graph, node)


def _part(graph: torch.fx.Graph, node: Node) -> None:
    aten: Any = torch.ops.aten
    value, weight, bias, *options = node.args
    place = _GROUPS_AT - 3
    groups: Any = options[place]
    options[place] = 1
    spatial, shape = _SPATIAL[base_name(node)], shape_of(node)
    channel = len(shape) - spatial - 1
    inputs = shape_of(value)[channel] // groups
    outputs = list(shape)
    outputs[channel] //= groups

    def add(function: Any, args: tuple[Any, ...], size: Any) -> Node:
        new = graph.call_function(function, args)
        new.meta.update(node.meta)
        new.meta["val"] = node.meta["val"].new_empty(tuple(size))
        return new

    with graph.inserting_before(node):
        parts = []
        for start in range(0, groups * inputs, inputs):
            sizes = [list(shape_of(each)) for each in (value, weight)]
            sizes[0][channel] = sizes[1][0] = inputs
            ends = (start, start + inputs)
            part = add(aten.slice.Tensor, (value, channel, *ends), sizes[0])
            own = add(aten.slice.Tensor, (weight, 0, *ends), sizes[1])
            parts.append(add(node.target, (part, own, None, *options), outputs))
        whole = add(aten.cat.default, (parts, channel), shape)
        if bias is not None:
            laid_out = [-1, *[1] * spatial]
            turned = add(aten.view.default, (bias, laid_out), [shape[channel], *[1] * spatial])
            whole = add(aten.add.Tensor, (whole, turned), shape)
    node.replace_all_uses_with(whole)
    graph.erase_node(node)
