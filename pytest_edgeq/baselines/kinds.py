"""The kinds of baselines, with the functions that validate, summarize and compare each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from pytest_edgeq.baselines import errors
from pytest_edgeq.baselines.op_changes import describe_change
from pytest_edgeq.baselines.shape import TEXT_OR_NULL, shape_problem
from pytest_edgeq.numerics.findings import Finding, counted


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of baseline."""

    title: str  # what messages call it
    depends_on: tuple[str, ...]  # what may have changed it and is not recorded
    # returns why data of this kind is invalid; empty if it is valid
    problem: Callable[[Mapping[str, Any]], str]
    summarize: Callable[[Mapping[str, Any]], str]  # what is stored, in one line
    # what differs between stored and measured; None if nothing does
    describe_change: Callable[[dict[str, Any], dict[str, Any]], Finding | None]
    # better values in unchanged data; None for a kind without an order
    loose: Callable[[dict[str, Any], dict[str, Any]], list[str]] | None = None
    # stored data with what is better in it
    tightened: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]] | None = None
    # its dependencies other than options and versions; see `build.data_changes`
    changes: Callable[[dict[str, Any], dict[str, Any]], dict[str, str | None]] = lambda old, new: {}


_IO = {"name": str, "dtype": str, "shape": [int], "signature?": TEXT_OR_NULL}
_OP = {
    **dict.fromkeys(("op", "scheme"), str),
    **dict.fromkeys(("module", "weight", "bias", "granularity"), TEXT_OR_NULL),
    "inputs": [str],
    "outputs": [str],
    "subgraph": int,
    "delegation?": str,
}
_OP_DTYPE_MAP = {"inputs": [_IO], "outputs": [_IO], "ops": [_OP], "delegation?": str}


def _summarize_map(data: Mapping[str, Any]) -> str:
    schemes = [row["scheme"] for row in data["ops"]]
    return f"{counted(len(schemes), 'op')}, {schemes.count('float')} of them in float"


KINDS: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        "op_dtype_map": Kind(
            title="op-dtype map",
            depends_on=("the model's code or weights", "its sample inputs"),
            problem=lambda data: shape_problem(data, _OP_DTYPE_MAP, "data"),
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
