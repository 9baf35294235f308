"""Options of an op."""

from __future__ import annotations

from typing import Any

from pytest_edgeq.tflite.flatbuffer import enum_names
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.subgraph import Op


def op_option(graph: OpGraph, op: Op, field: str, default: Any) -> Any:
    """Return an option of an op, or the default if it has none."""
    from ai_edge_litert import schema_py_generated as schema

    operator = graph.operator(op)
    kind = enum_names("BuiltinOptions").get(operator.BuiltinOptionsType(), "NONE")
    table, reader = operator.BuiltinOptions(), getattr(schema, kind, None)
    if table is None or reader is None or not hasattr(reader, field):
        return default
    options = reader()
    options.Init(table.Bytes, table.Pos)
    return getattr(options, field)()
