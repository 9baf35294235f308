"""Damage to a JSON document, drawn from a seed: other types, missing keys, wrong numbers."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

from tests.faults.mutations import mutate_bytes

_HUGE = 10**400
"""A whole number of JSON that no float holds."""

_DEEP = b'"<lists in one another>"'
_DEPTH = 3000


def mutate_json(content: bytes, dice: random.Random) -> tuple[bytes, str]:
    """Return the document with one to three mutations of its bytes or of its values."""
    if dice.random() < 0.3:
        return mutate_bytes(content, dice)
    value, told = mutate_value(json.loads(content), dice)
    return dump(value), told


def dump(value: Any) -> bytes:
    """Return plain data as JSON; Python's own writer ends at a thousand lists in one another."""
    deep = b"[" * _DEPTH + b"]" * _DEPTH
    return json.dumps(value).encode("utf-8", "backslashreplace").replace(_DEEP, deep)


def mutate_value(value: Any, dice: random.Random) -> tuple[Any, str]:
    """Return a copy of plain data with one to three places changed."""
    holder = {"": copy.deepcopy(value)}
    told = []
    for _ in range(dice.choice((1, 1, 2, 3))):
        places = list(_places(holder))
        if not places:
            break
        path, parent, key = dice.choice(places)
        told.append(f"{path}: {_mutate(parent, key, dice)}")
    return holder.get(""), "; ".join(told)


def _places(value: Any, path: str = "$") -> Iterator[tuple[str, Any, Any]]:
    """Every member of every object and list: its path, what it is in, its key there."""
    if isinstance(value, dict | list):
        members = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in list(members):
            where = f"{path}.{key}" if key != "" else path
            yield where, value, key
            yield from _places(each, where)


def _mutate(parent: Any, key: Any, dice: random.Random) -> str:
    kind = dice.choice(("replace", "replace", "replace", "drop", "double", "rename", "wrap"))
    if kind == "drop":
        del parent[key]
    elif kind == "double" and isinstance(parent, list):
        parent.insert(key, copy.deepcopy(parent[key]))
    elif kind == "rename" and isinstance(parent, dict) and key:
        parent[dice.choice((f"{key}x", key.upper(), "", "\ud800"))] = parent.pop(key)
    elif kind == "wrap":
        parent[key] = [parent[key]] if dice.random() < 0.5 else {"value": parent[key]}
    else:
        parent[key] = _other(parent[key], dice)
        return f"{kind} by {parent[key]!r:.30}"
    return kind


def _other(value: Any, dice: random.Random) -> Any:
    """Return a value of any type."""
    choices: list[Any] = [
        *(None, True, False, 0, 1, -1, 2**31, 2**63, -(2**63), _HUGE, -_HUGE, 1e308, 5e-324),
        *(float("nan"), float("inf"), -float("inf"), -0.5, "", "x", "nan", "\ud800", "\0", "1"),
        *([], {}, [None], [[1]], [{}], {"a": []}, "x" * 10_000, "9" * 5000, [0] * 1000),
        [[[[[]]]]],
        _DEEP.decode().strip('"'),
    ]
    if isinstance(value, int | float) and not isinstance(value, bool):
        choices += [value + 1, -value, value * 1000, str(value)]
    return dice.choice(choices)
