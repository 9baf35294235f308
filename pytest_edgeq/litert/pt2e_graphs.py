"""PT2E quantization of exported graphs: torchao's observers, the converter's quantizer."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch

from pytest_edgeq.litert.annotations import is_constant, normalize_annotations
from pytest_edgeq.litert.configs import configs_as_set, replaced
from pytest_edgeq.litert.exported import (
    OPERATORS,
    drop_dropouts,
    drop_guards,
    duplicate_shared_weights,
    number_paddings,
)
from pytest_edgeq.litert.histograms import fast_histograms
from pytest_edgeq.litert.libraries import converter_module, pt2e_module, quiet
from pytest_edgeq.litert.simulated import (
    fold_constants,
    isolate_float_ops,
    refuse_lost_writes,
    share_scales,
    unfold_weights,
)


def pt2e_preset(name: str) -> Any:
    """Build the converter's `PT2EQuantizer` for one of our PT2E presets."""
    with quiet():
        pt2e_quantizer = converter_module("quantize.pt2e_quantizer")
        config = pt2e_quantizer.get_symmetric_quantization_config(**_preset_options(name))
        return pt2e_quantizer.PT2EQuantizer().set_global(config)


def _preset_options(name: str) -> dict[str, bool]:
    return {
        "is_per_channel": not name.endswith("_per_tensor"),
        "is_dynamic": "_dynamic_" in name,
        "is_qat": "_qat_" in name,
    }


def pt2e_preset_code(name: str, calls: Iterable[str] = ()) -> str:
    """Return the Python code that builds a preset's quantizer, with further calls on it."""
    module = converter_module("quantize.pt2e_quantizer").__name__
    options = ", ".join(f"{key}=True" for key, is_set in _preset_options(name).items() if is_set)
    lines = [
        f"from {module} import PT2EQuantizer, get_symmetric_quantization_config",
        "",
        f"config = get_symmetric_quantization_config({options})",
        "quantizer = (",
        "    PT2EQuantizer()",
        "    .set_global(config)",
        *(f"    {call}" for call in calls),
        ")",
    ]
    return "\n".join(lines)


def is_pt2e_quantizer(candidate: object) -> bool:
    """Return whether it is a torchao PT2E `Quantizer`; avoids imports where possible."""
    if not any(hasattr(candidate, name) for name in ("annotate", "transform_for_annotation")):
        return False
    return isinstance(candidate, pt2e_module("quantizer").Quantizer)


def prepare_pt2e(
    exported: torch.fx.GraphModule, quantizer: Any, *, qat: bool = False, annotates: bool = True
) -> torch.fx.GraphModule:
    """
    Insert a quantizer's observers, or only rewrite a graph for it, without annotations.

    Batch norms are folded into convolutions, unless it is for training (`qat`). Annotations are
    normalized, see `normalize_annotations`.

    Nodes without users are eliminated first: strict export keeps them (a transformer's position
    ids), and the converter's annotator for ADD fails on them (`IndexError: list index out of
    range`; torch 2.13, litert-torch 0.10.0). For further rewrites see `exported.py`.

    Raises:
        RefusedError: A setting of the quantizer has no effect, or is impossible.
    """
    quantize_pt2e = pt2e_module("quantize_pt2e")
    normalizing = SimpleNamespace(
        transform_for_annotation=quantizer.transform_for_annotation,
        annotate=functools.partial(annotate, quantizer) if annotates else lambda model: model,
        validate=quantizer.validate if annotates else lambda model: None,
        prepare_obs_or_fq_callback=quantizer.prepare_obs_or_fq_callback,
    )
    prepare = quantize_pt2e.prepare_qat_pt2e if qat else quantize_pt2e.prepare_pt2e
    with quiet(), possible_patterns():
        exported.graph.eliminate_dead_code()
        number_paddings(exported)
        if not qat:
            # In training, shared weights stay shared, and dropouts are needed.
            duplicate_shared_weights(exported)
            drop_dropouts(exported)
        exported.recompile()
        prepared: torch.fx.GraphModule = prepare(exported, normalizing)
    return prepared


def annotate(quantizer: Any, model: Any) -> Any:
    """Annotate an exported graph by a quantizer, with normalized annotations."""
    with configs_as_set(), pattern_modules(), ordered_partitions():
        annotated = quantizer.annotate(model)
    # torchao ignores the result and reads the graph that it passed.
    normalize_annotations(model)
    return annotated


