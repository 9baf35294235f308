"""Quantization-aware training of exported graphs: fake quantizers and batch norms."""

from __future__ import annotations

import contextlib
import copy
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from pytest_edgeq.litert.configs import RefusedError, op_name, replaced
from pytest_edgeq.litert.exported import DROPOUTS, inline_contexts
from pytest_edgeq.litert.libraries import pt2e_module, quiet
from pytest_edgeq.litert.pt2e_graphs import (
    _is_conv,
    _observers,
    _saw_no_data,
    finish_converted,
    finish_pt2e,
    prepare_pt2e,
)
from pytest_edgeq.litert.simulated import in_float

# Metadata of a prepared graph: momentum and eps of its batch norms, by running mean.
_BATCH_NORMS = "edgeq_batch_norms"

# Arguments of aten.batch_norm: input, weight, bias, running mean, running variance, training,
# momentum, eps, cudnn_enabled.
_MEAN, _VARIANCE, _TRAINING, _MOMENTUM, _EPS = 3, 4, 5, 6, 7


def prepare_qat(exported: torch.fx.GraphModule, quantizer: Any) -> torch.fx.GraphModule:
    """
    Insert a quantizer's fake quantizers, in eval mode.

    The graph's `train()` and `eval()` switch batch norms and dropouts.

    Raises:
        RefusedError: As `prepare_pt2e`, or calls share a weight before a batch norm.
    """
    _refuse_shared_weights(exported)
    settings = _settings(exported)
    with _fusing_annotated():
        prepared = prepare_pt2e(exported, quantizer, qat=True)
    prepared.meta[_BATCH_NORMS] = settings
    _restore_batch_norms(prepared, settings)
    _make_switchable(prepared)
    prepared.eval()
    return prepared


def _refuse_shared_weights(exported: torch.fx.GraphModule) -> None:
    """Refuse shared weights: torchao 0.18.0 folds the first batch norm into all."""
    for norm in _batch_norms(exported):
        layer = norm.args[0]
        for constant in getattr(layer, "args", ())[1:2]:
            if constant.op == "get_attr" and len(constant.users) > 1:
                raise RefusedError(
                    f"{layer.name}: {len(constant.users)} calls share its weight "
                    f"({constant.target}), with a batch norm behind: the first call's batch norm "
                    "would be folded into all. Give each call a layer of its own for training, or "
                    "quantize the trained model with 'pt2e_static_int8'"
                )


def trains_quantization(prepared: torch.fx.GraphModule) -> bool:
    """Return whether any fake quantizer's parameters come from training."""
    fakes = pt2e_module("fake_quantize")
    trained = [each for _, each in _observers(prepared) if isinstance(each, fakes.FakeQuantizeBase)]
    return any(not isinstance(each, fakes.FixedQParamsFakeQuantize) for each in trained)


def not_finite(prepared: torch.fx.GraphModule) -> list[str]:
    """Return the names of a trained graph's tensors with NaN or invalid infinities."""
    watching = {id(buffer) for _, each in _observers(prepared) for buffer in each.buffers()}
    return [
        name
        for name, tensor in (*prepared.named_parameters(), *prepared.named_buffers())
        # An observer without data is initialized to infinity.
        if not bool((~tensor.isnan() if id(tensor) in watching else torch.isfinite(tensor)).all())
    ]


def unseen(prepared: torch.fx.GraphModule) -> tuple[list[str], int]:
    """Return the tensors whose fake quantizers saw no data, and the number of all."""
    watched = dict(_observers(prepared))
    nodes = [n for n in prepared.graph.nodes if n.op == "call_module" and n.target in watched]
    return [n.args[0].name for n in nodes if _saw_no_data(watched[n.target])], len(nodes)


