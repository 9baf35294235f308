"""The op-dtype map, with what localizing measured of each op."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from pytest_edgeq.report.html.stages import decibels
from pytest_edgeq.report.model_rows import number_of


@dataclasses.dataclass(frozen=True)
class OpRow:
    """
    One op.

    Attributes:
        index: In its subgraph.
        data: The op in the record.
        local_db: SQNR of the op by itself; None where it was not measured.
        local: The same as text.
        verdict: Of localizing; empty where it was not localized.
    """

    index: int
    data: Mapping[str, Any]
    local_db: float | None = None
    local: str = "–"
    verdict: str = ""


def op_rows(ops: Sequence[Mapping[str, Any]], layers: Mapping[str, Any] | None) -> list[OpRow]:
    """Return the ops in the order of the map."""
    subgraphs: dict[int, list[OpRow]] = defaultdict(list)
    for op in ops:
        rows = subgraphs[op["subgraph"]]
        rows.append(OpRow(len(rows), op))
    if layers is not None:
        for number, rows in subgraphs.items():
            measured = {row["index"]: row for row in layers["rows"]}
            if {row.index: row.data["op"] for row in rows} == {
                index: row["op"] for index, row in measured.items()
            }:
                subgraphs[number] = [_with_errors(row, measured[row.index]) for row in rows]
                break
    return [row for rows in subgraphs.values() for row in rows]


def _with_errors(row: OpRow, measured: Mapping[str, Any]) -> OpRow:
    local = number_of(measured["local_sqnr_db"])
    return dataclasses.replace(
        row, local_db=local, local=decibels(local), verdict=measured["verdict"]
    )
