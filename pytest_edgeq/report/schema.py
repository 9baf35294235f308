"""Hold plain data against a JSON schema, as far as `run.schema.json` uses the language."""

from __future__ import annotations

import base64
import binascii
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any


def _is_number(value: Any, *kinds: type) -> bool:
    """Whether a value is a number that fits into a float, as every view takes it."""
    is_one = isinstance(value, kinds) and not isinstance(value, bool)
    return is_one and abs(value) <= sys.float_info.max


_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "array": lambda value: isinstance(value, list),
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: _is_number(value, int),
    "null": lambda value: value is None,
    "number": lambda value: _is_number(value, int, float),
    "object": lambda value: isinstance(value, dict),
    "string": lambda value: isinstance(value, str),
}

_SHOWN = 60
"""Characters of a wrong value."""


def schema_problem(data: Any, schema: Mapping[str, Any]) -> str:
    """
    Say where data are not what a schema asks for: the first place, what it expects, what it got.

    Returns:
        One clause; empty where the data are of the schema.
    """
    return next(_problems(data, schema, schema, "the record"), "")


def _problems(
    value: Any, schema: Mapping[str, Any], root: Mapping[str, Any], where: str
) -> Iterator[str]:
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].removeprefix("#/$defs/")]
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_TYPES[kind](value) for kind in kinds):
        yield f"{where}: expected {' or '.join(kinds)}, got {_shown(value)}"
        return
    if "const" in schema and value != schema["const"]:
        yield f"{where}: expected {schema['const']!r}, got {_shown(value)}"
    if "enum" in schema and not any(value == each for each in schema["enum"]):
        yield f"{where}: expected one of {schema['enum']}, got {_shown(value)}"
    if "minimum" in schema and not value >= schema["minimum"]:
        yield f"{where}: expected at least {schema['minimum']}, got {_shown(value)}"
    if isinstance(value, str):
        if "pattern" in schema and not re.search(schema["pattern"], value):
            yield f"{where}: expected a text like {schema['pattern']}, got {_shown(value)}"
        if schema.get("contentEncoding") == "base64" and not _is_base64(value):
            yield f"{where}: expected base64, got {_shown(value)}"
    if "anyOf" in schema:
        tried = [next(_problems(value, each, root, where), "") for each in schema["anyOf"]]
        if all(tried):
            yield tried[0]
    for each in schema.get("allOf", ()):
        yield from _problems(value, each, root, where)
    if isinstance(value, dict):
        yield from _of_object(value, schema, root, where)
    elif isinstance(value, list) and "items" in schema:
        for index, each in enumerate(value):
            yield from _problems(each, schema["items"], root, f"{where}[{index}]")


def _of_object(
    value: dict[str, Any], schema: Mapping[str, Any], root: Mapping[str, Any], where: str
) -> Iterator[str]:
    missing = [key for key in schema.get("required", ()) if key not in value]
    if missing:
        yield f"{where} lacks {', '.join(missing)}"
    known = schema.get("properties", {})
    others = schema.get("additionalProperties")
    for key, each in value.items():
        place = f"{where}.{key[:_SHOWN]}"
        if "propertyNames" in schema:
            yield from _problems(key, schema["propertyNames"], root, place)
        if key in known:
            yield from _problems(each, known[key], root, place)
        elif others:
            yield from _problems(each, others, root, place)


def _is_base64(text: str) -> bool:
    try:
        base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return False
    return True


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