def finish_qat(prepared: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Fold the batch norms, and replace fake quantizers by quantize and dequantize nodes."""
    settings = prepared.meta.pop(_BATCH_NORMS)
    _switch(prepared, training=False)
    _restore_batch_norms(prepared, settings)
    with _folding_with(settings):
        converted = finish_pt2e(prepared)
        _fold_the_rest(converted)
    return converted


def own_graph(graph: torch.nn.Module, *, trains: bool = False) -> torch.fx.GraphModule:
    """Copy a graph that the user has exported, prepared (then in eval mode) or converted."""
    with quiet():
        own: Any = copy.deepcopy(graph)
    inline_contexts(own, trains=trains)
    if _observers(own):
        own.meta.setdefault(_BATCH_NORMS, _settings(own))
        _make_switchable(own)
        own.eval()
    return own  # type: ignore[no-any-return] # a copy of what it was given


def float_side(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Copy a graph prepared or converted by PT2E, without observers and rounding."""
    own = own_graph(graph)
    observers = dict(_observers(own))
    for node in list(own.graph.nodes):
        if node.op == "call_module" and node.target in observers:
            node.replace_all_uses_with(node.args[0])
            own.graph.erase_node(node)
    return in_float(own)


def finish_own(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Finish a graph of `own_graph`, as `finish_qat` or `finish_pt2e`."""
    if not _observers(graph):
        return finish_converted(graph)
    return finish_qat(graph) if trains_quantization(graph) else finish_pt2e(graph)


def _batch_norms(graph: torch.fx.GraphModule) -> list[Any]:
    """Return the nodes of batch norms that keep statistics, and so can be switched."""
    return [
        node
        for node in graph.graph.nodes
        if node.target is torch.ops.aten.batch_norm.default and node.args[_MEAN] is not None
    ]


def _settings(graph: torch.fx.GraphModule) -> dict[str, Any]:
    """Return momentum and eps of batch norms, by their running mean."""
    return {
        norm.args[_MEAN].target: (norm.args[_MOMENTUM], norm.args[_EPS])
        for norm in _batch_norms(graph)
    }


def _restore_batch_norms(graph: torch.fx.GraphModule, settings: dict[str, Any]) -> None:
    """
    Restore momentum and eps of batch norms.

    torchao 0.18.0 silently replaces them by its patterns' own (`TODO: allow setting eps`): 0.1 and
    1e-5, whatever the model has.
    """
    for node in _batch_norms(graph):
        eps = _settle(node, settings)
        for user in list(node.args[_VARIANCE].users):
            if user.target is torch.ops.aten.add.Tensor:
                user.update_arg(1, eps)  # running_std = sqrt(running_var + eps) of the pattern
    graph.recompile()


def _settle(norm: Any, settings: dict[str, Any]) -> float:
    """Restore momentum and eps of one batch norm, and return the eps."""
    momentum, eps = settings[norm.args[_MEAN].target]
    norm.update_arg(_MOMENTUM, momentum)
    norm.update_arg(_EPS, eps)
    return float(eps)


def _make_switchable(graph: torch.fx.GraphModule) -> None:
    """
    Enable `train()` and `eval()` of an exported graph, which torchao forbids.

    Its own switch (torchao 0.18.0, `allow_exported_model_train_eval`) rewrites by pattern, and
    sets each dropout to p=0.5 and each batch norm to momentum 0.1 and eps 1e-5.
    """

    def train(self: torch.fx.GraphModule, mode: bool = True) -> torch.fx.GraphModule:
        _switch(self, training=mode)
        return self

    graph.train = types.MethodType(train, graph)  # type: ignore[method-assign] # as torchao does
    graph.eval = types.MethodType(lambda self: train(self, False), graph)  # type: ignore[method-assign]


def _switch(graph: torch.fx.GraphModule, *, training: bool) -> None:
    torch.nn.Module.train(graph, training)
    for node in _batch_norms(graph):
        node.update_arg(_TRAINING, training)
    for node in graph.graph.nodes:
        if op_name(node) in DROPOUTS:
            node.update_arg(2, training)
    graph.recompile()


@contextlib.contextmanager
def _fusing_annotated() -> Iterator[None]:
    """
    Restrict torchao's fusion of conv and batch norm to annotated pairs.

    torchao 0.18.0 fuses every pair (`TODO: only fuse if conv and bn are both configured to be
    quantized`) and undoes it only where the weight was quantized and nothing lies between the two.
    Elsewhere a dozen ops that scale weights would stay in the file.
    """
    qat_utils = pt2e_module("qat_utils")
    quantize_pt2e = pt2e_module("quantize_pt2e")
    fuse = quantize_pt2e._fuse_conv_bn_qat

    def only_annotated(original: Callable[..., bool]) -> Callable[..., bool]:
        def matches(match: Any, *graphs: Any) -> bool:
            convs = [n for n in match.nodes_map.values() if _is_conv(n)]
            specs = [(_annotation(n), n.args[1]) for n in convs]
            quantized = [a is not None and a.input_qspec_map.get(weight) for a, weight in specs]
            return all(quantized) and original(match, *graphs)

        return matches

    def fuse_annotated(graph: torch.fx.GraphModule) -> Any:
        _move_outputs_behind_batch_norms(graph)
        return fuse(graph)

    filters = ("_has_conv_bias_filter", "_no_conv_bias_filter")
    shims = {name: only_annotated(getattr(qat_utils, name)) for name in filters}
    with replaced(qat_utils, **shims), replaced(quantize_pt2e, _fuse_conv_bn_qat=fuse_annotated):
        yield


def _move_outputs_behind_batch_norms(graph: torch.fx.GraphModule) -> None:
    """
    Move a quantizer's output annotation of a conv to its batch norm.

    Without training the two are fused before any quantizer sees them.
    """
    for norm in _batch_norms(graph):
        conv = norm.args[0]
        annotation = _annotation(conv)
        if not _is_conv(conv) or annotation is None or annotation.output_qspec is None:
            continue
        if _annotation(norm) is None and len(conv.users) == 1:
            norm.meta["quantization_annotation"] = type(annotation)(
                output_qspec=annotation.output_qspec, _annotated=True
            )
            annotation.output_qspec = None


def _annotation(node: Any) -> Any:
    return node.meta.get("quantization_annotation")


def _folding_with(settings: dict[str, Any]) -> AbstractContextManager[None]:
    """Fold batch norms with their own eps; see `_restore_batch_norms`."""
    qat_utils = pt2e_module("qat_utils")
    fold = qat_utils.fold_bn_weights_into_conv_node

    def fold_with_its_eps(conv: Any, weight: Any, bias: Any, norm: Any, *args: Any) -> None:
        _settle(norm, settings)
        fold(conv, weight, bias, norm, *args)

    return replaced(qat_utils, fold_bn_weights_into_conv_node=fold_with_its_eps)


def _fold_the_rest(converted: torch.fx.GraphModule) -> None:
    """Fold the batch norms of convolutions in float, as without training."""
    fold_bn_weights_into_conv_node = pt2e_module("utils").fold_bn_weights_into_conv_node
    for norm in _batch_norms(converted):
        conv = norm.args[0]
        if _is_conv(conv) and conv.args[1].op == "get_attr" and len(conv.users) == 1:
            bias = conv.args[2] if len(conv.args) > 2 else None
            fold_bn_weights_into_conv_node(conv, conv.args[1], bias, norm, converted)
    converted.graph.eliminate_dead_code()
    converted.recompile()
