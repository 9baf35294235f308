"""Products and sums in front of a linear layer that the converter folds into it, or does not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from pytest_edgeq.localize.clamps import above_moves
from pytest_edgeq.localize.kinds import VIEWS, base_name
from pytest_edgeq.localize.layers import StoredLayer, layers_apart, stored_layers
from pytest_edgeq.localize.parameters import (
    keeps_features,
    laid_out_constant,
    line_of,
    new_constant,
    without_bias,
)
from pytest_edgeq.tflite.graph import OpGraph

__all__ = ["ALIKE", "LAYERS", "fold_in_front", "fold_signs"]

Node = torch.fx.Node

_Parts = tuple[Node, torch.Tensor, torch.Tensor, tuple[Node, ...], bool]
_Behind = tuple[torch.Tensor, torch.Tensor]
_PASSES_ON = ("dropout", "contiguous", "clone", "alias", "detach")
# Shares of a constant's size that rounding to 8 bits may take.
ALIKE = 0.01
# Which of the file's matrix products are linear layers.
LAYERS = ("FULLY_CONNECTED",)


def fold_in_front(module: torch.fx.GraphModule, graph: OpGraph, subgraph: int) -> None:
    """
    Let linear(x·γ + β, W, b) be linear(x, W·γ, b + W·β) wherever the file has it so.

    The converter does it to a normalisation's γ and β in front of a linear layer, and to the bias
    of another linear layer there; it has either form in the file, or both for two users. Which is
    told by the file's weights and biases.

    Args:
        module: A graph whose parameters are attributes; changed in place.
        graph: The file.
        subgraph: Index of the subgraph.
    """
    stored = list(stored_layers(graph, subgraph, LAYERS))
    layers = {n: each for n in module.graph.nodes if (each := _layer(module, n)) is not None}
    for node, (value, own, bias, parameter) in layers.items():
        forms: list[_Parts] = [(value, own, bias, (), False)]
        for source, scale, shift, turns, bare in _in_front(module, value, own.shape[1]):
            forms.append((source, own * scale, bias + own @ shift, turns, bare))
        if len(forms) == 1:
            continue
        behind = _behind(module, node, own.shape[0])
        uses = [each for each, parts in layers.items() if parts[3] is parameter]
        place = uses.index(node), len(uses)
        nearest = _nearest_form(forms, behind, _of_this_use(forms, behind, stored, *place))
        if nearest is not forms[0]:
            _replace(module, node, nearest)
    module.graph.eliminate_dead_code()


def _layer(
    module: torch.fx.GraphModule, node: Node
) -> tuple[Any, torch.Tensor, torch.Tensor, Any] | None:
    """What a linear layer takes, its weight, its bias, and the node that the weight comes from."""
    name = base_name(node)
    value: Any
    weight: Any
    bias: Any
    if name == "linear" and len(node.args) > 1:
        value, weight, bias = (*node.args, None)[:3]
        own = laid_out_constant(module, weight)
    elif name == "addmm" and len(node.args) == 3 and not node.kwargs:
        bias, value, weight = node.args
        turned = laid_out_constant(module, weight)
        own = None if turned is None else turned.t()
        while own is not None and weight.op == "call_function":
            # Each step of a recurrence turns it anew.
            (weight,) = weight.all_input_nodes
    else:
        return None
    if own is None:
        return None
    added = torch.zeros(own.shape[0], dtype=own.dtype)
    if bias is not None:
        added = laid_out_constant(module, bias)
    if added is None or added.shape != own.shape[:1]:
        return None
    return value, own, added, weight


def fold_signs(module: torch.fx.GraphModule, graph: OpGraph, subgraph: int) -> None:
    """
    Let −linear(x, W, b) be linear(x, −W, −b) wherever the file has it so.

    The converter does it to the lower half of a PReLU, relu(x) − a·relu(−x), and leaves the upper
    half the layer as it is; and where the layer's result is moved before it is negated.

    Args:
        module: A graph whose parameters are attributes; changed in place.
        graph: The file.
        subgraph: Index of the subgraph.
    """
    stored = list(stored_layers(graph, subgraph, LAYERS))
    for node in list(module.graph.nodes):
        if not _negates(node):
            continue
        last: Any = node.args[0]
        layer, first = above_moves(last)
        if base_name(layer) != "linear":
            continue
        own, bias = (laid_out_constant(module, each) for each in (*layer.args[1:], None)[:2])
        if own is None or (bias is None and len(layer.args) > 2):
            continue
        negated = torch.zeros(own.shape[0]) if bias is None else -bias
        if layers_apart(-own, negated, stored) >= ALIKE:
            continue
        with module.graph.inserting_before(first or node):
            turned = module.graph.node_copy(layer)
        turned.args = (
            layer.args[0],
            new_constant(module, turned, "negated_weight", -own),
            *(() if bias is None else (new_constant(module, turned, "negated_bias", negated),)),
        )
        node.replace_all_uses_with(turned if first is None else last)
        if first is not None:
            first.replace_input_with(layer, turned)
        module.graph.erase_node(node)
    module.graph.eliminate_dead_code()


def _negates(node: Node) -> bool:
    if node.op != "call_function" or not isinstance(node.args[0], Node):
        return False
    return base_name(node) == "neg" or (base_name(node) == "mul" and bool(node.args[1] == -1))


def _nearest_form(
    forms: Sequence[_Parts], behind: Sequence[_Behind], stored: Sequence[StoredLayer]
) -> _Parts:
    return min(forms, key=lambda form: _form_apart(form, behind, stored))


def _form_apart(form: _Parts, behind: Sequence[_Behind], stored: Sequence[StoredLayer]) -> float:
    """How far a form is from the file's nearest layer, with what may be folded in from behind."""
    return min(
        layers_apart(form[1] * scale[:, None], form[2] * scale + shift, stored)
        for scale, shift in behind
    )


