"""PT2E quantization of exported graphs: torchao's observers, the converter's quantizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pytest_edgeq.litert.chatter import quiet
from pytest_edgeq.suggest import nearest

if TYPE_CHECKING:
    import torch


__all__ = [
    "finish_pt2e",
    "holds_observers",
    "holds_quantization",
    "is_pt2e_quantizer",
    "needs_calibration",
    "prepare_pt2e",
    "pt2e_preset",
    "uncalibrated",
]


def pt2e_preset(name: str) -> Any:
    """Build the converter's `PT2EQuantizer` for one of our PT2E presets."""
    with quiet():
        from litert_torch.quantize.pt2e_quantizer import (
            PT2EQuantizer,
            get_symmetric_quantization_config,
        )

        config = get_symmetric_quantization_config(
            is_per_channel=not name.endswith("_per_tensor"), is_dynamic="_dynamic_" in name
        )
        return PT2EQuantizer().set_global(config)


def is_pt2e_quantizer(candidate: object) -> bool:
    """Whether it is a torchao PT2E `Quantizer` instance; imports nothing unless it might be."""
    if not any(hasattr(candidate, name) for name in ("annotate", "transform_for_annotation")):
        return False
    with quiet():
        from torchao.quantization.pt2e.quantizer import Quantizer

    return isinstance(candidate, Quantizer)


def prepare_pt2e(exported: torch.fx.GraphModule, quantizer: Any) -> torch.fx.GraphModule:
    """
    Insert the observers that a quantizer asks for.

    Annotations on tensors that are not floating point are dropped before: with strict export the
    converter's annotators take integer tensors and Python scalars too, and the observers then fail
    (`"histogram_cpu" not implemented for 'Long'`; litert-torch 0.10.0, torchao 0.18.0).
    Nodes whose result nobody uses go first: strict export leaves them in (a transformer's position
    ids), and the converter's annotator for ADD stumbles over them (`IndexError: list index out of
    range`; torch 2.13, litert-torch 0.10.0).
    """
    with quiet():
        from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e as prepare
        from torchao.quantization.pt2e.quantizer import Quantizer

        class FloatingPointOnly(Quantizer):  # type: ignore[misc] # torchao ships no types
            def transform_for_annotation(self, model: Any) -> Any:
                return quantizer.transform_for_annotation(model)

            def annotate(self, model: Any) -> Any:
                with _matching_modules(quantizer, model):
                    annotated = quantizer.annotate(model)
                # torchao ignores the result and reads the graph that it gave.
                _drop_annotations_off_floats(model)
                return annotated

            def validate(self, model: Any) -> None:
                quantizer.validate(model)

        exported.graph.eliminate_dead_code()
        exported.recompile()
        prepared: torch.fx.GraphModule = prepare(exported, FloatingPointOnly())
        return prepared


@contextlib.contextmanager
def _matching_modules(quantizer: Any, model: torch.fx.GraphModule) -> Iterator[None]:
    """
    Make `set_module_name` and `set_module_type` of the converter's quantizer match.

    litert-torch 0.10.0 looks for module names in the keys of `nn_module_stack`, which torch 2.13
    fills with numbers, and for classes where torch writes their names: neither ever matches, and
    the layers get the global config, or none, without a word. `set_operator_type` it never reads.

    Raises:
        ValueError: A name or a class that no module of the model has, or `set_operator_type`.
    """
    from litert_torch.quantize import pt2e_quantizer

    if not isinstance(quantizer, pt2e_quantizer.PT2EQuantizer):
        yield
        return
    stacks = [list(n.meta.get("nn_module_stack", {}).values()) for n in model.graph.nodes]
    paths = {path for stack in stacks for path, _ in stack}
    classes = {_class_name(kind) for stack in stacks for _, kind in stack}
    for name in quantizer.module_name_config:
        if name not in paths:
            raise ValueError(f"set_module_name({name!r}) matches no module{nearest(name, paths)}")
    for kind in quantizer.module_type_config:
        name = _class_name(kind)
        if name not in classes:
            raise ValueError(f"set_module_type({name}) matches no module{nearest(name, classes)}")
    own = type(quantizer).annotate is pt2e_quantizer.PT2EQuantizer.annotate
    if own and quantizer.operator_type_config:
        raise ValueError(
            "set_operator_type has no effect in litert-torch 0.10: its annotate never reads it. "
            "Use set_module_type or set_module_name, or override annotate"
        )

    def layers(node: Any) -> list[tuple[str, Any]]:
        # A parameter is called in no module: it belongs to those that use it.
        nodes = [node] if "nn_module_stack" in node.meta else list(node.users)
        return [layer for n in nodes for layer in n.meta.get("nn_module_stack", {}).values()]

    def by_name(module_name: str) -> Callable[[Any], bool]:
        return lambda node: any(path == module_name for path, _ in layers(node))

    def by_type(kind: Any) -> Callable[[Any], bool]:
        return lambda node: any(_class_name(each) == _class_name(kind) for _, each in layers(node))

    shims = {"_get_module_name_filter": by_name, "_get_module_type_filter": by_type}
    originals = {name: getattr(pt2e_quantizer, name) for name in shims}
    for name, shim in shims.items():
        setattr(pt2e_quantizer, name, shim)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(pt2e_quantizer, name, original)


