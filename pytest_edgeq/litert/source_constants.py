"""The constants that a module's source sets."""

from __future__ import annotations

import ast
import functools
import gc
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any


@functools.cache
def constants_of_source(file: Path) -> Mapping[tuple[str, str], Any]:
    """
    Return literals that a module's body, or that of a class in it, gives to a name.

    Names that the module's code sets in a second place are left out, and so are empty collections,
    which it fills.
    """
    source = file.read_bytes()
    rebound = {name for names in _GLOBALS.findall(source) for name in names.decode().split(", ")}
    found = {}
    for kind, body in _bodies(_parsed(source)):
        stored = Counter(_stored(body))
        for statement in body:
            name, value = _assigned(statement)
            if name is None or value is None or name.startswith("__"):
                continue
            if stored[name] == 1 and name not in rebound and _is_literal(value):
                found[kind, name] = ast.literal_eval(value)
    return found


def _parsed(source: bytes) -> ast.Module:
    """
    Return the syntax tree of a module.

    With torch and the converter loaded, the garbage collector takes CPython 3.11 two thirds of the
    time that parsing takes, and finds nothing.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        if collects:
            gc.enable()


_GLOBALS = re.compile(rb"^\s+global ([\w, ]+)", re.MULTILINE)


def _bodies(tree: ast.Module) -> Iterator[tuple[str, list[ast.stmt]]]:
    """Enumerations and named tuples make something else of what their bodies set."""
    yield "", tree.body
    for statement in tree.body:
        if isinstance(statement, ast.ClassDef):
            bases = " ".join(map(ast.unparse, statement.bases))
            if not any(each in bases for each in ("Enum", "Flag", "NamedTuple")):
                yield statement.name, statement.body


def _stored(body: Iterable[ast.stmt]) -> Iterator[str]:
    """Names that statements set, or set a part of; those of functions inside are theirs."""
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield statement.name
            continue
        targets = getattr(statement, "targets", [getattr(statement, "target", None)])
        for target in filter(None, targets):
            yield from (node.id for node in ast.walk(target) if isinstance(node, ast.Name))
        for handler in getattr(statement, "handlers", ()):
            yield from _stored(handler.body)
        for block in ("body", "orelse", "finalbody"):
            yield from _stored(getattr(statement, block, ()))


def _assigned(statement: ast.stmt) -> tuple[str | None, ast.expr | None]:
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            return name, value
        case ast.AnnAssign(target=ast.Name(id=name), value=value):
            return name, value
    return None, None


def _is_literal(value: ast.expr) -> bool:
    """Whether `ast.literal_eval` takes it, and it is no empty collection."""
    match value:
        case ast.Constant():
            return True
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant()):
            return True
        case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
            return bool(parts) and all(map(_is_literal, parts))
        case ast.Dict(keys=keys, values=values):
            return (
                bool(keys)
                and all(key and _is_literal(key) for key in keys)
                and all(map(_is_literal, values))
            )
    return False
