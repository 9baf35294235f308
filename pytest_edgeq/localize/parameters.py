"""Parameters of a torch graph, what is computed of them alone, and how values are laid out."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch
from torch.fx.node import map_arg

from pytest_edgeq.localize.kinds import base_name
from pytest_edgeq.localize.moves import MOVING

__all__ = [
    "as_bias",
    "attribute",
    "computed_constant",
    "keeps_features",
    "laid_out_constant",
    "line_of",
    "new_constant",
    "shape_of",
    "share_of",
    "without_bias",
]

Node = torch.fx.Node

_LAID_OUT = MOVING - {"quantize_per_tensor", "dequantize_per_tensor"}
_MADE_OF_NUMBERS = ("arange", "full", "linspace", "ones", "scalar_tensor", "zeros")


def attribute(module: torch.fx.GraphModule, node: Any) -> torch.Tensor | None:
    """The parameter or buffer that a node is; None of any other node."""
    if not isinstance(node, Node) or node.op != "get_attr":
        return None
    value = operator.attrgetter(str(node.target))(module)
    return value.detach() if isinstance(value, torch.Tensor) else None


def computed_constant(module: torch.fx.GraphModule, node: Any, steps: int = 8) -> Any:
    """
    A constant, or what the graph computes of constants alone: what a batch norm scales by.

    In as many steps as γ / √(σ² + ε), laid out anew, takes: what is further off is none.
    """
    if not isinstance(node, Node) or node.op != "call_function":
        return attribute(module, node)
    if not node.all_input_nodes and base_name(node) not in _MADE_OF_NUMBERS:
        return None
    values: dict[Node, Any] = {}
    for each in node.all_input_nodes:
        value = computed_constant(module, each, steps - 1) if steps else None
        if value is None:
            return None
        values[each] = value
    target: Any = node.target
    args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
    return target(*args, **kwargs)


def laid_out_constant(module: torch.fx.GraphModule, node: Any) -> Any:
    """A parameter or a part of one, laid out anew; an attention has its weights in one."""
    if not isinstance(node, Node) or node.op != "call_function" or base_name(node) not in _LAID_OUT:
        return attribute(module, node)
    if len(node.all_input_nodes) != 1:
        return None
    above = laid_out_constant(module, node.all_input_nodes[0])
    target: Any = node.target
    return None if above is None else target(above, *node.args[1:], **node.kwargs)


def as_bias(module: torch.fx.GraphModule, other: Any, size: int) -> torch.Tensor | None:
    """What is added, one a feature; None of what is not one number or one a feature."""
    if isinstance(other, (int, float)):
        return torch.full((size,), float(other))
    own = computed_constant(module, other)
    if own is None or own.numel() not in (1, size) or (own.ndim and own.shape[-1] != own.numel()):
        return None
    bias: torch.Tensor = own.reshape(-1).expand(size).clone()
    return bias


def line_of(
    module: torch.fx.GraphModule, node: Node, size: int, *, in_place: bool = False
) -> tuple[Any, torch.Tensor, torch.Tensor] | None:
    """
    The x of which a sum, product or the like is x·factor + offset, a number a feature each.

    Also of one that is written over x, if asked for: no other may read that x.
    """
    name = base_name(node).removesuffix("_" if in_place else "")
    if name not in ("mul", "div", "add", "sub", "rsub") or len(node.args) != 2 or node.kwargs:
        return None
    constants = [as_bias(module, each, size) for each in node.args]
    places = [i for i, each in enumerate(constants) if each is not None]
    if len(places) != 1:
        return None
    (place,) = places
    value, other = constants[place], node.args[1 - place]
    assert value is not None, "chosen by it"
    one, nothing = torch.ones(size), torch.zeros(size)
    if name == "div":
        return None if place == 0 else (other, one / value, nothing)
    if name == "mul":
        return other, value, nothing
    if name == "add":
        return other, one, value
    negated = (name == "sub") == (place == 0)
    return (other, -one, value) if negated else (other, one, -value)


def new_constant(module: torch.fx.GraphModule, user: Node, name: str, value: torch.Tensor) -> Node:
    """A constant of the graph, in front of the node that it is named after."""
    target = f"{user.name}_{name}"
    module.register_buffer(target, value)
    with module.graph.inserting_before(user):
        return module.graph.get_attr(target)


def without_bias(module: torch.fx.GraphModule, layer: Node, spatial: int = 0) -> Node:
    """
    The layer's product alone; to others that take the layer its bias is added behind.

    Args:
        module: Changed in place.
        layer: With a bias, which is a parameter where there are spatial axes.
        spatial: How many axes come behind that of the channels.
    """
    bias: Any = layer.args[2]
    with module.graph.inserting_after(layer):
        product = module.graph.node_copy(layer)
    product.args = (*layer.args[:2], None, *layer.args[3:]) if layer.args[3:] else layer.args[:2]
    with module.graph.inserting_after(product):
        add: Any = torch.ops.aten.add.Tensor
        whole = module.graph.call_function(add, (product, bias))
    if spatial and (own := attribute(module, bias)) is not None:
        spread = own.reshape(-1, *[1] * spatial)
        whole.args = (product, new_constant(module, whole, "parted_bias", spread))
    whole.meta.update(layer.meta)
    layer.replace_all_uses_with(whole)
    module.graph.erase_node(layer)
    return product


def shape_of(node: Any) -> tuple[int, ...]:
    """The shape of a node's example; empty where it has none."""
    example = node.meta.get("val") if isinstance(node, Node) else None
    return tuple(example.shape) if isinstance(example, torch.Tensor) else ()


def keeps_features(node: Node) -> bool:
    """Whether what is laid out anew has the same last axis as before."""
    if base_name(node) == "transpose":
        return _keeps_last(node)
    if base_name(node) == "permute":
        axes: Any = node.args[1]
        return axes[-1] in (-1, len(axes) - 1)
    before = shape_of(node.args[0])
    return bool(before) and before[-1:] == shape_of(node)[-1:]


def _keeps_last(node: Node) -> bool:
    """Whether a transpose leaves the last axis where it is."""
    example = node.meta.get("val")
    axes: Any = node.args[1:3]
    return isinstance(example, torch.Tensor) and all(
        axis % example.ndim != example.ndim - 1 for axis in axes
    )


def share_of(difference: np.ndarray, value: np.ndarray) -> float:
    """The energy of a difference in that of a value, whose energy counts as 1 where it is 0."""
    size = float(np.square(value).sum()) or 1.0
    return float(np.square(difference).sum()) / size
