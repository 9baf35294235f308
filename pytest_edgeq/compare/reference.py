"""Call a reference, and return its outputs as named arrays in the file's order."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pytest_edgeq.compare.foreign import (
    FileReference,
    OnnxReference,
    call_keras,
    is_keras,
    keras_input_names,
)
from pytest_edgeq.compare.samples import Sample, as_array, is_tensor
from pytest_edgeq.names import printable, readable
from pytest_edgeq.tflite.modules import ModuleNode, ModuleTree
from pytest_edgeq.versions import import_torch, loaded_torch

if TYPE_CHECKING:
    import torch


def call_reference(
    reference: Callable[..., Any], sample: Sample
) -> list[tuple[str | None, np.ndarray[Any, Any]]]:
    """
    Run a torch module or any other callable on one sample, without gradients.

    A torch module, a method of one or a `functools.partial` of either gets tensors; a Keras model
    (`training=False`) and an ONNX session get numpy arrays. Any other callable gets arrays, and
    tensors if it fails on arrays. Each output has its dict key where it has one.
    """
    return flatten_outputs(call_unflattened(reference, sample))


def call_unflattened(reference: Callable[..., Any], sample: Sample) -> Any:
    """Call as `call_reference`, and return the outputs as the reference nests them."""
    with no_grad():
        if torch_module(reference) is not None:
            return _call(reference, sample, as_tensor)
        if is_keras(reference):
            return _call(functools.partial(call_keras, reference), sample, as_array)
        if isinstance(reference, (OnnxReference, FileReference)):
            return _call(reference, sample, as_array)
        return _call_plain(reference, sample)


def _call(reference: Callable[..., Any], sample: Sample, convert: Callable[[Any], Any]) -> Any:
    # On a copy: an in-place forward would change the sample of the others.
    copied = sample.clone().mapped(convert)
    return reference(*copied.args, **copied.kwargs)


def _call_plain(reference: Callable[..., Any], sample: Sample) -> Any:
    # Arrays first: a function written for numpy may run on tensors and mean something else there,
    # as std does; one written for torch hands them to torch, which refuses them.
    try:
        return _call(reference, sample, as_array)
    except Exception as on_arrays:
        if not import_torch():
            raise
        try:
            return _call(reference, sample, as_tensor)
        except Exception as on_tensors:
            errors = [f"{type(error).__name__}: {error}" for error in (on_arrays, on_tensors)]
            if errors[0] == errors[1]:
                # The kind of the input does not matter.
                raise on_arrays from None
            name = getattr(reference, "__name__", type(reference).__name__)
            raise TypeError(
                f"the reference {name} accepts neither numpy arrays ({errors[0]}) nor tensors "
                f"({errors[1]})"
            ) from on_tensors


def torch_module(reference: object) -> torch.nn.Module | None:
    """Return the torch module that a reference calls, or None."""
    torch = loaded_torch()
    if torch is None:
        return None
    while isinstance(reference, functools.partial):
        reference = reference.func
    owner = getattr(reference, "__self__", None)
    module = owner if isinstance(owner, torch.nn.Module) else reference
    # On its torch backend a Keras model is a torch module as well.
    return module if isinstance(module, torch.nn.Module) and not is_keras(module) else None


def no_grad() -> contextlib.AbstractContextManager[None]:
    """Record no gradients; of no effect where torch is not loaded."""
    torch = loaded_torch()
    return torch.no_grad() if torch else contextlib.nullcontext()


@contextlib.contextmanager
def undisturbed(reference: Callable[..., Any], name: str) -> Iterator[list[str]]:
    """Run a reference, and restore its buffers; yield a list for the names of changed ones."""
    changed: list[str] = []
    if is_keras(reference):
        with _keras_undisturbed(reference, changed):
            yield changed
        return
    if isinstance(reference, FileReference):
        reference.edge.restart()
    owner = torch_module(reference)
    if owner is None:
        yield changed
        return
    if in_train_mode(owner):
        raise ValueError(
            f"{name}: the reference is in train mode, switched after it was quantized: dropout and "
            "batch statistics would be compared, and the statistics changed. Call model.eval()"
        )
    before = {key: (buffer, buffer.detach().clone()) for key, buffer in owner.named_buffers()}
    try:
        yield changed
    finally:
        with no_grad():
            for key, (buffer, value) in before.items():
                path, _, attribute = key.rpartition(".")
                module = owner.get_submodule(path)
                is_other = getattr(module, attribute) is not buffer  # as a table that is made once
                if is_other or not _are_equal(buffer, value):
                    changed.append(key)
                    setattr(module, attribute, buffer)
                    buffer.copy_(value)


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two values of a buffer are equal; NaN equals NaN."""
    if not one.is_floating_point() or one.shape != other.shape:
        return one.equal(other)
    return one.double().allclose(other.double(), rtol=0.0, atol=0.0, equal_nan=True)


