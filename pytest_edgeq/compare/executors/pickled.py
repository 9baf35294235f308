"""
Pickle objects of users for processes that lack their source code.

Functions and classes of modules that belong to no installed distribution, such as a test module,
are pickled by value; all others by their name.
"""

from __future__ import annotations

import io
import os
import pickle
import site
import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle
import numpy as np

from pytest_edgeq.compare.samples import is_tensor


class CannotTravelError(TypeError):
    """A user's object cannot be sent to another process."""


_MOST_SHOWN = 60
"""Characters of what Python says of an object that cannot be pickled."""


def pickled(value: Any, what: str, fix: str) -> bytes:
    """
    Return the pickle of a user's object.

    Raises:
        CannotTravelError: It cannot be pickled, or holds an open file.
    """
    try:
        with _by_value():
            return _dumped(_Pickler, value)
    except Exception as error:  # of whatever the object holds
        raise _cannot(what, fix, error) from error


class Pickled:
    """
    An object of the user, pickled once and copied where it is used.

    Raises:
        CannotTravelError: As `pickled` does.
    """

    def __init__(self, value: Any, what: str, fix: str) -> None:
        self._content = pickled(value, what, fix)

    def copy(self) -> Any:
        """Return a new copy of the object."""
        return pickle.loads(self._content)


def packed(item: Any, index: int) -> bytes:
    """
    Return the pickle of a sample, or of a pair of a sample and its label.

    Of a tensor that is a view its own elements travel, not all that it is a view of.

    Raises:
        CannotTravelError: As `pickled` does.
    """
    try:
        try:
            return _dumped(_ItemPickler, item)
        except _UsersOwnError:  # to find the user's modules takes longer than most samples
            with _by_value():
                return _dumped(_LabelPickler, item)
    except Exception as error:  # of whatever a label holds
        fix = "give tensors, arrays, numbers, or objects that can be pickled"
        raise _cannot(f"sample {index}, or its label,", fix, error) from error


def _dumped(pickler: type[_Pickler], value: Any) -> bytes:
    stream = io.BytesIO()
    pickler(stream).dump(value)
    return stream.getvalue()


def _cannot(what: str, fix: str, error: Exception) -> CannotTravelError:
    first = (str(error).splitlines() or [type(error).__name__])[0]
    return CannotTravelError(
        f"executor: {what} cannot travel to a worker: {first[:_MOST_SHOWN]}\nfix: {fix}"
    )


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc, no-any-unimported, unused-ignore] # untyped
    """Refuses open files, of which cloudpickle would send the content as it is now."""

    def reducer_override(self, obj: Any) -> Any:
        standard = (sys.stdin, sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
        if isinstance(obj, io.IOBase) and not any(obj is each for each in standard):
            name = getattr(obj, "name", None)
            raise TypeError(f"an open file{'' if name is None else f', {name!r}'}")
        return super().reducer_override(obj)


class _UsersOwnError(Exception):
    """A pickle would name a class or a function of the user's modules."""


class _LabelPickler(_Pickler):
    """Pickler that stores the elements of a view, not its whole base tensor."""

    def reducer_override(self, obj: Any) -> Any:
        if is_tensor(obj) and not isinstance(obj, np.ndarray) and _is_view(obj):
            return obj.detach().clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return super().reducer_override(obj)


class _ItemPickler(_LabelPickler):
    """Pickler that rejects objects that must be pickled by value."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, FunctionType)):
            path = getattr(sys.modules.get(obj.__module__), "__file__", None)
            if path is not None and _is_users(obj.__module__, path):
                raise _UsersOwnError
        return super().reducer_override(obj)


def _is_view(tensor: Any) -> bool:
    """Whether a tensor is a view, whose whole base tensor torch would pickle."""
    if tensor.is_sparse or tensor.is_quantized:
        return False
    return bool(tensor.untyped_storage().nbytes() > tensor.nbytes)


_REGISTRY = threading.RLock()
"""Held while cloudpickle's registry, which all threads share, has the modules of users."""


@contextmanager
def _by_value() -> Iterator[None]:
    """Pickle functions and classes of a user's modules by value in the body."""
    with _REGISTRY:
        known = set(cloudpickle.list_registry_pickle_by_value())
        added: dict[str, ModuleType] = {}
        for module in list(sys.modules.values()):
            name, path = getattr(module, "__name__", ""), getattr(module, "__file__", None)
            if isinstance(module, ModuleType) and isinstance(path, str) and _is_users(name, path):
                added[name] = module
        added = {
            name: each
            for name, each in added.items()
            if name not in known and sys.modules.get(name) is each
        }
        for each in added.values():
            cloudpickle.register_pickle_by_value(each)
        try:
            yield
        finally:
            for each in added.values():
                cloudpickle.unregister_pickle_by_value(each)


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
    return tuple({f"{Path(each)}{os.sep}" for each in paths | set(map(os.path.realpath, paths))})
