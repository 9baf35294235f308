"""Constants in front of a linear layer that the converter has folded into its weight and bias."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from pytest_edgeq.localize.constants import read_constant
from pytest_edgeq.localize.kinds import base_name
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.roles import roles_of

__all__ = ["fold_in_front"]

Node = torch.fx.Node
_Parts = tuple[Node, torch.Tensor, torch.Tensor, tuple[Node, ...]]

_PASSES_ON = ("dropout", "contiguous", "clone", "alias", "detach")


def fold_in_front(module: torch.fx.GraphModule, graph: OpGraph, subgraph: int) -> None:
    """
    Let linear(x·γ + β, W, b) be linear(x, W·γ, b + W·β) wherever the file has it so.

    The converter does it to a normalisation's γ and β in front of a linear layer, and has either
    form in the file, or both for two users. Which is told by the file's weights.

    Args:
        module: A graph whose parameters are attributes; changed in place.
        graph: The file.
        subgraph: Index of the subgraph.
    """
    stored = list(_stored(graph, subgraph))
    for node in list(module.graph.nodes):
        if base_name(node) != "linear" or len(node.args) < 2:
            continue
        own = _attribute(module, node.args[1])
        bias = node.args[2] if len(node.args) > 2 else None
        own_bias = None if bias is None else _attribute(module, bias)
        if own is None or (bias is not None and own_bias is None):
            continue
        added = torch.zeros(own.shape[0], dtype=own.dtype) if own_bias is None else own_bias
        forms: list[_Parts] = [(node.args[0], own, added, ())]
        for source, scale, shift, turns in _in_front(module, node.args[0], own.shape[1]):
            forms.append((source, own * scale, added + own @ shift, turns))
        if len(forms) == 1:
            continue
        nearest = min(forms, key=lambda form: _apart(form[1], form[2], stored))
        if nearest is not forms[0]:
            _replace(module, node, nearest)


def _stored(graph: OpGraph, subgraph: int) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """Weight and bias of the file's linear layers, dequantized."""
    for op in graph.subgraphs[subgraph].ops:
        if op.name != "FULLY_CONNECTED":
            continue
        roles = roles_of(graph, op)
        weights = [each for each in roles.weights if each.tensor.is_constant]
        biases = [each for each in roles.biases if each.tensor.is_constant]
        if len(weights) != 1 or weights[0].tensor.is_sparse:
            continue
        bias = read_constant(graph, op, biases[0]).floats.reshape(-1) if biases else None
        yield read_constant(graph, op, weights[0]).floats, bias


def _in_front(module: torch.fx.GraphModule, node: Any, size: int) -> Iterator[_Parts]:
    """
    What x a value is x·scale + shift of, one scale and one shift a feature: nearest x first.

    With the nodes in between that turn other axes than that of the features, the last one first.
    """
    scale, shift = torch.ones(size), torch.zeros(size)
    turns: list[Node] = []
    while isinstance(node, Node) and node.op == "call_function":
        name = base_name(node)
        if name in _PASSES_ON:
            node = node.args[0]
            continue
        if name == "transpose" and _keeps_last(node):
            turns.append(node)
            node = node.args[0]
            continue
        if name not in ("mul", "add") or len(node.args) != 2:
            return
        constants = [_attribute(module, each) for each in node.args]
        places = [i for i, each in enumerate(constants) if each is not None]
        if len(places) != 1 or len(node.kwargs):
            return
        value = constants[places[0]]
        assert value is not None, "chosen by it"
        if value.numel() != size or value.shape[-1] != size:
            return
        if name == "mul":
            scale = scale * value.reshape(-1)
        else:
            shift = shift + scale * value.reshape(-1)
        node = node.args[1 - places[0]]
        yield node, scale, shift, tuple(turns)


def _keeps_last(node: Node) -> bool:
    """Whether a transpose leaves the last axis where it is."""
    example = node.meta.get("val")
    axes: Any = node.args[1:3]
    return isinstance(example, torch.Tensor) and all(
        axis % example.ndim != example.ndim - 1 for axis in axes
    )


def _attribute(module: torch.fx.GraphModule, node: Any) -> torch.Tensor | None:
    if not isinstance(node, Node) or node.op != "get_attr":
        return None
    value = operator.attrgetter(str(node.target))(module)
    return value.detach() if isinstance(value, torch.Tensor) else None


def _apart(
    weight: torch.Tensor,
    bias: torch.Tensor,
    stored: list[tuple[np.ndarray, np.ndarray | None]],
) -> float:
    """How far a layer is from the file's nearest, in shares of the weight's and the bias's size."""
    own, added = weight.double().numpy(), bias.double().numpy()
    found = [float("inf")]
    for held, held_bias in stored:
        if held.size != own.size or (held_bias is not None and held_bias.size != added.size):
            continue
        given = np.zeros_like(added) if held_bias is None else held_bias
        found.append(_share(held.reshape(own.shape) - own, own) + _share(given - added, added))
    return min(found)


def _share(difference: np.ndarray, value: np.ndarray) -> float:
    size = float(np.square(value).sum()) or 1.0
    return float(np.square(difference).sum()) / size


def _replace(module: torch.fx.GraphModule, node: Node, parts: _Parts) -> None:
    source, weight, bias, turns = parts
    for turn in reversed(turns):
        with module.graph.inserting_before(node):
            before, source = source, module.graph.node_copy(turn)
        source.args = (before, *turn.args[1:])
    taken = []
    for value, kind in ((weight, "weight"), (bias, "bias")):
        attribute = f"{node.name}_folded_{kind}"
        module.register_buffer(attribute, value)
        with module.graph.inserting_before(node):
            taken.append(module.graph.get_attr(attribute))
    node.args = (source, *taken)