@contextlib.contextmanager
def _keras_undisturbed(model: Any, changed: list[str]) -> Iterator[None]:
    # The states of stateful layers and of random number generators; no weight changes in a call.
    variables = list(model.non_trainable_variables)
    before = [np.array(variable.numpy()) for variable in variables]
    try:
        yield
    finally:
        for variable, value in zip(variables, before, strict=True):
            if not np.array_equal(variable.numpy(), value, equal_nan=True):
                changed.append(getattr(variable, "path", variable.name))
                variable.assign(value)


def in_train_mode(model: torch.nn.Module, path: str = "") -> list[str]:
    """Return the paths of the modules in train mode."""
    if is_exported(model):
        return [path] if _graph_trains(model) else []
    # Modules that torch.ao has quantized keep the flag; only recurrent ones drop out by it.
    drops_out = bool(getattr(model, "dropout", 0))
    is_training = getattr(model, "training", False)  # frozen TorchScript has no such flag
    trains = is_training and (not is_quantized_by_torch_ao(model) or drops_out)
    below = [
        each
        for name, child in model.named_children()
        for each in in_train_mode(child, f"{path}.{name}" if path else name)
    ]
    return [path, *below] if trains else below


def graph_module(module: object) -> torch.fx.GraphModule | None:
    """Return a graph module as it is, None for anything else."""
    torch = loaded_torch()
    return module if torch and isinstance(module, torch.fx.GraphModule) else None


def is_exported(module: object) -> bool:
    """Return whether torch.export made the module; PT2E's graphs are exported, too."""
    if (graph := graph_module(module)) is None:
        return False
    # A graph from the conversion cache has the second alone.
    return any("val" in n.meta or "torch_fn" in n.meta for n in graph.graph.nodes)


def _graph_trains(module: Any) -> bool:
    """Return whether a dropout or batch norm was exported in train mode."""
    for node in module.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        for position, argument in enumerate(() if schema is None else schema.arguments):
            if argument.name in ("train", "training"):
                value = node.args[position] if position < len(node.args) else None
                if node.kwargs.get(argument.name, value) is True:
                    return True
    return False


def is_quantized_by_torch_ao(module: torch.nn.Module) -> bool:
    """Return whether torch's eager or FX graph mode made this quantized module."""
    homes = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")
    return type(module).__module__.startswith(homes)


def as_tensor(value: Any) -> torch.Tensor:
    """Convert a sample's numpy array to a tensor; return a tensor unchanged."""
    import torch

    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def flatten_outputs(
    outputs: Any, *, below_key: bool = False
) -> list[tuple[str | None, np.ndarray[Any, Any]]]:
    """Flatten nested tuples, lists, dicts and model outputs in order, as torch.export does."""
    if is_tensor(outputs):
        # Eager-mode quantized models return codes unless they end in a DeQuantStub.
        codes = getattr(outputs, "is_quantized", False)
        return [(None, as_array(outputs.dequantize() if codes else outputs))]
    if hasattr(outputs, "__array__") and hasattr(outputs, "dtype"):
        # numpy's scalars, and the tensors of other frameworks.
        array = np.asarray(outputs)
        # numpy has no bfloat16: ml_dtypes' cannot be errors from an unknown kind.
        return [(None, array.astype(np.float32) if array.dtype.name == "bfloat16" else array)]
    if isinstance(outputs, Mapping) or (below_key and isinstance(outputs, (tuple, list))):
        # The converter joins the keys of nested outputs, and positions below them, with "_".
        return [
            (str(key) if name is None else f"{key}_{name}", leaf)
            for key, each in (
                outputs.items() if isinstance(outputs, Mapping) else enumerate(outputs)
            )
            for name, leaf in flatten_outputs(each, below_key=True)
        ]
    if isinstance(outputs, (tuple, list)):
        return [leaf for value in outputs for leaf in flatten_outputs(value)]
    raise TypeError(
        f"the reference returned a {type(outputs).__name__} among its outputs; expected tensors, "
        "or tuples, lists and dicts of them"
    )


def in_file_order(
    outputs: Sequence[tuple[str | None, np.ndarray[Any, Any]]],
    wanted: Sequence[str],
    name: str,
    aliases: Sequence[str] = (),
) -> list[np.ndarray[Any, Any]]:
    """
    Return a reference's outputs in the file's order, by name if the names are the same.

    An output without a key is called `output_<position>`, as by the converter, or by its alias. If
    no name is known to both, position counts.
    """
    keys = [key for key, _ in outputs]
    if len(aliases) == len(keys) and set(aliases) == set(wanted) and set(keys) == {None}:
        outputs = [(alias, value) for alias, (_, value) in zip(aliases, outputs, strict=True)]
    named = {f"output_{i}" if key is None else key: value for i, (key, value) in enumerate(outputs)}
    if len(outputs) != len(wanted):
        raise ValueError(
            f"{name}: the reference returns {len(outputs)} output(s) {list(named)}, the file "
            f"{len(wanted)}: {list(wanted)}"
        )
    if set(named) == set(wanted):
        return [named[each] for each in wanted]
    if set(named) & set(wanted):
        raise ValueError(
            f"{name}: the outputs of the reference {list(named)} and of the file {list(wanted)} "
            "agree in part of their names only, so position would pair the wrong ones"
        )
    return [value for _, value in outputs]


