"""Rewrite exported graphs that torchao and the annotators cannot process."""

from __future__ import annotations

import operator
from typing import Any

import torch

from pytest_edgeq.litert.configs import op_name

OPERATORS = (type(torch.ops.aten.relu.default), type(torch.ops.aten.relu))
"""torch's classes of an overload and of all overloads of an operator, which have no public name."""

DROPOUTS = (
    *("alpha_dropout", "alpha_dropout_", "dropout", "dropout_", "feature_alpha_dropout"),
    *("feature_alpha_dropout_", "feature_dropout", "feature_dropout_"),
)
"""Names of torch's ops whose third argument is whether they drop anything."""

_BATCH_NORMS = ("batch_norm", "_native_batch_norm_legit_no_training")


def inline_contexts(exported: torch.fx.GraphModule, *, trains: bool = False) -> None:
    """
    Inline the subgraphs of `torch.no_grad()` and of a disabled `torch.autocast`.

    torch 2.13 exports such a region as a call of a graph of its own. torchao 0.18.0 silently
    annotates no op in it (executorch#22069; ao#4861 refuses the graph instead), and the converter
    names all its ops after the call.
    """
    ops = torch.ops.higher_order
    graph = exported.graph
    node: Any
    for node in list(graph.nodes):
        if node.target is ops.wrap_with_set_grad_enabled:
            enabled, function, *operands = node.args
        elif node.target is ops.wrap_with_autocast and not node.args[2]:
            enabled = True
            function, *operands = node.args[4:]
        else:
            continue
        region = getattr(exported, function.target)
        inline_contexts(region, trains=trains)
        placeholders = region.graph.find_nodes(op="placeholder")
        with graph.inserting_before(node):
            known = dict(zip(placeholders, operands, strict=True))
            results: Any = graph.graph_copy(region.graph, known)
        for user in list(node.users):
            result = results[user.args[1]]
            if trains and not enabled:
                with graph.inserting_before(user):
                    result = graph.call_function(torch.ops.aten.detach.default, (result,))
                result.meta.update(user.meta)
            user.replace_all_uses_with(result)
            graph.erase_node(user)
        graph.erase_node(node)
        if not function.users:
            graph.erase_node(function)
            exported.delete_submodule(function.target)
    exported.recompile()


def drop_dropouts(exported: torch.fx.GraphModule) -> None:
    """Remove dropouts in eval mode, which no pattern of litert-torch 0.10.0's annotators has."""
    for node in list(exported.graph.nodes):
        if op_name(node) in DROPOUTS and node.args[2] is False:
            node.replace_all_uses_with(node.args[0])
            exported.graph.erase_node(node)


def checks_shapes(node: Any) -> bool:
    """Return whether a node is torch's call that checks the shapes of inputs."""
    return bool(node.op == "call_module" and node.target == "_guards_fn")


def drop_guards(exported: torch.fx.GraphModule) -> None:
    """Remove the call of generated code that checks shapes; samples are checked before."""
    for node in list(exported.graph.nodes):
        if checks_shapes(node):
            exported.graph.erase_node(node)
            exported.delete_submodule("_guards_fn")
    exported.recompile()


def number_paddings(exported: torch.fx.GraphModule) -> None:
    """
    Write the padding of convolutions in numbers.

    With `padding="same"` or `"valid"` torch exports another overload, which the annotators of
    litert-torch 0.10.0 and torchao 0.18.0 do not match: the convolution silently stays in float,
    and a batch norm behind it is folded into a call that torch refuses (`aten::convolution()
    Expected a value of type 'List[int]' for argument 'padding'`).
    """
    aten = torch.ops.aten
    numbered = {aten.conv1d.padding: aten.conv1d.default, aten.conv2d.padding: aten.conv2d.default}
    for node in list(exported.graph.nodes):
        if node.target not in numbered:
            continue
        source, weight = node.args[:2]
        sizes = weight.meta["val"].shape[2:]
        ones = [1] * len(sizes)
        options = node.args[2:]
        bias, stride, word, dilation, groups = (
            options + (None, ones, "valid", ones, 1)[len(options) :]
        )
        steps = zip(dilation * len(ones) if len(dilation) == 1 else dilation, sizes, strict=True)
        totals = [step * (size - 1) if word == "same" else 0 for step, size in steps]
        if any(total % 2 for total in totals):
            source = _padded(exported, node, totals)
            totals = [0 for _ in totals]
        numbers = [total // 2 for total in totals]
        node.args = (source, weight, bias, stride, numbers, dilation, groups)
        node.target = numbered[node.target]


def _padded(exported: torch.fx.GraphModule, node: Any, totals: list[int]) -> Any:
    """Pad a convolution's input; as in torch, the odd element comes last."""
    amounts = [amount for total in reversed(totals) for amount in (total // 2, total - total // 2)]
    target = torch.ops.aten.pad.default
    with exported.graph.inserting_before(node):
        padded = exported.graph.call_function(target, (node.args[0], amounts))
    padded.meta.update(node.meta)
    padded.meta["val"] = target(node.args[0].meta["val"], amounts)
    return padded


def duplicate_shared_weights(exported: torch.fx.GraphModule) -> None:
    """
    Duplicate weight and bias for each call before a batch norm.

    torchao 0.18.0 silently folds batch norms into the weights that the calls of a layer share: by
    the first batch norm, whatever follows the other calls (a detector's head, with a batch norm for
    each level); and if the layer has no bias, the one that it makes for the first call it
    overwrites by zeros at the second.
    """
    for node in exported.graph.nodes:
        if op_name(node) not in _BATCH_NORMS or not op_name(node.args[0]):
            continue
        layer = node.args[0]
        for place, constant in enumerate(layer.args[:3]):
            # A constant with one user needs no copy.
            if not place or getattr(constant, "op", "") != "get_attr" or len(constant.users) == 1:
                continue
            value = operator.attrgetter(constant.target)(exported)
            name = f"{layer.name}_own_{place}"
            own = torch.nn.Parameter(value.detach().clone(), requires_grad=False)
            exported.register_parameter(name, own)
            with exported.graph.inserting_before(layer):
                duplicate = exported.graph.get_attr(name)
            duplicate.meta.update(constant.meta)
            layer.update_arg(place, duplicate)
