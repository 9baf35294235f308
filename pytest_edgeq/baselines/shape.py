"""
Check the shape of plain data read from a file.

A shape is a type; a check with a name (`ShapeCheck`); a list `[shape]` of any number of items; or a
dict of shapes by key, where a key that ends in `?` is optional and the key `*` matches any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

_NAMES = {str: "a text", int: "a whole number", dict: "an object", list: "a list"}


class ShapeCheck(NamedTuple):
    """A test of one value, and the name of the values that pass it."""

    passes: Callable[[Any], bool]
    name: str


def is_number(value: Any) -> bool:
    """Whether a value is a number that float64 holds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


TEXT_OR_NULL = ShapeCheck(lambda value: value is None or isinstance(value, str), "a text or null")


def shape_problem(value: Any, shape: Any, where: str) -> str:
    """Return the first violation of a shape by a value, with its place; else ""."""
    if isinstance(shape, ShapeCheck):
        return "" if shape.passes(value) else f"{where} is not {shape.name}"
    kind: Any = shape if isinstance(shape, type) else type(shape)
    # Exactly this type: to Python, True is a whole number.
    if not isinstance(value, kind) or isinstance(value, bool):
        return f"{where} is not {_NAMES[kind]}"
    if isinstance(shape, list):
        items = [(f"{where}[{index}]", each, shape[0]) for index, each in enumerate(value)]
    elif isinstance(shape, dict):
        needed = [key for key in shape if key != "*" and not key.endswith("?")]
        if missing := [key for key in needed if key not in value]:
            return f"{where} lacks {', '.join(missing)}"
        found = {key: shape.get(key, shape.get(f"{key}?", shape.get("*"))) for key in value}
        items = [(f"{where}.{key}", value[key], each) for key, each in found.items() if each]
    else:
        return ""
    return next(filter(None, (shape_problem(each, of, at) for at, each, of in items)), "")