def pattern_modules() -> AbstractContextManager[None]:
    """
    Pass torchao modules as the conv-bn patterns of the converter's quantizer.

    With a QAT config litert-torch 0.10.0 passes functions, which torch.export refuses (`Expected
    mod to be an instance of torch.nn.Module, got <class 'function'>`; torch 2.13, torchao 0.18.0).
    """
    pt2e_quantizer_utils = converter_module("quantize.pt2e_quantizer_utils")
    WrapperModule = pt2e_module("export_utils").WrapperModule
    trace = pt2e_quantizer_utils._get_aten_graph_module_for_pattern

    def trace_as_module(pattern: Any, *args: Any, **kwargs: Any) -> Any:
        module = pattern if isinstance(pattern, torch.nn.Module) else WrapperModule(pattern)
        return _traced_once(trace, module, *args, **kwargs)

    return replaced(pt2e_quantizer_utils, _get_aten_graph_module_for_pattern=trace_as_module)


_TRACED_PATTERNS: dict[Any, torch.fx.GraphModule] = {}


def _traced_once(trace: Callable[..., Any], pattern: Any, *args: Any, **kwargs: Any) -> Any:
    """Trace a conv-bn pattern, a function of its inputs and constants, once a process."""
    constants = [cell.cell_contents for cell in pattern.fn.__closure__ or ()]
    key = (pattern.fn.__code__, *constants, *args[1:], *kwargs)
    if key not in _TRACED_PATTERNS:
        _TRACED_PATTERNS[key] = trace(pattern, *args, **kwargs)
    return copy.deepcopy(_TRACED_PATTERNS[key])  # matching changes it


def ordered_partitions() -> AbstractContextManager[None]:
    """
    Sort the inputs and outputs of matched patterns, the last of the graph first.

    torch 2.13 orders them as a set, by their addresses. litert-torch 0.10.0 annotates the first two
    inputs of a GRU at the node that reads both, so that the second replaces the first, and equal
    conversions gave two different files. So the sequence, first in the graph, comes last.
    """
    pt2e_quantizer_utils = converter_module("quantize.pt2e_quantizer_utils")
    find = pt2e_quantizer_utils.get_source_partitions

    def found(graph: torch.fx.Graph, *args: Any, **kwargs: Any) -> Any:
        places = {node: place for place, node in enumerate(graph.nodes)}
        partitions = find(graph, *args, **kwargs)
        for each in (partition for kind in partitions.values() for partition in kind):
            for nodes in (each.input_nodes, each.output_nodes, each.params):
                nodes.sort(key=places.__getitem__, reverse=True)
        return partitions

    return replaced(pt2e_quantizer_utils, get_source_partitions=found)


def possible_patterns() -> AbstractContextManager[None]:
    """
    Skip the conv-bn patterns of training that a graph cannot match, and trace others once.

    For each of four kinds of convolution torchao 0.18.0 traces three patterns to fuse and 24 to
    fold: up to a minute. Those to fold scale the weight by the root of the variance, a constant.
    """
    qat_utils = pt2e_module("qat_utils")

    def if_possible(helper: Callable[..., Any], *, folds: bool) -> Callable[..., Any]:
        def replace(graph: torch.fx.GraphModule, conv: Any, *args: Any, **kwargs: Any) -> Any:
            kinds = {str(n.target).split(".")[1] for n in graph.graph.nodes if _is_conv(n)}
            sqrt = torch.ops.aten.sqrt.default
            roots = graph.graph.find_nodes(op="call_function", target=sqrt)
            possible = conv.__name__ in kinds and (not folds or any(map(is_constant, roots)))
            return helper(graph, conv, *args, **kwargs) if possible else graph

        return replace

    fuse, fold = qat_utils._fuse_conv_bn_qat_helper, qat_utils._fold_conv_bn_qat_helper
    trace = functools.partial(_traced_once, qat_utils._get_aten_graph_module_for_pattern)
    return replaced(
        qat_utils,
        _fuse_conv_bn_qat_helper=if_possible(fuse, folds=False),
        _fold_conv_bn_qat_helper=if_possible(fold, folds=True),
        _get_aten_graph_module_for_pattern=trace,
    )


def _is_conv(node: Any) -> bool:
    is_conv = pt2e_module("utils")._is_conv_or_conv_transpose_node
    return hasattr(node, "op") and bool(is_conv(node))


def _observers(prepared: torch.nn.Module) -> list[tuple[str, Any]]:
    kinds = pt2e_module("observer").ObserverBase, pt2e_module("fake_quantize").FakeQuantizeBase
    return [
        (name, module)
        # Tensors that share parameters have one observer under several names.
        for name, module in prepared.named_modules(remove_duplicate=False)
        if isinstance(module, kinds)
    ]