def _class_name(kind: Any) -> str:
    return kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"


def _drop_annotations_off_floats(model: torch.fx.GraphModule) -> None:
    from torchao.quantization.pt2e.quantizer import SharedQuantizationSpec

    gone: set[Any] = set()
    annotated = [n for n in model.graph.nodes if n.meta.get("quantization_annotation") is not None]
    for node in annotated:
        annotation = node.meta["quantization_annotation"]
        for operand in list(annotation.input_qspec_map):
            if not _is_floating_point(model, operand):
                del annotation.input_qspec_map[operand]
                gone |= {operand, (operand, node)}
        if annotation.output_qspec is not None and not _is_floating_point(model, node):
            annotation.output_qspec = None
            gone.add(node)
    # What shares its parameters with a dropped annotation has none to share; and so on.
    before = -1
    while len(gone) != before:
        before = len(gone)
        for node in annotated:
            annotation = node.meta["quantization_annotation"]
            for operand, spec in list(annotation.input_qspec_map.items()):
                if isinstance(spec, SharedQuantizationSpec) and spec.edge_or_node in gone:
                    del annotation.input_qspec_map[operand]
                    gone.add((operand, node))
            spec = annotation.output_qspec
            if isinstance(spec, SharedQuantizationSpec) and spec.edge_or_node in gone:
                annotation.output_qspec = None
                gone.add(node)


def _is_floating_point(model: torch.fx.GraphModule, node: Any) -> bool:
    """Whether a node gives a floating-point tensor; several results count as their first."""
    import torch

    value = node.meta.get("val")
    if value is None and node.op == "get_attr":
        value = model
        for part in node.target.split("."):
            value = getattr(value, part)
    if isinstance(value, (tuple, list)):
        value = value[0]
    if value is None:
        # The quantizer's own node without a recorded value: its annotation is its own business.
        return True
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point


def _observers(prepared: torch.nn.Module) -> list[tuple[str, Any]]:
    with quiet():
        from torchao.quantization.pt2e.fake_quantize import FakeQuantizeBase
        from torchao.quantization.pt2e.observer import ObserverBase
    return [
        (name, module)
        # Where tensors share parameters, one observer stands under several names.
        for name, module in prepared.named_modules(remove_duplicate=False)
        if isinstance(module, (ObserverBase, FakeQuantizeBase))
    ]


def holds_observers(model: torch.nn.Module) -> bool:
    """Whether a model was prepared for PT2E quantization and not converted yet."""
    return any(_observers(graph) for graph in _graphs(model))


def holds_quantization(model: torch.nn.Module) -> bool:
    """Whether a graph holds PT2E quantize or dequantize nodes, as `convert_pt2e` leaves them."""
    return any(
        "quantized_decomposed" in str(node.target)
        for graph in _graphs(model)
        for node in graph.graph.nodes
    )


def _graphs(model: torch.nn.Module) -> list[torch.fx.GraphModule]:
    import torch

    return [module for module in model.modules() if isinstance(module, torch.fx.GraphModule)]


def needs_calibration(prepared: torch.fx.GraphModule) -> bool:
    """
    Whether any activation of a prepared graph is observed to be quantized statically.

    Such a graph the converter must be told to convert in its STATIC mode; DYNAMIC is for weights.
    """
    return bool(_static_activations(prepared))


def _static_activations(prepared: torch.fx.GraphModule) -> list[tuple[str, Any]]:
    """Observers on what is computed, by the name of the node observed; weights stand apart."""
    observers = dict(_observers(prepared))
    found = []
    for node in prepared.graph.nodes:
        if node.op != "call_module" or node.target not in observers:
            continue
        observer = observers[node.target]
        source = node.args[0]
        if not _is_constant(source) and not getattr(observer, "is_dynamic", False):
            found.append((source.name, observer))
    return found


def _is_constant(node: Any) -> bool:
    """Whether a node is a parameter, a buffer, or computed from such alone."""
    if node.op != "call_function":
        return bool(node.op == "get_attr")
    return bool(node.all_input_nodes) and all(_is_constant(n) for n in node.all_input_nodes)


def uncalibrated(prepared: torch.fx.GraphModule) -> list[str]:
    """Names of the activations whose observers have seen no data."""
    names = []
    for name, observer in _static_activations(prepared):
        # A fake quantizer observes through the observer it holds.
        watcher = getattr(observer, "activation_post_process", observer)
        low = getattr(watcher, "min_val", None)
        if low is not None and (low.numel() == 0 or bool(low.isinf().any())):
            names.append(name)
    return names


def finish_pt2e(prepared: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """
    Replace observers by quantize and dequantize nodes.

    `fold_quantize=False`: torchao's default folds the weights to integers, which the converter
    refuses (`'stablehlo.uniform_dequantize' op operand #0 must be ranked tensor of per-tensor
    integer`; litert-torch 0.9.4 and 0.10.0).
    """
    with quiet():
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e

        converted: torch.fx.GraphModule = convert_pt2e(prepared, fold_quantize=False)
    # An exported graph cannot be switched by .eval(); its flag alone makes the converter warn that
    # it "is converted in training mode" (litert-torch 0.10.0, harmless).
    converted.training = False
    return converted
