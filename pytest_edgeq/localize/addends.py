"""Biases and what is added behind a layer, as the file has them: in one constant, or in two."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from pytest_edgeq.localize.in_front import ALIKE, LAYERS
from pytest_edgeq.localize.kinds import VIEWS, base_name
from pytest_edgeq.localize.layers import StoredLayer, layers_apart, stored_layers
from pytest_edgeq.localize.parameters import (
    as_bias,
    attribute,
    computed_constant,
    keeps_features,
    laid_out_constant,
    new_constant,
    shape_of,
    share_of,
    without_bias,
)
from pytest_edgeq.tflite.constants import read_constant
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.roles import stored_constant

__all__ = ["is_subtracted", "join_biases", "move_biases"]

Node = torch.fx.Node


def is_subtracted(graph: OpGraph, subgraph: int) -> Callable[[torch.Tensor], bool]:
    """What tells whether the file subtracts a constant, up to what rounding makes of it."""
    stored = [*_added(graph, subgraph, "SUB")]
    # A coarse one, of 8 bits of a range that one channel may take alone.
    return lambda value: _nearest(value, stored) < ALIKE


def move_biases(module: torch.fx.GraphModule, graph: OpGraph, subgraph: int) -> None:
    """
    Let (x·W + b) + c be x·W + (b + c) wherever the file has it so.

    The converter sums the two constants up, and leaves the layer without a bias: a linear one, or a
    convolution in front of a map of positions. Of a layer that takes a constant it computes the
    product alone, and the file adds the bias at each run.

    Args:
        module: A graph whose parameters are attributes; changed in place.
        graph: The file.
        subgraph: Index of the subgraph.
    """
    stored = [*_added(graph, subgraph)]
    for node in list(module.graph.nodes):
        if base_name(node) == "linear":
            _part_from_bias(module, node, stored)
        if base_name(node) != "add" or len(node.args) != 2:
            continue
        for value, other in (node.args, node.args[::-1]):
            constant, layer = computed_constant(module, other), _linear_above(value)
            held, spatial = stored, 0
            if _is_convolution(value):
                layer, spatial = value, len(shape_of(value)) - 2
                held = [np.moveaxis(each, -1, 1) for each in stored if each.ndim == spatial + 2]
            if constant is None or layer is None:
                continue
            bias = attribute(module, layer.args[2]) if len(layer.args) > 2 else None
            if bias is None or len(layer.users) > 1 or not bias.any():
                continue
            summed = constant + bias.reshape(-1, *[1] * spatial)
            if _nearest(summed, held) < _nearest(constant, held):
                layer.args = (*layer.args[:2], None, *layer.args[3:])
                node.args = (value, new_constant(module, node, "moved_bias", summed))
                break


def _part_from_bias(module: torch.fx.GraphModule, layer: Node, stored: list[np.ndarray]) -> None:
    """Let a layer that takes a constant be a product and a sum, where the file has that product."""
    value = computed_constant(module, layer.args[0])
    weight, bias = (computed_constant(module, each) for each in (*layer.args[1:], None, None)[:2])
    if value is None or weight is None or bias is None:
        return
    if _nearest(torch.nn.functional.linear(value, weight), stored) < ALIKE:
        without_bias(module, layer)


def join_biases(module: torch.fx.GraphModule, graph: OpGraph, subgraph: int) -> None:
    """
    Let x·W + c be linear(x, Wᵀ, c) wherever the file has it so: c is a number or one a feature.

    The same of α·(x·W) + β·c, whose factors the converter folds into the two constants.

    Args:
        module: A graph whose parameters are attributes; changed in place.
        graph: The file.
        subgraph: Index of the subgraph.
    """
    stored, added = list(stored_layers(graph, subgraph, LAYERS)), [*_added(graph, subgraph)]
    for node in list(module.graph.nodes):
        if base_name(node) == "addmm":
            _join_factors(module, node, stored)
        if base_name(node) != "add" or len(node.args) != 2 or node.kwargs:
            continue
        for product, other in (node.args, node.args[::-1]):
            weight = _product_weight(module, product)
            bias = None if weight is None else as_bias(module, other, weight.shape[0])
            if weight is None or bias is None or shape_of(product) != shape_of(node):
                continue
            apart = layers_apart(weight, torch.zeros_like(bias), stored)
            beside = min(_nearest(bias, added), _nearest(bias[:1], added)) < ALIKE
            if layers_apart(weight, bias, stored) < apart or (apart < ALIKE and not beside):
                _join(module, node, product, weight, bias)
                break
    module.graph.eliminate_dead_code()


def _join_factors(module: torch.fx.GraphModule, node: Node, stored: list[StoredLayer]) -> None:
    added, _, matrix = node.args
    own, bias = attribute(module, matrix), attribute(module, added)
    if own is None or bias is None or bias.ndim != 1:
        return
    factors: dict[str, Any] = dict(node.kwargs)
    beta, alpha = (factors.get(each, 1) for each in ("beta", "alpha"))
    weight, bias = own.t().contiguous(), bias.expand(own.shape[1])
    apart = layers_apart(weight, torch.zeros_like(bias), stored)
    if layers_apart(alpha * weight, beta * bias, stored) < apart:
        _join(module, node, node, alpha * weight, beta * bias)


def _product_weight(module: torch.fx.GraphModule, node: Any) -> torch.Tensor | None:
    """The matrix, as a linear layer has it, of a product that no other node takes."""
    if not isinstance(node, Node) or len(node.users) > 1 or len(node.args) != 2:
        return None
    if base_name(node) not in ("linear", "matmul", "mm"):
        return None
    own: torch.Tensor | None = laid_out_constant(module, node.args[1])
    if own is None or own.ndim != 2:
        return None
    return own if base_name(node) == "linear" else own.t().contiguous()


def _join(
    module: torch.fx.GraphModule,
    node: Node,
    product: Any,
    weight: torch.Tensor,
    bias: torch.Tensor,
) -> None:
    constants = [
        new_constant(module, node, f"joined_{kind}", value)
        for kind, value in (("weight", weight), ("bias", bias))
    ]
    linear: Any = torch.ops.aten.linear.default
    value = product.args[1 if product is node else 0]
    with module.graph.inserting_before(node):
        joined = module.graph.call_function(linear, (value, *constants))
    joined.meta.update(product.meta)
    node.replace_all_uses_with(joined)
    module.graph.erase_node(node)


def _linear_above(node: Any) -> Node | None:
    """The linear layer whose features a value has along its last axis, laid out anew at most."""
    while isinstance(node, Node) and node.op == "call_function":
        if base_name(node) == "linear":
            return node
        if base_name(node) not in VIEWS or len(node.users) > 1 or not keeps_features(node):
            return None
        node = node.args[0]
    return None


def _is_convolution(node: Any) -> bool:
    return isinstance(node, Node) and base_name(node) in ("conv1d", "conv2d", "conv_transpose2d")


def _added(graph: OpGraph, subgraph: int, name: str = "ADD") -> Iterator[np.ndarray]:
    """The constants that the file's ops of a name take."""
    whole = graph.subgraphs[subgraph]
    for op in whole.ops:
        for index in op.inputs if op.name == name else ():
            stored = stored_constant(whole, index)
            if stored is not None and not stored.tensor.is_sparse:
                yield read_constant(graph, op, stored).floats


def _nearest(value: torch.Tensor, stored: list[np.ndarray]) -> float:
    """How far a constant is from the file's nearest, in shares of its size."""
    own = value.double().numpy()
    alike = [held.reshape(own.shape) for held in stored if held.size == own.size]
    return min((share_of(held - own, own) for held in alike), default=math.inf)