@dataclass(frozen=True, slots=True)
class Parameters:
    """Call signature of a reference; empty if unknown."""

    positional: tuple[str, ...] = ()
    keyword_only: tuple[str, ...] = ()
    accepts_any_position: bool = False  # whether it has `*args`
    accepts_any_name: bool = False  # whether it has `**kwargs`
    required: frozenset[str] = frozenset()  # positional ones without a default


def parameters_of(reference: Callable[..., Any]) -> Parameters:
    """Return the call signature of a reference."""
    if isinstance(reference, (OnnxReference, FileReference)):
        return Parameters(reference.input_names)
    if is_keras(reference):
        return Parameters(keras_input_names(reference))
    function = getattr(reference, "forward", reference)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        # Builtins and some extension types have no signature.
        return Parameters()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    found = {each.kind for each in parameters}
    return Parameters(
        tuple(each.name for each in parameters if each.kind in kinds),
        tuple(each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY),
        inspect.Parameter.VAR_POSITIONAL in found,
        inspect.Parameter.VAR_KEYWORD in found,
        frozenset(
            each.name for each in parameters if each.kind in kinds and each.default is each.empty
        ),
    )


def quantizes_by_itself(reference: Callable[..., Any]) -> bool:
    """Return whether a reference rounds activations, unlike the file's float form."""
    if isinstance(reference, FileReference):
        return reference.quantizes
    module = torch_module(reference)
    if module is None:
        return False
    from pytest_edgeq import litert

    return (
        litert.holds_quantization(module)
        or litert.holds_observers(module)
        or litert.is_prepared_by_torch_ao(module)
        or any(map(is_quantized_by_torch_ao, module.modules()))
    )


def name_of(reference: Callable[..., Any] | None) -> str:
    """Return the name of a reference in texts."""
    if reference is None or torch_module(reference) is not None:
        return "torch"
    if is_keras(reference):
        return "the Keras model"
    if isinstance(reference, OnnxReference):
        return "the ONNX session"
    if isinstance(reference, FileReference):
        return "the float file" if reference.is_float else "the reference file"
    return "the reference"


def as_module(model: Any) -> Any:
    """Return the graph module of an exported program; anything else unchanged."""
    torch = loaded_torch()
    if torch is None or not isinstance(model, torch.export.ExportedProgram):
        return model
    from pytest_edgeq import litert

    with litert.quiet():
        return model.module()


def model_name(model: Any) -> str:
    """Return the name of a model's class, also of an exported one's."""
    exported = _exported_classes(model).get("", "") if is_exported(model) else ""
    return exported.rpartition(".")[2] or type(model).__name__


def _exported_classes(graph: Any) -> dict[str, str]:
    """Return the class names of the modules that an exported graph calls, by path."""
    return {
        path: kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
        for node in graph.graph.nodes
        for path, kind in node.meta.get("nn_module_stack", {}).values()
    }


def _exported_tree(graph: Any) -> ModuleTree:
    classes = _exported_classes(graph)
    nodes: dict[str, ModuleNode] = {}

    def node_of(path: str) -> ModuleNode:
        if path not in nodes:
            above, _, attribute = path.rpartition(".")
            name = classes.get(path, "")
            owner, _, kind = name.rpartition(".")
            # A container whose children are called one by one is no part of a graph.
            what = _kind(getattr(sys.modules.get(owner), kind, object)) if name else "list"
            shown = (readable(path), printable(attribute), printable(name))
            nodes[path] = ModuleNode(*shown, what)
            if path:
                node_of(above).children.append(nodes[path])
        return nodes[path]

    for path in classes:
        node_of(path)
    return ModuleTree(node_of(""))


def module_tree(model: torch.nn.Module) -> ModuleTree:
    """Return a model's module tree, by which ops of the file are named."""
    if is_exported(model):
        return _exported_tree(model)
    nodes: dict[int, ModuleNode] = {}

    def describe(module: torch.nn.Module, path: str, attribute: str) -> ModuleNode:
        # A module reached twice keeps its first path under every attribute.
        first = nodes.get(id(module))
        node = ModuleNode(
            path=first.path if first is not None else readable(path),
            # As the file's own names are read, which hold it.
            attribute=printable(attribute),
            class_name=printable(f"{type(module).__module__}.{type(module).__qualname__}"),
            kind=_kind(type(module)),
        )
        nodes.setdefault(id(module), node)
        for name, child in module._modules.items():
            if child is not None:
                node.children.append(describe(child, f"{path}.{name}" if path else name, name))
        return node

    return ModuleTree(describe(model, "", ""))


def _kind(module: type) -> str | None:
    from torch import nn

    kinds: tuple[tuple[str, Any], ...] = (
        ("conv_transpose", nn.modules.conv._ConvTransposeNd),
        ("conv", nn.modules.conv._ConvNd),
        ("linear", nn.Linear),
        ("embedding", nn.Embedding),
        ("prelu", nn.PReLU),
        ("list", (nn.ModuleList, nn.ModuleDict)),
    )
    return next((kind for kind, types in kinds if issubclass(module, types)), None)
