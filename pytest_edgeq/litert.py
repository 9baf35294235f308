"""
The converter and the quantizer libraries behind one face.

The only module that imports litert_torch, torchao or ai_edge_quantizer, so that a release of theirs
is answered in one file. Each shim names the versions and the symptom, and has a test in
`tests/test_litert.py` that fails when it is no longer needed.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_edgeq.presets import PRESETS
from pytest_edgeq.suggest import nearest

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    Recipe = list[dict[str, Any]]


__all__ = [
    "calibrate_recipe",
    "convert_graph",
    "convert_model",
    "finish_pt2e",
    "holds_observers",
    "holds_quantization",
    "is_pt2e_quantizer",
    "load_recipe",
    "needs_calibration",
    "prepare_pt2e",
    "pt2e_preset",
    "quantize_recipe",
    "quiet",
    "uncalibrated",
]

# Where the float conversion of a torch model puts its only entry point.
SIGNATURE = "serving_default"


# Loggers that say nothing that a user could act on, and would fill the captured log of every test
# that fails: torch 2.13's structured trace (hundreds of empty DEBUG records an export), torchao
# 0.18 on extensions for GPUs that it could not load, and torch on torchao's enums.
_CHATTER = ("torch.__trace", "torchao", "torchao.kernel.intmm", "torch.utils._pytree")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """
    Keep the libraries' own chatter away from tests, and from suites that make warnings errors.

    torch 2.13 and litert-torch 0.10 warn on each conversion (`isinstance(treespec, LeafSpec)` is
    deprecated) and on import (torchao's `KernelPreference`); nobody outside can act on it.
    """
    progress = os.environ.get("LITERT_TORCH_SHOW_PROGRESS")
    os.environ.setdefault("LITERT_TORCH_SHOW_PROGRESS", "n")
    # litert-torch 0.10 warns through logging.warning, which gives a bare root logger a handler.
    root = logging.getLogger()
    handlers = list(root.handlers)
    loggers = [logging.getLogger(name) for name in _CHATTER]
    disabled = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, before in zip(loggers, disabled, strict=True):
            logger.disabled = before
        for handler in [handler for handler in root.handlers if handler not in handlers]:
            root.removeHandler(handler)
        if progress is None:
            os.environ.pop("LITERT_TORCH_SHOW_PROGRESS", None)


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


def convert_graph(
    converted: torch.fx.GraphModule,
    args: tuple[torch.Tensor, ...],
    kwargs: Mapping[str, torch.Tensor],
    *,
    static: bool,
    dynamic_shapes: Any = None,
) -> bytes:
    """
    Convert a PT2E graph to `.tflite`.

    The quantizer's own config is not passed on: the converter looks at nothing but
    `global_config.is_dynamic` (litert-torch 0.10.0, `quant_config.py`), which a quantizer that
    sets configs by module or by operator does not have. So it gets one of that kind.
    """
    with quiet():
        from litert_torch.quantize.quant_config import QuantConfig

        preset = "pt2e_static_int8" if static else "pt2e_dynamic_int8"
        config = QuantConfig(pt2e_quantizer=pt2e_preset(preset))
    return _convert(converted, args, kwargs, dynamic_shapes=dynamic_shapes, quant_config=config)


def convert_model(
    model: torch.nn.Module,
    args: tuple[torch.Tensor, ...],
    kwargs: Mapping[str, torch.Tensor],
    *,
    dynamic_shapes: Any = None,
) -> bytes:
    """Convert a torch model to a float `.tflite`."""
    return _convert(model, args, kwargs, dynamic_shapes=dynamic_shapes)


def _convert(
    model: torch.nn.Module,
    args: tuple[torch.Tensor, ...],
    kwargs: Mapping[str, torch.Tensor],
    **options: Any,
) -> bytes:
    with quiet():
        import litert_torch

        edge = litert_torch.convert(model, args, dict(kwargs) or None, **options)
        content: bytes = edge.model_content()
        return content


def load_recipe(recipe: str | Path | Recipe) -> Recipe:
    """
    Give a recipe's rules from our preset's name, a `.json` path or the list itself.

    Raises:
        FileNotFoundError: The path does not exist.
        ValueError: The file is not JSON, or there is no rule in it.
        TypeError: The content is not a list of dicts.
    """
    where = "recipe"
    if isinstance(recipe, str) and recipe in PRESETS:
        with quiet():
            from ai_edge_quantizer import recipe as recipes

            rules = getattr(recipes, recipe.removeprefix("recipe_"))()
    elif isinstance(recipe, (str, Path)):
        path = Path(recipe)
        where = f"recipe {path}"
        if not path.is_file():
            raise FileNotFoundError(f"no recipe at {path}")
        try:
            rules = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{where} is not JSON: {error}") from None
    else:
        rules = recipe
    if not isinstance(rules, list) or not all(isinstance(rule, dict) for rule in rules):
        raise TypeError(
            f"{where}: expected a list of dicts, one a rule, got {type(rules).__name__}"
        )
    if not rules:
        raise ValueError(f"{where} has no rule: nothing would be quantized")
    return rules


def _recipe_quantizer(float_tflite: bytes, recipe: Recipe) -> Any:
    with quiet():
        from ai_edge_quantizer import quantizer

        with _refusals("refuses the recipe"):
            return quantizer.Quantizer(float_tflite, recipe)


@contextlib.contextmanager
def _refusals(what: str) -> Iterator[None]:
    """Say whose error it is: ai-edge-quantizer raises whatever it stumbles over."""
    try:
        yield
    except Exception as error:
        raise RuntimeError(
            f"ai-edge-quantizer {what}: check the rules' operations, bits and granularity, and "
            "whether the library knows every op of the float .tflite (model.float_tflite)\n"
            f"{type(error).__name__}: {error}"
        ) from error


def calibrate_recipe(
    float_tflite: bytes,
    recipe: Recipe,
    samples: Iterable[Mapping[str, npt.NDArray[np.generic]]],
    *,
    threads: int,
) -> Any | None:
    """
    Collect the ranges that a recipe needs, by running the float `.tflite`.

    Args:
        float_tflite: What will be quantized.
        recipe: Its rules.
        samples: Inputs by signature name; read only if the recipe needs them.
        threads: Of the interpreter.

    Returns:
        What `quantize_recipe` wants, None where the recipe needs no calibration.
    """
    if not _recipe_quantizer(float_tflite, recipe).need_calibration:
        return None
    with quiet():
        from ai_edge_quantizer.calibrator import Calibrator
        from ai_edge_quantizer.recipe_manager import RecipeManager

        manager = RecipeManager()
        manager.load_quantization_recipe(recipe)
        calibrator = Calibrator(float_tflite, num_threads=threads)
    # One sample a call: `Quantizer.calibrate` counts its data set with len(list(…)) before it reads
    # it (ai-edge-quantizer 0.10.0), so a generator comes out empty and a list is held whole. The
    # ranges gathered are the same.
    for sample in samples:
        with quiet(), _refusals("cannot calibrate for the recipe"):
            calibrator.calibrate({SIGNATURE: [sample]}, manager)
    return calibrator.get_model_qsvs()


def quantize_recipe(float_tflite: bytes, recipe: Recipe, calibration: Any | None) -> bytes:
    """Quantize a float `.tflite` by a recipe."""
    quantizer = _recipe_quantizer(float_tflite, recipe)
    # Its report of sizes and times goes to standard output.
    with (
        quiet(),
        contextlib.redirect_stdout(io.StringIO()),
        _refusals("cannot apply the recipe"),
    ):
        result = quantizer.quantize(
            calibration, enable_progress_bar=False, enable_progress_report=False
        )
    return bytes(result.quantized_model)
