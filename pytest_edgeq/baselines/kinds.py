"""
The kinds of data that are remembered, and what each needs to be stored and told.

A new kind is one more entry of KINDS: its title, a check of its shape, a summary for the first
time that it is seen, and the text of a change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from pytest_edgeq.baselines import errors
from pytest_edgeq.baselines.op_changes import describe_change
from pytest_edgeq.numerics.findings import Finding


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of remembered data."""

    title: str  # what messages call it
    depends_on: tuple[str, ...]  # what may have changed it and is not recorded
    # says what is wrong with data of this kind as it was read; empty if nothing is
    problem: Callable[[Mapping[str, Any]], str]
    summarize: Callable[[Mapping[str, Any]], str]  # what is stored, in one line
    # what differs between stored and measured; None if nothing does
    describe_change: Callable[[dict[str, Any], dict[str, Any]], Finding | None]
    # what is better than was stored, of data that did not change; None for a kind that has no
    # better
    loose: Callable[[dict[str, Any], dict[str, Any]], list[str]] | None = None
    # stored data with what is better in it
    tightened: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]] | None = None
    # what it depends on beside options and versions; see `build.data_changes`
    changes: Callable[[dict[str, Any], dict[str, Any]], dict[str, str | None]] = lambda old, new: {}


_IO_KEYS = ("name", "dtype", "shape")
_OP_KEYS = (
    "subgraph",
    "op",
    "module",
    "inputs",
    "weight",
    "bias",
    "outputs",
    "granularity",
    "scheme",
)


def _op_dtype_map_problem(data: Mapping[str, Any]) -> str:
    for part, keys in (("inputs", _IO_KEYS), ("outputs", _IO_KEYS), ("ops", _OP_KEYS)):
        rows = data.get(part)
        if not isinstance(rows, list):
            return f"data.{part} is not a list" if part in data else f"data.{part} is missing"
        for index, row in enumerate(rows):
            if not isinstance(row, dict):
                return f"data.{part}[{index}] is not an object"
            if missing := [key for key in keys if key not in row]:
                return f"data.{part}[{index}] lacks {', '.join(missing)}"
            # A map of several signatures tells of which each input is.
            for key in (*keys, *(["signature"] if "signature" in row else [])):
                if problem := _field_problem(key, row[key]):
                    return f"data.{part}[{index}].{key} is {problem}"
    return ""


def _field_problem(key: str, value: object) -> str:
    """Say what a field of a row is not, or nothing."""
    if key in ("inputs", "outputs"):
        is_it, wanted = _is_list_of(value, str), "not a list of texts"
    elif key == "shape":
        is_it, wanted = _is_list_of(value, int), "not a list of whole numbers"
    elif key == "subgraph":
        is_it, wanted = type(value) is int, "not a whole number"
    elif key in ("module", "weight", "bias", "granularity", "signature"):
        is_it, wanted = value is None or isinstance(value, str), "neither a text nor null"
    else:
        is_it, wanted = isinstance(value, str), "not a text"
    return "" if is_it else wanted


def _is_list_of(value: object, kind: type) -> bool:
    # Exactly this type: to Python, True is a whole number.
    return isinstance(value, list) and all(type(each) is kind for each in value)


def _summarize_map(data: Mapping[str, Any]) -> str:
    schemes = [row["scheme"] for row in data["ops"]]
    ops = "1 op" if len(schemes) == 1 else f"{len(schemes)} ops"
    return f"{ops}, {schemes.count('float')} of them in float"


KINDS: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        "op_dtype_map": Kind(
            title="op-dtype map",
            depends_on=("the model's code or weights", "its sample inputs"),
            problem=_op_dtype_map_problem,
            summarize=_summarize_map,
            describe_change=describe_change,
        ),
        "errors": Kind(
            title="errors",
            depends_on=("the model's code", "its sample inputs", "the machine"),
            problem=errors.problem,
            summarize=errors.summarize,
            describe_change=errors.describe_change,
            loose=errors.loose,
            tightened=errors.tightened,
            changes=errors.changes,
        ),
    }
)