def _of_this_use(
    forms: Sequence[_Parts],
    behind: Sequence[_Behind],
    stored: Sequence[StoredLayer],
    which: int,
    uses: int,
) -> Sequence[StoredLayer]:
    """
    Of a layer that is used several times, the file's for one of these, which are in order.

    One use may stand behind a norm and another not: all are near one of the forms.
    """
    near = [
        each for each in stored if min(_form_apart(form, behind, [each]) for form in forms) < ALIKE
    ]
    return near[which : which + 1] if uses > 1 and len(near) == uses else stored


def _behind(module: torch.fx.GraphModule, node: Node, size: int) -> list[_Behind]:
    """
    What multiplies a layer's result and is added to it, which may be folded into it as well.

    Nothing first; then each with what stands before it, one number or one a feature.
    """
    found = [(torch.ones(size), torch.zeros(size))]
    while len(node.users) == 1:
        node = next(iter(node.users))
        name = base_name(node)
        if name in _PASSES_ON or (name in VIEWS and keeps_features(node)):
            continue
        line = line_of(module, node, size, in_place=True)
        if line is None:
            break
        _, factor, offset = line
        scale, shift = found[-1]
        found.append((scale * factor, shift * factor + offset))
    return found


def _in_front(module: torch.fx.GraphModule, node: Any, size: int) -> Iterator[_Parts]:
    """
    What x a value is x·scale + shift of, one scale and one shift a feature: nearest x first.

    With the nodes in between that turn other axes than that of the features, the last one first.
    Of a linear layer, which comes last, x is what it gives without its bias, as the last says.
    """
    scale, shift = torch.ones(size), torch.zeros(size)
    turns: list[Node] = []
    while isinstance(node, Node) and node.op == "call_function":
        name = base_name(node)
        if name in _PASSES_ON:
            node = node.args[0]
            continue
        if name in VIEWS and keeps_features(node):
            turns.append(node)
            node = node.args[0]
            continue
        if name == "linear":
            bias = laid_out_constant(module, node.args[2]) if len(node.args) > 2 else None
            if bias is not None and bias.numel() == size and bias.any():
                yield node, scale, shift + scale * bias, tuple(turns), True
            return
        line = line_of(module, node, size)
        if line is None:
            return
        node, factor, offset = line
        scale, shift = scale * factor, shift + scale * offset
        yield node, scale, shift, tuple(turns), False


def _replace(module: torch.fx.GraphModule, node: Node, parts: _Parts) -> None:
    source, weight, bias, turns, bare = parts
    if bare:
        source = without_bias(module, source)
    for turn in reversed(turns):
        with module.graph.inserting_before(node):
            before, source = source, module.graph.node_copy(turn)
        source.args = (before, *turn.args[1:])
    constants = [
        new_constant(module, node, f"folded_{kind}", value)
        for kind, value in (("weight", weight), ("bias", bias))
    ]
    if base_name(node) == "addmm":
        with module.graph.inserting_before(node):
            linear: Any = module.graph.call_function(torch.ops.aten.linear.default)
        linear.meta.update(node.meta)
        node.replace_all_uses_with(linear)
        module.graph.erase_node(node)
        node = linear
    node.args = (source, *constants)
