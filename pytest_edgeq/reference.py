"""The torch side: call a reference and give its outputs as arrays, in order, with their names."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from pytest_edgeq.samples import Sample, as_array, is_tensor
from pytest_edgeq.tflite.modules import ModuleNode, ModuleTree

if TYPE_CHECKING:
    import torch


__all__ = [
    "as_tensor",
    "call_reference",
    "flatten_outputs",
    "module_tree",
    "parameter_names",
    "undisturbed",
]

# A user's test shows the user's line and the message, not how we came to it.
__tracebackhide__ = True


def call_reference(
    reference: Callable[..., Any], sample: Sample
) -> list[tuple[str | None, np.ndarray[Any, Any]]]:
    """
    Run a torch module or any other callable on one sample.

    A torch module is run without gradients, on tensors; another callable gets the sample's own
    tensors or arrays.

    Returns:
        Its outputs, flattened in order, each with its dict key where it has one.

    Raises:
        TypeError: An output is not a tensor.
    """
    import torch

    # A copy of its own: a forward that works in place would change what the others are given.
    sample = sample.clone()
    if not isinstance(reference, torch.nn.Module):
        return flatten_outputs(reference(*sample.args, **sample.kwargs))
    args = [as_tensor(value) for value in sample.args]
    kwargs = {name: as_tensor(value) for name, value in sample.kwargs.items()}
    with torch.no_grad():
        return flatten_outputs(reference(*args, **kwargs))


@contextlib.contextmanager
def undisturbed(reference: Callable[..., Any], name: str) -> Iterator[list[str]]:
    """
    Run a torch module and leave its buffers as they were.

    Gives:
        A list that holds, afterwards, the names of the buffers that its forward had changed.

    Raises:
        ValueError: The module is in train mode.
    """
    import torch

    changed: list[str] = []
    if not isinstance(reference, torch.nn.Module):
        yield changed
        return
    if any(module.training for module in reference.modules()):
        raise ValueError(
            f"{name}: the reference is in train mode, switched after it was quantized: dropout and "
            "batch statistics would be compared, and the statistics changed. Call model.eval()"
        )
    before = {key: buffer.detach().clone() for key, buffer in reference.named_buffers()}
    try:
        yield changed
    finally:
        with torch.no_grad():
            for key, buffer in reference.named_buffers():
                if not torch.equal(buffer, before[key]):
                    changed.append(key)
                    buffer.copy_(before[key])


def as_tensor(value: Any) -> torch.Tensor:
    """A sample's tensor, or its numpy array as one."""
    import torch

    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def flatten_outputs(outputs: Any) -> list[tuple[str | None, np.ndarray[Any, Any]]]:
    """
    Flatten nested tuples, lists, dicts and model outputs in order, as torch.export does.

    Raises:
        TypeError: A leaf is not a tensor.
    """
    if is_tensor(outputs):
        return [(None, as_array(outputs))]
    if isinstance(outputs, Mapping):
        # The converter joins the keys of nested outputs with "_".
        return [
            (f"{key}_{inner}" if inner is not None else str(key), leaf)
            for key, value in outputs.items()
            for inner, leaf in _numbered(value)
        ]
    if isinstance(outputs, (tuple, list)):
        return [leaf for value in outputs for leaf in flatten_outputs(value)]
    raise TypeError(
        f"the reference gave a {type(outputs).__name__} among its outputs; expected tensors, or "
        "tuples, lists and dicts of them"
    )


def _numbered(value: Any) -> list[tuple[str | None, np.ndarray[Any, Any]]]:
    if isinstance(value, (tuple, list)):
        return [
            (f"{i}_{inner}" if inner is not None else str(i), leaf)
            for i, item in enumerate(value)
            for inner, leaf in _numbered(item)
        ]
    return flatten_outputs(value)


def parameter_names(reference: Callable[..., Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """
    Names of the parameters that may be given by position, and of those by keyword only.

    Empty where they cannot be told.
    """
    function = getattr(reference, "forward", reference)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        # Builtins and some extension types have no signature.
        return (), ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return (
        tuple(each.name for each in parameters if each.kind in kinds),
        tuple(each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY),
    )


def module_tree(model: torch.nn.Module) -> ModuleTree:
    """Describe a live model's modules, so that ops of the file can be named after them."""
    nodes: dict[int, ModuleNode] = {}

    def describe(module: torch.nn.Module, path: str, attribute: str) -> ModuleNode:
        # A module reached twice keeps its first path under every attribute.
        first = nodes.get(id(module))
        node = ModuleNode(
            path=first.path if first is not None else path,
            attribute=attribute,
            class_name=f"{type(module).__module__}.{type(module).__qualname__}",
            kind=_kind(module),
        )
        nodes.setdefault(id(module), node)
        for name, child in module._modules.items():
            if child is not None:
                node.children.append(describe(child, f"{path}.{name}" if path else name, name))
        return node

    return ModuleTree(describe(model, "", ""))


def _kind(module: torch.nn.Module) -> str | None:
    from torch import nn

    kinds: tuple[tuple[str, Any], ...] = (
        ("conv_transpose", nn.modules.conv._ConvTransposeNd),
        ("conv", nn.modules.conv._ConvNd),
        ("linear", nn.Linear),
        ("embedding", nn.Embedding),
        ("prelu", nn.PReLU),
        ("list", (nn.ModuleList, nn.ModuleDict)),
    )
    return next((kind for kind, types in kinds if isinstance(module, types)), None)
