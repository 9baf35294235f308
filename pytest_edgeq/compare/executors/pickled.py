"""
Pickle objects of users for processes that lack their source code.

Functions, classes and type variables of modules that belong to no installed distribution, such as a
test module, are pickled by value; all others by their name.
"""

from __future__ import annotations

import io
import os
import pickle
import site
import sys
import sysconfig
import threading
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, ParamSpec, TypeVar

import cloudpickle
import numpy as np

from pytest_edgeq.compare.samples import is_tensor


class CannotSendError(TypeError):
    """A user's object cannot be sent to another process."""


_MOST_SHOWN = 60  # characters of what Python says of an object that cannot be pickled


def pickled(value: Any, what: str, fix: str, *, clones_views: bool = False) -> bytes:
    """Return the pickle of a user's object, or raise a CannotSendError."""
    stream = io.BytesIO()
    pickler = _Pickler(stream, clones_views=clones_views)
    try:
        with _REGISTRY:
            try:
                pickler.dump(value)
            finally:
                for each in pickler.registered:
                    cloudpickle.unregister_pickle_by_value(each)
    except Exception as error:  # of whatever the object holds
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise CannotSendError(
            f"executor: {what} cannot be sent to a worker: {first[:_MOST_SHOWN]}\nfix: {fix}"
        ) from error
    return stream.getvalue()


# Held while cloudpickle's registry, which all threads share, has the modules of users.
_REGISTRY = threading.RLock()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc, no-any-unimported, unused-ignore] # untyped
    """Pickles what users' modules define by value, and refuses open files."""

    def __init__(self, stream: io.BytesIO, *, clones_views: bool) -> None:
        super().__init__(stream)
        self._clones_views = clones_views
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
        """Have cloudpickle send by value what a user's module defines."""
        module = sys.modules.get(name)
        path = getattr(module, "__file__", None)
        if (
            isinstance(module, ModuleType)
            and isinstance(path, str)
            and _is_users(name, path)
            and module.__name__ == name
            and name not in cloudpickle.list_registry_pickle_by_value()
        ):
            cloudpickle.register_pickle_by_value(module)
            self.registered.append(module)


def _is_view(value: Any) -> bool:
    """Whether it is a tensor that is a part of a larger one, all of which torch would pickle."""
    if not is_tensor(value) or isinstance(value, np.ndarray):
        return False
    if value.is_sparse or value.is_quantized:
        return False
    return bool(value.untyped_storage().nbytes() > value.nbytes)


@cache
def _is_users(name: str, path: str) -> bool:
    """Whether a module comes of a working tree, and not of an installation."""
    if not path or name.partition(".")[0] in ("pytest_edgeq", "__main__", "__mp_main__"):
        return False
    return not path.startswith(_installations())


@cache
def _installations() -> tuple[str, ...]:
    """Return the directories in which installed packages and the standard library lie."""
    paths = {sysconfig.get_paths()[each] for each in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths |= {*site.getsitepackages(), site.getusersitepackages()}
    # Environments below this one: `uv run --with` adds theirs by a .pth file.
    paths |= {each for each in sys.path if Path(each).name in ("site-packages", "dist-packages")}
    return tuple({f"{Path(each)}{os.sep}" for each in paths | set(map(os.path.realpath, paths))})
