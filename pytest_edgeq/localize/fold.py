"""Batch norms and biases that the converter has in the layer that they are of, or apart."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from pytest_edgeq.localize.grouped import is_grouped
from pytest_edgeq.localize.kinds import HEAVY_OPS, IDENTITIES, base_name
from pytest_edgeq.localize.layers import StoredLayer, stored_layers, weights_apart
from pytest_edgeq.localize.parameters import attribute, new_constant, shape_of, without_bias
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.roles import stored_constant

__all__ = ["fold_batch_norms", "part_biases", "turn_products"]

Node = torch.fx.Node

_FOLDABLE = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "linear")


def fold_batch_norms(module: torch.fx.GraphModule, graph: OpGraph, subgraph: int) -> None:
    """
    Fold a batch norm into the convolution or linear layer in front, wherever the file has it so.

    Behind a 1-D convolution, whose result is laid out anew, the converter leaves it alone.

    Args:
        module: An exported graph, changed in place.
        graph: The file.
        subgraph: Index of the subgraph.
    """
    stored = [*_layers(graph, subgraph)]
    for node in list(module.graph.nodes):
        if base_name(node) != "batch_norm" or node.args[5]:
            continue
        layer = node.args[0]
        if base_name(layer) not in _FOLDABLE or len(layer.users) > 1 or is_grouped(layer):
            continue
        bias = layer.args[2] if len(layer.args) > 2 else None
        given = [layer.args[1], *([bias] if bias is not None else []), *node.args[1:5]]
        held = [None if each is None else attribute(module, each) for each in given]
        if any(each is not None and own is None for each, own in zip(given, held, strict=True)):
            continue
        new = _fused(node, held[0], held[1] if bias is not None else None, tuple(held[-4:]))
        if _stands_alone(layer, held[0], new[0], stored):
            continue
        taken = [
            new_constant(module, layer, f"folded_{kind}", value.detach())
            for value, kind in zip(new, ("weight", "bias"), strict=True)
        ]
        layer.args = (layer.args[0], *taken, *layer.args[3:])
        node.replace_all_uses_with(layer)
        module.graph.erase_node(node)
    module.graph.eliminate_dead_code()


def part_biases(module: torch.fx.GraphModule, graph: OpGraph, subgraph: int) -> None:
    """
    Let conv3d(x, W, b) be conv3d(x, W) + b wherever the file has it so.

    The converter (litert-torch 0.10.0) gives CONV_3D a bias of zeros, and adds torch's behind it.

    Args:
        module: A graph whose parameters are attributes; changed in place.
        graph: The file.
        subgraph: Index of the subgraph.
    """
    bare = {True: set[int](), False: set[int]()}
    for layer in stored_layers(graph, subgraph, ("CONV_3D",)):
        bare[layer.bias is None or not layer.bias.any()].add(layer.weight.size)
    for node in list(module.graph.nodes):
        if base_name(node) != "conv3d" or len(node.args) < 3:
            continue
        bias, size = attribute(module, node.args[2]), math.prod(shape_of(node.args[1]))
        if bias is None or size not in bare[True] - bare[False]:
            continue
        without_bias(module, node, spatial=3)
    module.graph.eliminate_dead_code()


def turn_products(module: torch.fx.GraphModule) -> None:
    """
    Let addmm(b, x, W) of parameters be linear(x, Wᵀ, b): what is folded into one is into the other.

    Args:
        module: A graph whose parameters are attributes; changed in place.
    """
    for node in list(module.graph.nodes):
        if base_name(node) != "addmm" or len(node.args) != 3 or node.kwargs:
            continue
        bias, value, weight = node.args
        own, own_bias = (attribute(module, each) for each in (weight, bias))
        if own is None or own_bias is None or own_bias.ndim != 1:
            continue
        turned = new_constant(module, node, "turned_weight", own.t().contiguous())
        with module.graph.inserting_before(node):
            linear = module.graph.call_function(
                torch.ops.aten.linear.default, (value, turned, bias)
            )
        linear.meta.update(node.meta)
        node.replace_all_uses_with(linear)
        module.graph.erase_node(node)


def _fused(
    node: Node, weight: Any, bias: Any, norm: tuple[Any, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer's weight and bias with its batch norm in them."""
    from torch.nn.utils import fusion

    gamma, beta, mean, variance = norm
    eps: Any = node.args[7]
    kind = base_name(node.args[0])
    if kind == "linear":
        return fusion.fuse_linear_bn_weights(weight, bias, mean, variance, eps, gamma, beta)
    turned = kind.startswith("conv_transpose")
    return fusion.fuse_conv_bn_weights(
        weight, bias, mean, variance, eps, gamma, beta, transpose=turned
    )


def _stands_alone(
    layer: Node, own: Any, folded: torch.Tensor, stored: list[tuple[StoredLayer, bool]]
) -> bool:
    """Whether the file has a layer's batch norm as ops of its own."""
    found: list[tuple[float, float, float, bool]] = []
    for each, scaled in stored:
        apart = [weights_apart(each, weight, base_name(layer)) for weight in (own, folded)]
        if min(apart) < math.inf:
            found.append((min(apart), apart[0], apart[1], scaled))
    if not found:
        return False
    _, plain, fused, scaled = min(found)
    # A norm that hardly changes the weight is told by what stands behind the layer.
    clear = max(plain, fused) > 4 * min(plain, fused)
    return plain < fused if clear else scaled


def _layers(graph: OpGraph, subgraph: int) -> Iterator[tuple[StoredLayer, bool]]:
    """The file's matrix products, and whether a MUL by a constant scales what each gives."""
    whole = graph.subgraphs[subgraph]
    for layer in stored_layers(graph, subgraph, HEAVY_OPS):
        behind = whole.consumers[layer.op.outputs[0]]
        while len(behind) == 1 and behind[0].name in IDENTITIES:
            behind = whole.consumers[behind[0].outputs[0]]
        # What stands behind a clamp is no norm of the layer's own.
        scaled = layer.op.fused_activation is None and any(
            each.name == "MUL" and any(stored_constant(whole, i) is not None for i in each.inputs)
            for each in behind
        )
        yield layer, scaled