def holds_observers(model: torch.nn.Module) -> bool:
    """Return whether a model was prepared by PT2E and not converted yet."""
    return any(_observers(graph) for graph in _graphs(model))


def holds_quantization(model: torch.nn.Module) -> bool:
    """Return whether a graph has quantize or dequantize nodes of PT2E."""
    return any(
        "quantized_decomposed" in str(node.target)
        for graph in _graphs(model)
        for node in graph.graph.nodes
    )


def _graphs(model: torch.nn.Module) -> list[torch.fx.GraphModule]:
    return [module for module in model.modules() if isinstance(module, torch.fx.GraphModule)]


def needs_data(prepared: torch.fx.GraphModule) -> bool:
    """Return whether any parameters of a prepared graph depend on data."""
    observers, fakes = pt2e_module("observer"), pt2e_module("fake_quantize")
    fixed = (observers.FixedQParamsObserver, fakes.FixedQParamsFakeQuantize)
    return any(not isinstance(observer, fixed) for _, observer in _static_activations(prepared))


def _static_activations(prepared: torch.fx.GraphModule) -> list[tuple[str, Any]]:
    """Return the static observers of activations, by the observed node."""
    observers = dict(_observers(prepared))
    found = []
    for node in prepared.graph.nodes:
        if node.op != "call_module" or node.target not in observers:
            continue
        observer = observers[node.target]
        source = node.args[0]
        if not is_constant(source) and not getattr(observer, "is_dynamic", False):
            found.append((source.name, observer))
    return found


def uncalibrated(prepared: torch.fx.GraphModule) -> list[str]:
    """Return the names of the activations whose observers have seen no data."""
    return [name for name, each in _static_activations(prepared) if _saw_no_data(each)]


def _saw_no_data(observer: Any) -> bool:
    # A fake quantizer has an observer of its own.
    watcher = getattr(observer, "activation_post_process", observer)
    low = getattr(watcher, "min_val", None)
    return low is not None and (low.numel() == 0 or bool(low.isinf().any()))


def finish_pt2e(prepared: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """
    Replace observers by quantize and dequantize nodes.

    `fold_quantize=False`: torchao's default folds the weights to integers; see `unfold_weights`.
    """
    convert_pt2e = pt2e_module("quantize_pt2e").convert_pt2e
    with quiet(), fast_histograms(), possible_patterns():
        converted: torch.fx.GraphModule = convert_pt2e(prepared, fold_quantize=False)
    return finish_converted(converted)


def finish_converted(converted: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Rewrite a result of `convert_pt2e` for the converter, in place."""
    # An exported graph cannot be switched by .eval(); its flag alone makes the converter warn that
    # it "is converted in training mode" (litert-torch 0.10.0, harmless).
    converted.training = False
    refuse_lost_writes(converted)
    unfold_weights(converted)
    share_scales(converted)
    fold_constants(converted)
    isolate_float_ops(converted)
    drop_guards(converted)
    return converted


_LIBRARIES = ("torch", "torchao", "litert_torch")

_ATOMS = (*(bool, int, float, str, enum.Enum, torch.dtype, torch.qscheme, torch.layout), *OPERATORS)


def settings_of(quantizer: Any) -> dict[str, str]:
    """Return the settings of a quantizer by their path, `global_config.weight.qscheme`."""
    if quantizer is None:
        return {}
    try:
        return {path.lstrip("."): text for path, text in _flat("", quantizer)}
    except _UnknownSettingError:
        return {"settings": "unknown"}


class _UnknownSettingError(Exception):
    """A value without a text form."""


def _flat(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        members = {f".{_text(key)}": each for key, each in value.items()}
    elif isinstance(value, (list, tuple)):
        members = {f"[{index}]": each for index, each in enumerate(value)}
    elif _is_known(type(value)) and (dataclasses.is_dataclass(value) or is_pt2e_quantizer(value)):
        members = {f".{key}": each for key, each in vars(value).items() if key[0] != "_"}
    else:
        yield path, _text(value)
        return
    for name, each in members.items():
        yield from _flat(path + name, each)


def _text(value: Any) -> str:
    if value is None or isinstance(value, _ATOMS):
        return str(value)
    if isinstance(value, type) and _is_known(value):
        return value.__name__
    if isinstance(value, functools.partial):
        keywords = (f"{key}={_text(each)}" for key, each in value.keywords.items())
        arguments = (*map(_text, value.args), *keywords)
        return f"{_text(value.func)}({', '.join(arguments)})"
    if type(value).__name__ == "PartialWrapper":  # of torchao: a partial and further callables
        return "None" if value.callable_args else _text(value.p)
    raise _UnknownSettingError


def _is_known(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _LIBRARIES
