"""
Node data for Model Explorer: measurements of each op, shown on the file's graph.

The format is that of `model_explorer.node_data_builder` of ai-edge-model-explorer: a document for
each figure, with a value for each node by graph and node
(https://github.com/google-ai-edge/model-explorer/wiki/2.-User-Guide).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_edgeq.report.whole_files import write_json

if TYPE_CHECKING:
    from pytest_edgeq.runtimes.edge import EdgeFile
    from pytest_edgeq.tflite.graph import OpGraph
    from pytest_edgeq.tflite.op_dtypes import OpDtypes
    from pytest_edgeq.tflite.subgraph import Subgraph

Layers = Mapping[int, Mapping[str, Any]]
"""By subgraph: `LayerErrors.to_dict()`, as the record of a run has it, too."""

_GOOD, _FAIR, _BAD, _UNKNOWN = "#81c995", "#fde293", "#f28b82", "#dadce0"

_VERDICTS = {"sound": _GOOD, "quantization": _FAIR, "lowering": _BAD, "unmatched": _UNKNOWN}

_SCHEMES = {
    "float": _BAD,
    "float16": _FAIR,
    "dynamic": _FAIR,
    "weight_only": _FAIR,
    "integer": _UNKNOWN,
}
"""Colours of schemes; of all others every operand is quantized."""


def write_node_data(edge: EdgeFile, directory: Path, layers: Layers | None = None) -> list[Path]:
    """Write the node data of a file, a document for each figure, and return their paths."""
    documents = {directory / f"{name}.json": each for name, each in node_data(edge, layers).items()}
    for path, graphs in documents.items():
        write_json(path, graphs, indent=1)
    return list(documents)


def node_data(edge: EdgeFile, layers: Layers | None = None) -> dict[str, dict[str, Any]]:
    """Return the node data of a file by figure."""
    figures: dict[str, dict[str, Any]] = {}

    def add(
        figure: str, graph: str, name: str, results: Mapping[str, Any], **looks: object
    ) -> None:
        if results:
            data = {"name": name, "results": results, **looks}
            # Graphs of one name are one to Model Explorer: the first one keeps it.
            figures.setdefault(figure, {}).setdefault(graph, data)

    for subgraph, graph in zip(edge.graph.subgraphs, graph_ids(edge.graph), strict=True):
        keys = node_keys(subgraph)
        entries = [(keys[e.index], e) for e in edge.op_dtypes if e.subgraph == subgraph.index]
        words = {"showExpandedSummaryOnGroupNode": True}
        dtypes = {key: {"value": _dtypes(entry)} for key, entry in entries}
        add("dtypes", graph, "dtypes", dtypes, **words)
        schemes = {key: _coloured(e.scheme, _SCHEMES.get(e.scheme, _GOOD)) for key, e in entries}
        add("scheme", graph, "scheme", schemes, **words)
        measured = (layers or {}).get(subgraph.index)
        if measured is None:
            continue
        rows = [(keys[row["index"]], row) for row in measured["rows"]]
        verdicts = {key: _coloured(row["verdict"], _VERDICTS[row["verdict"]]) for key, row in rows}
        add("verdict", graph, "verdict", verdicts, **words)
        sqnr = _numbers(((key, row["local_sqnr_db"]) for key, row in rows), exact="inf")
        add("local_sqnr_db", graph, "local SQNR (dB)", sqnr, gradient=_gradient(_BAD, _GOOD))
        lsb = _numbers((key, row["local_lsb_error"]) for key, row in rows)
        add("local_lsb_error", graph, "local error (LSB)", lsb, gradient=_gradient(_GOOD, _BAD))
    return figures


def graph_ids(graph: OpGraph) -> list[str]:
    """Return Model Explorer's id of each subgraph: its name, else that of its signature."""
    keys: dict[int, str] = {}
    for signature in graph.signatures:
        if signature.key:
            keys.setdefault(signature.subgraph, signature.key)
    return [
        each.name or keys.get(each.index) or (f"subgraph_{each.index}" if each.index else "main")
        for each in graph.subgraphs
    ]


def node_keys(subgraph: Subgraph) -> list[str]:
    """
    Return the key of each op's node: its index.

    A key is looked up among the names of tensors first, which are numbers in files made from ONNX.
    Where a tensor has the op's index for a name, the key is the name of one of the op's outputs.
    """
    names = Counter(tensor.name for tensor in subgraph.tensors)
    keys = []
    for op in subgraph.ops:
        outputs = (subgraph.tensors[index].name for index in op.outputs if index >= 0)
        own = [name for name in outputs if names[name] == 1]
        keys.append(own[0] if str(op.index) in names and own else str(op.index))
    return keys


def _dtypes(entry: OpDtypes) -> str:
    taken = " × ".join([", ".join(entry.inputs), *([entry.weight] if entry.weight else [])])
    return f"{taken} → {', '.join(entry.outputs)}"


def _coloured(value: float | str, colour: str) -> dict[str, Any]:
    return {"value": value, "bgColor": colour}


def _gradient(least: str, greatest: str) -> list[dict[str, Any]]:
    return [{"stop": 0, "bgColor": least}, {"stop": 1, "bgColor": greatest}]


def _numbers(
    values: Iterable[tuple[str, float | str | None]], exact: str = ""
) -> dict[str, dict[str, Any]]:
    """Return results of numbers; those that JSON lacks are text."""
    # Text has no place in the gradient. A node shows every digit of a number.
    return {
        key: _coloured(value, _GOOD if value == exact else _BAD)
        if isinstance(value, str)
        else {"value": float(f"{value:.4g}")}
        for key, value in values
        if value is not None
    }
