"""Pickle objects of users for processes that lack some of their modules."""

from __future__ import annotations

import io
import pickle
import sys
import threading
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any, ParamSpec, TypeVar

import cloudpickle

from pytest_edgeq.versions import loaded_torch


def pickled(
    value: Any, is_lacking: Callable[[ModuleType], bool], *, clones_views: bool = False
) -> bytes:
    """
    Return a pickle that has what the lacking modules define by value, and the rest by name.

    Open files are refused. With `clones_views` a tensor that is a part of a larger one is copied.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream, is_lacking, clones_views=clones_views)
    with _REGISTRY:
        try:
            pickler.dump(value)
        finally:
            for each in pickler.registered:
                cloudpickle.unregister_pickle_by_value(each)
    return stream.getvalue()


# Held while cloudpickle's registry, which all threads share, has the modules of users.
_REGISTRY = threading.RLock()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc, no-any-unimported, unused-ignore] # untyped
    def __init__(
        self, stream: io.BytesIO, is_lacking: Callable[[ModuleType], bool], *, clones_views: bool
    ) -> None:
        super().__init__(stream)
        self._is_lacking, self._clones_views = is_lacking, clones_views
        self.registered: list[ModuleType] = []

    def reducer_override(self, obj: Any) -> Any:
        standard = (sys.stdin, sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
        if isinstance(obj, io.IOBase) and not any(obj is each for each in standard):
            # cloudpickle would send the content of the file as it is now.
            name = getattr(obj, "name", None)
            raise TypeError(f"an open file{'' if name is None else f', {name!r}'}")
        if isinstance(obj, ModuleType):
            self._register(obj.__name__)
        elif isinstance(obj, ParamSpec):  # else by name, as cloudpickle does not know it
            return ParamSpec, (obj.__name__,)
        elif isinstance(obj, (type, FunctionType, TypeVar)):
            self._register(obj.__module__)
        elif self._clones_views and _is_view(obj):
            return obj.detach().clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return super().reducer_override(obj)

    def _register(self, name: str) -> None:
        module = sys.modules.get(name)
        if (
            isinstance(module, ModuleType)
            and module.__name__ == name
            # cloudpickle sends all of `__main__` by value.
            and name.partition(".")[0] not in ("pytest_edgeq", "__main__", "__mp_main__")
            and name not in cloudpickle.list_registry_pickle_by_value()
            and self._is_lacking(module)
        ):
            cloudpickle.register_pickle_by_value(module)
            self.registered.append(module)


def _is_view(value: Any) -> bool:
    """Whether it is a tensor that is a part of a larger one, all of which torch would pickle."""
    torch = loaded_torch()
    if torch is None or not isinstance(value, torch.Tensor):
        return False
    if value.is_sparse or value.is_quantized:
        return False
    return bool(value.untyped_storage().nbytes() > value.nbytes)
