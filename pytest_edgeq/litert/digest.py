"""Hashes of what determines a result: plain data, tensors, torch graphs."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import operator
import os
import re
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pytest_edgeq.litert.configs import name_of
from pytest_edgeq.litert.exported import OPERATORS, checks_shapes
from pytest_edgeq.numerics.arrays import contiguous

TRUSTED_OPS = frozenset(
    {"aten", "prim", "prims", "quantized_decomposed", "higher_order", "litert_torch"}
)
"""Namespaces of operators whose implementation belongs to a library whose version is in the key."""

_TORCH_FILES = str(Path(torch.__file__).parent) + os.sep
"""Prefix of torch's files, with the separator, which excludes `torchvision`."""

_TRUSTED_MODULES = ("torch", "torchao", "litert_torch", "operator", "_operator", "builtins", "math")

# A node's metadata that the converter and the annotators read.
_READ_METADATA = (
    "nn_module_stack",
    "source_fn_stack",
    "torch_fn",
    "val",
    "quantization_annotation",
)


class UnhashableError(Exception):
    """The state of an object cannot be hashed; names the object."""


def digest_of(*values: Any) -> str:
    """Return the SHA-256 of values, in hexadecimal."""
    hasher = hashlib.sha256()
    for value in values:
        feed(hasher, value)
    return hasher.hexdigest()


def feed(hasher: Any, value: Any) -> None:
    """Add a value to a hash: its type, its length and its content."""
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        _add(hasher, type(value).__name__, repr(value).encode("utf-8", "surrogatepass"))
    elif isinstance(value, (bytes, bytearray, memoryview)):
        _add(hasher, "bytes", bytes(value))
    elif isinstance(value, torch.Tensor):
        _feed_tensor(hasher, value)
    elif isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise UnhashableError(f"an array of dtype {value.dtype}")
        _add(hasher, f"array {value.dtype.str} {value.shape}", contiguous(value).data)
    elif isinstance(value, np.generic) and not value.dtype.hasobject:
        _add(hasher, f"scalar {value.dtype.str}", value.tobytes())
    elif isinstance(value, Mapping):
        items = list(value.items())
        _add(hasher, f"dict {len(items)}", b"")
        for key, each in items:
            feed(hasher, key)
            feed(hasher, each)
    elif isinstance(value, (set, frozenset)):
        _add(hasher, f"set {len(value)}", "".join(sorted(map(digest_of, value))).encode())
    elif isinstance(value, (list, tuple)):
        _add(hasher, f"{type(value).__name__} {len(value)}", b"")
        for each in value:
            feed(hasher, each)
    elif value is Ellipsis:
        _add(hasher, "ellipsis", b"")
    elif isinstance(value, slice):
        feed(hasher, ("slice", value.start, value.stop, value.step))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        feed(hasher, (type(value), fields))
    elif isinstance(value, functools.partial):
        feed(hasher, (value.func, value.args, value.keywords))
    elif type(value).__name__.lstrip("_") == "PartialWrapper":  # of torch and torchao
        feed(hasher, (value.p, value.callable_args))
    elif isinstance(value, torch.fx.Node):
        _add(hasher, "node", value.name.encode())
    elif isinstance(value, _NAMED):
        _add(hasher, type(value).__name__, str(value).encode())
    else:
        _feed_named(hasher, value)


# What torch writes in full.
_NAMED = (
    *(torch.dtype, torch.layout, torch.memory_format, torch.device, torch.qscheme),
    *(torch.SymInt, torch.SymFloat, torch.SymBool),
)


def _add(hasher: Any, kind: str, content: Any) -> None:
    size = content.nbytes if isinstance(content, memoryview) else len(content)
    hasher.update(f"{kind}:{size}:".encode())
    hasher.update(content)


