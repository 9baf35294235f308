"""Save the Python state that a model reaches, and restore it after the export for a key."""

from __future__ import annotations

import collections
import functools
import itertools
import os
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator, Mapping
from operator import is_
from typing import Any

import torch

from pytest_edgeq.cache.code_objects import code_digest, is_filled, writes_globals

_PLAIN = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, type(Ellipsis)),
        *(torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, torch.dtype, torch.device),
        *(types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType),
    }
)
"""Types of values that a graph tells in full, or that are told where they are called."""

_CONTAINERS = frozenset(
    {
        *(list, dict, set, collections.deque),
        *(collections.OrderedDict, collections.defaultdict, collections.Counter),
    }
)
"""Containers whose elements can be put back."""

_ITERATED = _CONTAINERS | {tuple, frozenset, torch.Size}

_SETS = (set, frozenset)

_CACHED = type(functools.lru_cache(len))

_LIBRARIES = frozenset({"torch", "pytest_edgeq", *sys.stdlib_module_names})
"""Packages that are not looked into wherever they lie."""

_INSTALLED = tuple({sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib")})


class ModelState:
    """
    The state of a model before a call, to be restored after it.

    Where a forward counts its calls, or keeps a table that it has computed, the export for the key
    would leave a changed model to the export that makes the graph, with a `FakeTensor` as its
    table.

    Objects, classes and functions are looked into that a project defines, or a package that the
    model's classes come from: an object of another one may hold anything, as pytest's fixtures do.

    Attributes:
        types: Where values are that are no plain data, and their types: of two types that compute
            the same, strict export may read one and refuse the other.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.types: set[tuple[str, str]] = set()
        self._kept: list[_Kept] = []
        self._seen: dict[int, Any] = {}
        self._caches: list[tuple[Any, int]] = []
        self._looks = {name: False for name in _LIBRARIES}
        for module in model.modules():
            self._looks.setdefault(_package_of(type(module)), True)
        for name, module in model.named_modules():
            self._look(name, module)
            for kind in type(module).__mro__:
                self._look(f"{kind.__module__}.{kind.__qualname__}", kind)

    def enter(self, frame: types.FrameType) -> None:
        """Keep what a function can reach that is about to run."""
        code, variables = frame.f_code, frame.f_globals
        where = f"{variables.get('__name__')}.{code.co_name}"
        if writes_globals(code):
            self._kept.append(_Variables(variables, code.co_names))
        for name in code.co_names:
            if name in variables:
                self._look_at_global(f"{where} {name}", variables[name], code.co_names)
        if code.co_freevars:
            values = frame.f_locals
            for name in code.co_freevars:
                if name in values:
                    self._look(f"{where} {name}", values[name])

    def restore(self) -> None:
        """Put back what has changed."""
        for kept in self._kept:
            kept.restore()
        for function, misses in self._caches:
            if function.cache_info().misses != misses:
                function.cache_clear()

    def _look_at_global(self, place: str, value: Any, names: Iterable[str]) -> None:
        if not isinstance(value, types.ModuleType):
            self._look(place, value)
        elif self._looks_into(value.__name__):
            found = {name: vars(value)[name] for name in names if name in vars(value)}
            self._kept.append(_Attributes(value, found))
            for name, each in found.items():
                if not isinstance(each, types.ModuleType):
                    self._look(f"{place}.{name}", each)

    def _looks_into(self, module: Any) -> bool:
        package = str(module).partition(".")[0]
        if package not in self._looks:
            self._looks[package] = _is_a_projects(package)
        return self._looks[package]

    def _look(self, place: str, value: Any) -> None:
        """Keep a value, and what it holds."""
        pending = [(place, value)]
        while pending:
            place, value = pending.pop()
            if type(value) in _PLAIN or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            pending.extend(self._parts(place, value))

    def _parts(self, place: str, value: Any) -> Iterator[tuple[str, Any]]:
        kind = type(value)
        if kind is dict and "__builtins__" in value:
            pass  # the variables of a module
        elif kind in _ITERATED:
            if kind in _CONTAINERS:
                self._kept.append(_Elements(value))
            is_dict = isinstance(value, dict)
            for key, part in list(value.items() if is_dict else enumerate(value)):
                # The order of a set, and the numbers of hooks, differ between processes.
                is_named = isinstance(key, str) if is_dict else not isinstance(value, _SETS)
                yield (f"{place}.{key}" if is_named else place), part
        elif kind is _CACHED:
            self._caches.append((value, value.cache_info().misses))
            yield place, value.__wrapped__
            if isinstance(value.__wrapped__, types.FunctionType):
                # A result that is cached does not tell it, and strict export looks into it.
                self.types.add((place, code_digest(value.__wrapped__.__code__)))
        elif isinstance(value, types.MethodType):
            yield place, value.__self__
        elif isinstance(value, functools.partial):
            yield from ((place, part) for part in (*value.args, *value.keywords.values()))
        elif isinstance(value, types.FunctionType):
            if not self._looks_into(value.__globals__.get("__name__")):
                return
            cells = [cell for cell in value.__closure__ or () if is_filled(cell)]
            self._kept += map(_Cell, cells)
            yield from ((f"{place} {i}", cell.cell_contents) for i, cell in enumerate(cells))
            defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
            yield from ((f"{place} {i}", part) for i, part in enumerate(defaults))
        elif isinstance(value, (classmethod, staticmethod)):
            yield place, value.__func__
        elif isinstance(value, property):
            yield place, value.fget
        elif isinstance(value, types.ModuleType):
            pass  # looked into for the names that a function reads
        elif isinstance(value, type):
            if self._looks_into(value.__module__):
                found = {n: v for n, v in vars(value).items() if not n.startswith("__")}
                self._kept.append(_Attributes(value, found))
                yield from ((f"{place}.{name}", part) for name, part in found.items())
        else:
            is_module = isinstance(value, torch.nn.Module)
            if not is_module:
                self.types.add((place, f"{kind.__module__}.{kind.__qualname__}"))
            if is_module or self._looks_into(kind.__module__):
                yield from self._attributes(place, value)

    def _attributes(self, place: str, value: Any) -> Iterator[tuple[str, Any]]:
        state = getattr(value, "__dict__", None)
        if type(state) is dict:
            self._kept.append(_Elements(state))
            yield from ((f"{place}.{name}", part) for name, part in list(state.items()))
        for kind in type(value).__mro__:
            for name, slot in vars(kind).items():
                if isinstance(slot, types.MemberDescriptorType) and hasattr(value, name):
                    yield f"{place}.{name}", getattr(value, name)


class _Kept:
    """The saved state of one object."""

    def restore(self) -> None:
        """Restore the object if it has changed."""
        raise NotImplementedError


class _Elements(_Kept):
    """The elements of a container."""

    def __init__(self, container: Any) -> None:
        self._container = container
        self._elements = self._read()

    def _read(self) -> list[Any]:
        each = self._container
        return list(itertools.chain.from_iterable(each.items()) if isinstance(each, dict) else each)

    def restore(self) -> None:
        now, before, container = self._read(), self._elements, self._container
        if isinstance(container, set):
            now, before = sorted(now, key=id), sorted(before, key=id)
        if len(now) == len(before) and all(map(is_, now, before)):
            return
        container.clear()
        if isinstance(container, dict):
            container.update(zip(before[::2], before[1::2], strict=True))
        elif isinstance(container, set):
            container.update(before)
        else:
            container.extend(before)


class _Attributes(_Kept):
    """Attributes of a class or a module of Python."""

    def __init__(self, holder: Any, values: Mapping[str, Any]) -> None:
        self._holder = holder
        self._values = values

    def restore(self) -> None:
        for name, value in self._values.items():
            if vars(self._holder).get(name, self) is not value:
                setattr(self._holder, name, value)


class _Variables(_Kept):
    """Global variables, of which some may not exist."""

    def __init__(self, variables: dict[str, Any], names: Iterable[str]) -> None:
        self._variables = variables
        self._missing = [name for name in names if name not in variables]
        self._values = {name: variables[name] for name in names if name in variables}

    def restore(self) -> None:
        self._variables.update(self._values)
        for name in self._missing:
            self._variables.pop(name, None)


class _Cell(_Kept):
    """A variable of an enclosing function."""

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell
        self._content = cell.cell_contents

    def restore(self) -> None:
        self._cell.cell_contents = self._content


def _package_of(kind: type) -> str:
    return str(kind.__module__).partition(".")[0]


def _is_a_projects(package: str) -> bool:
    """Whether a package lies elsewhere than installed ones do."""
    module = sys.modules.get(package)
    places = [*getattr(module, "__path__", ()), getattr(module, "__file__", None) or ""]
    return not any(place.startswith(_INSTALLED) for place in places)
