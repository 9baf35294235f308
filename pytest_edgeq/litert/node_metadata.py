"""The metadata of a torch graph's nodes, as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pytest_edgeq.litert.configs import NODE_METADATA, name_of


class StackKeys(dict[str, str]):
    """Numbers for the keys of module stacks, which are addresses in strict exports."""

    def __missing__(self, key: str) -> str:
        self[key] = f"module_{len(self)}" if key.isdigit() else key
        return self[key]


def encode_metadata(meta: Mapping[str, Any], keys: StackKeys) -> dict[str, Any]:
    """Return the metadata that the converter and `localize` read."""
    encoded: dict[str, Any] = {}
    if "nn_module_stack" in meta:
        encoded["nn_module_stack"] = [
            [keys[key], path, name_of(kind)]
            for key, (path, kind) in meta["nn_module_stack"].items()
        ]
    if "source_fn_stack" in meta:
        stack = meta["source_fn_stack"]
        encoded["source_fn_stack"] = [[name, name_of(source)] for name, source in stack]
    if "torch_fn" in meta:
        encoded["torch_fn"] = list(meta["torch_fn"])
    value = _encode_value(meta["val"]) if "val" in meta else None
    if value is not None:
        encoded["val"] = value
    encoded |= {name: bool(meta[name]) for name in NODE_METADATA if name in meta}
    return encoded


def _encode_value(value: Any) -> Any:
    """Encode the shapes of a node's results; None for sizes and symbolic shapes."""
    if value is None:
        return {"none": []}
    if isinstance(value, (list, tuple)):
        values = [_encode_value(each) for each in value]
        return None if None in values else {type(value).__name__: values}
    if isinstance(value, torch.Tensor) and all(type(n) is int for n in value.shape):
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": [dtype, list(value.shape), list(value.stride())]}
    return None


class Formats:
    """Fake tensors, shared by nodes with equal dtype, shape and strides."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode()
        self._made: dict[str, torch.Tensor] = {}

    def tensor(self, encoded: Sequence[Any]) -> torch.Tensor:
        """Return the fake tensor of a dtype's name, a shape and strides."""
        key = repr(encoded)
        if key not in self._made:
            dtype, shape, stride = encoded
            with self._mode:
                self._made[key] = torch.empty_strided(shape, stride, dtype=getattr(torch, dtype))
        return self._made[key]


def _decode_value(encoded: Mapping[str, Any], formats: Formats) -> Any:
    ((kind, content),) = encoded.items()
    if kind == "tensor":
        return formats.tensor(content)
    if kind == "none":
        return None
    values = [_decode_value(each, formats) for each in content]
    return values if kind == "list" else tuple(values)


def decode_metadata(encoded: Mapping[str, Any], formats: Formats) -> dict[str, Any]:
    """Return the metadata that `encode_metadata` has written."""
    meta: dict[str, Any] = {}
    if "nn_module_stack" in encoded:
        meta["nn_module_stack"] = {
            key: (path, kind) for key, path, kind in encoded["nn_module_stack"]
        }
    if "source_fn_stack" in encoded:
        meta["source_fn_stack"] = [tuple(each) for each in encoded["source_fn_stack"]]
    if "torch_fn" in encoded:
        meta["torch_fn"] = tuple(encoded["torch_fn"])
    if "val" in encoded:
        meta["val"] = _decode_value(encoded["val"], formats)
    meta |= {name: encoded[name] for name in NODE_METADATA if name in encoded}
    return meta
