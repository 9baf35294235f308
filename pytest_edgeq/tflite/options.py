"""The option table of an op."""

from __future__ import annotations

from typing import Any

from pytest_edgeq.tflite.flatbuffer import enum_names
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.subgraph import Op


def op_options(graph: OpGraph, op: Op) -> Any:
    """Return the options of an op, as the schema's class reads them; None where it has none."""
    from ai_edge_litert import schema_py_generated as schema

    operator = graph.operator(op)
    kind = enum_names("BuiltinOptions").get(operator.BuiltinOptionsType(), "NONE")
    table = operator.BuiltinOptions()
    if table is None or kind == "NONE":
        return None
    options = getattr(schema, kind)()
    options.Init(table.Bytes, table.Pos)
    return options
