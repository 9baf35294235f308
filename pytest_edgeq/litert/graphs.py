"""
Torch graphs as JSON and raw tensors, read back without running any stored code.

Only operators of known libraries and functions of Python's `operator` are written; a graph with
anything else, such as the branches of `torch.cond`, cannot be stored.
"""

from __future__ import annotations

import ctypes
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pytest_edgeq.litert.configs import NODE_METADATA, name_of
from pytest_edgeq.litert.digest import TRUSTED_OPS, UnhashableError, digest_of
from pytest_edgeq.litert.exported import OPERATORS, checks_shapes
from pytest_edgeq.litert.libraries import register_operators

_NAMES = (
    *("getitem", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "pos", "abs"),
    *("lt", "le", "gt", "ge", "eq", "ne", "and_", "or_", "not_"),
)
_SYMBOLIC = (
    *("sym_int", "sym_float", "sym_max", "sym_min", "sym_not", "sym_ite", "sym_sqrt", "sym_sum"),
)

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{f"operator:{name}": getattr(operator, name) for name in _NAMES},
    **{f"torch:{name}": getattr(torch, name) for name in _SYMBOLIC},
}
"""Functions of a graph other than torch operators: indices, and arithmetic on sizes."""


def encode_graph(module: torch.fx.GraphModule) -> dict[str, bytes]:
    """
    Return the parts of a stored graph: `graph` (JSON) and `tensors` (raw).

    Raises:
        UnhashableError: A node, an argument or a tensor that the format cannot hold.
    """
    codegen = module.graph._codegen
    if not isinstance(codegen, torch.fx.graph._PyTreeCodeGen):
        raise UnhashableError(f"a graph with a {type(codegen).__name__}")
    info = codegen.pytree_info
    tensors: dict[str, torch.Tensor] = {}
    nodes = []
    keys = _StackKeys()
    for node in module.graph.nodes:
        target = node.target
        if checks_shapes(node):
            continue
        if node.op == "call_function":
            target = _encode_target(target)
        elif node.op == "get_attr":
            tensors[target] = operator.attrgetter(target)(module)
        elif node.op not in ("placeholder", "output"):
            raise UnhashableError(f"a node {node.op} of {target}")
        nodes.append(
            {
                "op": node.op,
                "name": node.name,
                "target": target,
                "args": _encode(node.args),
                "kwargs": _encode(dict(node.kwargs)),
                "meta": _encode_metadata(node.meta, keys),
            }
        )
    assert info.in_spec is not None, "unreachable because torch.export sets both"
    assert info.out_spec is not None, "unreachable because torch.export sets both"
    table, raw = encode_tensors(tensors)
    try:
        specs = [torch.utils._pytree.treespec_dumps(spec) for spec in (info.in_spec, info.out_spec)]
    except NotImplementedError as error:
        raise UnhashableError(
            f"inputs or outputs of a container without a name: {error}"
        ) from error
    content = {"nodes": nodes, "names": list(info.orig_args), "specs": specs, "tensors": table}
    return {"graph": json.dumps(content).encode(), "tensors": raw}


def decode_graph(parts: Mapping[str, bytes]) -> torch.fx.GraphModule:
    """Build the graph module that `encode_graph` has written."""
    content = json.loads(parts["graph"])
    for namespace in {str(each["target"]).partition(".")[0] for each in content["nodes"]}:
        register_operators(namespace)
    tensors = decode_tensors(content["tensors"], parts["tensors"])
    graph = torch.fx.Graph()
    nodes: dict[str, torch.fx.Node] = {}
    for each in content["nodes"]:
        target = each["target"]
        if each["op"] == "call_function":
            target = _decode_target(target)
        args, kwargs = _decode(each["args"], nodes), _decode(each["kwargs"], nodes)
        node = graph.create_node(each["op"], target, args, kwargs, name=each["name"])
        node.meta |= {name: _decode(value, {}) for name, value in each["meta"].items()}
        nodes[each["name"]] = node
    in_spec, out_spec = map(torch.utils._pytree.treespec_loads, content["specs"])
    info = torch.fx.graph._PyTreeInfo(content["names"], in_spec, out_spec)
    graph._codegen = torch.fx.graph._PyTreeCodeGen(info)
    return torch.fx.GraphModule(tensors, graph).train(False)


def encode_tensors(tensors: Mapping[str, torch.Tensor]) -> tuple[list[dict[str, Any]], bytes]:
    """Return a table of tensors, and their memory; equal memory is written once."""
    table: list[dict[str, Any]] = []
    pieces: list[bytes] = []
    known: dict[tuple[Any, ...], int] = {}
    size = 0
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise UnhashableError(f"a graph that reads {name}, a {type(tensor).__name__}")
        digest_of(tensor[:0] if tensor.ndim else tensor)  # refuses other than plain tensors
        value = tensor.detach()
        key = (value.data_ptr(), value.dtype, value.shape, value.stride())
        if key not in known or not value.numel():
            known[key] = size
            # Not by numpy, which makes the storage fixed in size.
            count = _span(value.shape, value.stride()) * value.element_size()
            raw = ctypes.string_at(value.data_ptr(), count) if count else b""
            pieces.append(raw)
            size += len(raw)
        table.append(
            {
                "name": name,
                "dtype": str(value.dtype).removeprefix("torch."),
                "shape": list(value.shape),
                "stride": list(value.stride()),
                "start": known[key],
                "is_parameter": isinstance(tensor, torch.nn.Parameter),
                "requires_grad": tensor.requires_grad,
            }
        )
    return table, b"".join(pieces)