def _feed_tensor(hasher: Any, value: torch.Tensor) -> None:
    strides = tuple(value.stride()) if value.layout == torch.strided else ()
    head = f"tensor {value.dtype} {tuple(value.shape)} {strides} {value.layout} {value.device}"
    if type(value).__name__ == "FakeTensor":  # torch has no public name of it
        _add(hasher, f"fake {head}", b"")
        return
    if type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise UnhashableError(
            f"a tensor of class {type(value).__module__}.{type(value).__qualname__}"
        )
    if value.layout != torch.strided or value.is_quantized or value.device.type != "cpu":
        raise UnhashableError(f"a {value.layout} tensor on {value.device}")
    plain = value.detach().resolve_conj().resolve_neg().contiguous()
    size = plain.numel() * plain.element_size()
    # Not by numpy, which makes the storage fixed in size, and observers resize theirs.
    memory = (ctypes.c_char * size).from_address(plain.data_ptr()) if size else b""
    _add(hasher, head, memoryview(memory))


def _feed_named(hasher: Any, value: Any) -> None:
    """Add an operator, function or class of a known library."""
    if isinstance(value, OPERATORS):
        name = str(value)
        if name.partition(".")[0] not in TRUSTED_OPS:
            raise UnhashableError(f"the operator {name}, whose code is not part of a known library")
        _add(hasher, "op", name.encode())
    elif any(kind.__name__ == "HigherOrderOperator" for kind in type(value).__mro__):
        _add(hasher, "op", f"higher_order.{value}".encode())
    elif isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        module = value.__module__ or "builtins"
        if module.partition(".")[0] not in _TRUSTED_MODULES:
            raise UnhashableError(f"{module}.{value.__qualname__}, which is of no known library")
        _add(hasher, "name", f"{module}.{value.__qualname__}".encode())
    else:
        raise UnhashableError(f"a {type(value).__module__}.{type(value).__qualname__}")


def feed_graph(hasher: Any, module: torch.fx.GraphModule, metadata: Sequence[str] = ()) -> None:
    """Add a graph to a hash: nodes, the metadata read, and constants."""
    _refuse_hooks(module)
    for node in module.graph.nodes:
        if checks_shapes(node):
            continue  # shapes are in the nodes
        target = node.target if callable(node.target) else str(node.target)
        feed(hasher, (node.op, node.name, target, node.args, dict(node.kwargs)))
        for key in (*_READ_METADATA, *metadata):
            if key in node.meta:
                _feed_metadata(hasher, key, node.meta[key])
        if node.op == "get_attr":
            value = operator.attrgetter(str(node.target))(module)
            if isinstance(value, torch.fx.GraphModule):
                feed_graph(hasher, value, metadata)
            else:
                feed(hasher, value)
        elif node.op == "call_module":
            called = module.get_submodule(str(node.target))
            if isinstance(called, torch.fx.GraphModule):
                feed_graph(hasher, called, metadata)
            else:
                _feed_module(hasher, called)


def _feed_metadata(hasher: Any, key: str, value: Any) -> None:
    if key == "nn_module_stack":
        # Its keys are addresses in strict export.
        value = [(path, name_of(kind)) for path, kind in value.values()]
    elif key == "source_fn_stack":
        value = [(name, name_of(source)) for name, source in value]
    elif key == "stack_trace":
        value = re.sub(r'File "[^"]*[/\\]', 'File "', value)  # installation paths differ
    feed(hasher, (key, value))


def _feed_module(hasher: Any, module: torch.nn.Module) -> None:
    """Add an observer or a fake quantizer: its class, its settings and its buffers."""
    kind = type(module)
    if kind.__module__.partition(".")[0] not in ("torch", "torchao", "litert_torch"):
        raise UnhashableError(f"an observer of class {kind.__module__}.{kind.__qualname__}")
    feed(hasher, name_of(kind))
    _refuse_hooks(module)
    for name, value in sorted(vars(module).items()):
        if name in ("_parameters", "_buffers"):
            feed(hasher, {key: each for key, each in value.items() if each is not None})
        elif name == "_modules":
            for child, each in value.items():
                feed(hasher, child)
                _feed_module(hasher, each)
        elif not name.startswith("_"):
            feed(hasher, value)


def _refuse_hooks(module: torch.nn.Module) -> None:
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        # torch.export itself registers one that checks the inputs of a graph.
        code = getattr(hook, "__code__", None)
        if code is None or not code.co_filename.startswith(_TORCH_FILES):
            raise UnhashableError(f"a hook of a {type(module).__name__}, {name_of(hook)}")
