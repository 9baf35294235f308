"""The settings of a quantizer as plain text, for baselines."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from pytest_edgeq.litert.pt2e_graphs import is_pt2e_quantizer

_LIBRARIES = ("torch", "torchao", "litert_torch")

_ATOMS = (
    *(bool, int, float, str, enum.Enum, torch.dtype, torch.qscheme, torch.layout),
    *(torch._ops.OpOverload, torch._ops.OpOverloadPacket),
)


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