def decode_tensors(table: list[dict[str, Any]], raw: bytes) -> dict[str, torch.Tensor]:
    """Return the tensors that `encode_tensors` has written; aliases share memory."""
    found: dict[str, torch.Tensor] = {}
    known: dict[tuple[Any, ...], torch.Tensor] = {}
    memory = ctypes.cast(ctypes.c_char_p(raw), ctypes.c_void_p).value or 0
    for each in table:
        dtype, shape, stride = getattr(torch, each["dtype"]), each["shape"], each["stride"]
        key = (each["start"], dtype, tuple(shape), tuple(stride))
        if key not in known:
            count = _span(shape, stride) * torch.empty(0, dtype=dtype).element_size()
            if each["start"] < 0 or count < 0 or each["start"] + count > len(raw):
                raise ValueError(f"the tensor {each['name']} reaches beyond the stored memory")
            tensor_memory = torch.empty(_span(shape, stride), dtype=dtype)
            ctypes.memmove(tensor_memory.data_ptr(), memory + each["start"], tensor_memory.nbytes)
            known[key] = tensor_memory.as_strided(shape, stride)
        tensor = known[key]
        if each["is_parameter"]:
            tensor = torch.nn.Parameter(tensor, requires_grad=each["requires_grad"])
        found[each["name"]] = tensor
    return found


def _span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of elements from the first to the last in memory."""
    if 0 in shape:
        return 0
    return 1 + sum(step * (length - 1) for step, length in zip(stride, shape, strict=True))


def _encode_target(target: Callable[..., Any]) -> str:
    if isinstance(target, OPERATORS[0]):
        name = str(target)
        if name.partition(".")[0] in TRUSTED_OPS:
            return name
    for name, function in _FUNCTIONS.items():
        if target is function:
            return name
    raise UnhashableError(f"a graph that calls {target}")


def _decode_target(text: str) -> Callable[..., Any]:
    if text in _FUNCTIONS:
        return _FUNCTIONS[text]
    namespace, _, rest = text.partition(".")
    name, _, overload = rest.partition(".")
    if namespace not in TRUSTED_OPS:
        raise ValueError(f"the operator {text} is of no known library")
    target: Any
    try:
        target = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    except AttributeError as error:
        raise ValueError(f"the operator {text} is not installed") from error
    return target  # type: ignore[no-any-return] # an operator


def _encode(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.fx.Node):
        return {"node": value.name}
    for kind in (tuple, list):
        if isinstance(value, kind):
            return {kind.__name__: [_encode(each) for each in value]}
    if isinstance(value, dict):
        return {"dict": [[key, _encode(each)] for key, each in value.items()]}
    if isinstance(value, slice):
        return {"slice": [_encode(each) for each in (value.start, value.stop, value.step)]}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return {"torch": str(value).removeprefix("torch.")}
    raise UnhashableError(f"a graph with an argument of {type(value).__name__}")


def _decode(value: Any, nodes: Mapping[str, torch.fx.Node]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "node":
        return nodes[content]
    if kind == "dict":
        return {key: _decode(each, nodes) for key, each in content}
    if kind == "torch":
        return getattr(torch, content)
    if kind == "device":
        return torch.device(content)
    parts = [_decode(each, nodes) for each in content]
    if kind == "slice":
        return slice(*parts)
    return tuple(parts) if kind == "tuple" else parts


class _StackKeys(dict[str, str]):
    """Numbers for the keys of module stacks, which are addresses in strict exports."""

    def __missing__(self, key: str) -> str:
        self[key] = f"module_{len(self)}" if key.isdigit() else key
        return self[key]


def _encode_metadata(meta: Mapping[str, Any], keys: _StackKeys) -> dict[str, Any]:
    """Return the metadata that the converter and `localize` read."""
    read: dict[str, Any] = {name: bool(meta[name]) for name in NODE_METADATA if name in meta}
    if "nn_module_stack" in meta:
        stack = meta["nn_module_stack"].items()
        read["nn_module_stack"] = {keys[key]: (path, name_of(kind)) for key, (path, kind) in stack}
    if "source_fn_stack" in meta:
        calls = meta["source_fn_stack"]
        read["source_fn_stack"] = [(name, name_of(source)) for name, source in calls]
    if "torch_fn" in meta:
        read["torch_fn"] = tuple(meta["torch_fn"])
    return {name: _encode(value) for name, value in read.items()}
