"""Code objects of Python functions: found in a model, named, and hashed."""

from __future__ import annotations

import dis
import functools
import hashlib
import inspect
import sys
import types
from typing import Any

import torch

from pytest_edgeq.cache.digest import feed


def is_function(code: Any) -> bool:
    """Whether it is neither in C nor the body of a module or a class, which run once."""
    return isinstance(code, types.CodeType) and bool(code.co_flags & inspect.CO_OPTIMIZED)


def methods_of(model: torch.nn.Module) -> set[types.CodeType]:
    """Return the code of every function that the classes and instances of the modules hold."""
    found: set[types.CodeType] = set()
    seen: set[int] = set()
    holders: dict[int, Any] = {}
    for module in model.modules():
        for holder in (module, *type(module).__mro__):
            name = holder.__module__ if isinstance(holder, type) else ""
            if not name.startswith("torch.") and holder is not object:
                holders.setdefault(id(holder), holder)
    open_values = [value for holder in holders.values() for value in vars(holder).values()]
    while open_values:
        value = open_values.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, (staticmethod, classmethod)):
            open_values.append(value.__func__)
        elif isinstance(value, property):
            open_values += [value.fget]
        elif isinstance(value, types.MethodType):
            open_values.append(value.__func__)
        elif isinstance(value, functools.partial):
            open_values += [value.func, *value.args]
        elif isinstance(value, types.FunctionType):
            found.add(value.__code__)
            # A decorator holds what it decorates.
            cells = value.__closure__ or ()
            open_values += [cell.cell_contents for cell in cells if is_filled(cell)]
    return found


def is_filled(cell: types.CellType) -> bool:
    """Whether a variable of an enclosing function has a value."""
    try:
        cell.cell_contents  # noqa: B018 # an empty one raises
    except ValueError:
        return False
    return True


@functools.lru_cache(4096)
def code_digest(code: types.CodeType) -> str:
    """Return a hash of a function's name, bytecode and constants, and of functions inside."""
    hasher = hashlib.sha256()
    _feed_code(hasher, code)
    return hasher.hexdigest()


def _feed_code(hasher: Any, code: types.CodeType) -> None:
    feed(hasher, qualified_name(code))
    feed(hasher, (code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_flags))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            _feed_code(hasher, constant)
        else:
            # Of others, such as Ellipsis, the name.
            known = isinstance(constant, (str, bytes, int, float, complex, tuple, frozenset))
            feed(hasher, constant if known else repr(constant))


def qualified_name(code: types.CodeType) -> str:
    """Return the name of a function, and from Python 3.11 on of those that it is defined in."""
    return code.co_qualname if sys.version_info >= (3, 11) else code.co_name


@functools.lru_cache(4096)
def writes_globals(code: types.CodeType) -> bool:
    """Whether a function sets or deletes a global variable."""
    names = ("STORE_GLOBAL", "DELETE_GLOBAL")
    return any(each.opname in names for each in dis.get_instructions(code))
