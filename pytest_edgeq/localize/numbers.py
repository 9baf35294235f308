"""Numbers in front of a convolution that the converter folds into it, or does not."""

from __future__ import annotations

from typing import Any

import torch

from pytest_edgeq.localize.kinds import base_name
from pytest_edgeq.localize.layers import layers_apart, stored_layers
from pytest_edgeq.localize.parameters import attribute, line_of, new_constant
from pytest_edgeq.tflite.graph import OpGraph

__all__ = ["fold_numbers"]

Node = torch.fx.Node

_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")
_CONVOLUTION_OPS = ("CONV_2D", "DEPTHWISE_CONV_2D", "CONV_3D")


def fold_numbers(module: torch.fx.GraphModule, graph: OpGraph, subgraph: int) -> None:
    """
    Let conv(x·s + t, W, b) be conv(x, W·s, b + ΣW·t) wherever the file has it so.

    The converter does it to numbers in front of a convolution that pads nothing (what is padded is
    0, and not t), and rounds the weight alone: its part of the bias is that of the float weight.

    Args:
        module: A graph whose parameters are attributes; changed in place.
        graph: The file.
        subgraph: Index of the subgraph.
    """
    stored = list(stored_layers(graph, subgraph, _CONVOLUTION_OPS))
    for node in list(module.graph.nodes):
        if base_name(node) not in _CONVOLUTIONS or _pads(node):
            continue
        given: list[Any] = [*node.args, None]
        value, weight, bias = given[:3]
        own = attribute(module, weight)
        added = None if bias is None else attribute(module, bias)
        if own is None or (bias is not None and added is None):
            continue
        added = own.new_zeros(len(own)) if added is None else added
        forms: list[_Form] = [(value, own, added)]
        scale, shift = torch.ones(1), torch.zeros(1)
        while isinstance(value, Node) and (line := line_of(module, value, 1)) is not None:
            value, factor, offset = line
            scale, shift = scale * factor, shift + scale * offset
            forms.append((value, own * scale, added + own.flatten(1).sum(1) * shift))
        if len(forms) == 1:
            continue
        apart = [layers_apart(*form[1:], stored, base_name(node)) for form in forms]
        if min(apart) < apart[0]:
            source, *constants = forms[apart.index(min(apart))]
            held = [
                new_constant(module, node, f"folded_{kind}", each)
                for kind, each in zip(("weight", "bias"), constants, strict=True)
            ]
            node.args = (source, *held, *node.args[3:])
    module.graph.eliminate_dead_code()


_Form = tuple[Any, torch.Tensor, torch.Tensor]


def _pads(node: Node) -> bool:
    """Whether it pads: by numbers, or by a word."""
    padding: Any = node.args[4] if len(node.args) > 4 else 0
    given = padding if isinstance(padding, (list, tuple)) else [padding]
    return node.kwargs != {} or any(each not in (0, "valid") for each in given)
