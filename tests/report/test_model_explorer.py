"""Node data for Model Explorer: each key is a node of its own graph, each document loads there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fixtures.models import ConvBnRelu, samples, seeded
from fixtures.tflite.writer import FileWriter, pack, unpack
from pytest_edgeq import Edgeq
from pytest_edgeq.report.model_explorer import node_data, write_node_data
from pytest_edgeq.runtimes.edge import EdgeFile

pytestmark = pytest.mark.slow

# The dependency group `slow` has it: 130 MB, for these tests alone.
REASON = "the dependency group slow is not installed: pip install --group slow"


@pytest.fixture(autouse=True)
def _needs_the_package() -> None:
    pytest.importorskip("model_explorer", reason=REASON)


CONVERTED = Path(__file__).parents[2] / "fixtures" / "tflite" / "converted"

Explored = dict[str, dict[str, str]]
"""By graph: the label of each node by its id."""

# In a process of its own: the converter brings TensorFlow's libraries, as others do here.
_CONVERT = """
import json, sys
from model_explorer.builtin_tflite_flatbuffer_adapter import BuiltinTfliteFlatbufferAdapter

adapter = BuiltinTfliteFlatbufferAdapter()
graphs = [
    {
        graph["id"]: {
            "nodes": {node["id"]: node["label"] for node in graph["nodes"]},
            "tensors": {
                attribute["value"]: node["id"]
                for node in graph["nodes"]
                for output in node.get("outputsMetadata", [])
                for attribute in output["attrs"]
                if attribute["key"] == "tensor_name"
            },
        }
        for collection in adapter.convert(path, {})["graphCollections"]
        for graph in reversed(collection.graphs)
    }
    for path in sys.argv[1:]
]
print(json.dumps(graphs))
"""


def explored(*paths: Path) -> list[dict[str, Any]]:
    """Return the graphs that the package itself reads from files, by id."""
    command = [sys.executable, "-c", _CONVERT, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    graphs: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return graphs


def labels(graphs: dict[str, Any], document: dict[str, Any]) -> dict[str, list[str]]:
    """Return the label of the node under each key of node data, as the package looks it up."""
    found = {}
    for graph, data in document.items():
        nodes, tensors = graphs[graph]["nodes"], graphs[graph]["tensors"]
        found[graph] = [nodes[tensors.get(key, key)] for key in data["results"]]
    return found


def loaded(path: Path) -> dict[str, Any]:
    """Load a document by the package, and return what the package makes of it."""
    document = json.loads(path.read_text("utf-8"))
    # Values may be text, which the package's own annotation does not say.
    import dacite
    from model_explorer import config, node_data_builder

    data = dacite.from_dict(
        node_data_builder.ModelNodeData,
        {"graphsData": document},
        dacite.Config(strict=True, check_types=False),
    )
    graphs: dict[str, Any] = json.loads(data.to_json_string())
    assert graphs.keys() == document.keys()
    for key, graph in document.items():
        assert {name: graphs[key][name] for name in graph} == graph
    sources = config().add_node_data_from_path(str(path)).node_data_sources
    assert sources == [str(path)]
    return graphs


def op_labels(edge: EdgeFile) -> list[str]:
    """Return the ops of a file as Model Explorer labels them."""
    return [entry.op.lower() for entry in edge.op_dtypes]


def test_every_key_is_the_node_of_its_op() -> None:
    """In every file that the converter at hand wrote."""
    paths = sorted(CONVERTED.glob("*.tflite"))
    assert len(paths) > 20
    for path, graphs in zip(paths, explored(*paths), strict=True):
        edge = EdgeFile(path)
        figures = node_data(edge)
        assert figures.keys() == {"dtypes", "scheme"}
        for document in figures.values():
            assert labels(graphs, document) == {"main": op_labels(edge)}, path.name


def _chain(file: FileWriter, name: str, ops: tuple[str, ...], names: tuple[str, ...]) -> None:
    graph = file.graph(name)
    tensors = [graph.tensor("float32", name=each) for each in names]
    for op, taken, made in zip(ops, tensors, tensors[1:], strict=False):
        graph.op(op, [taken], [made])
    graph.borders(tensors[:1], tensors[-1:])


def test_subgraphs_without_a_name(tmp_path: Path) -> None:
    """Graphs of a stripped file are named by signature, or numbered."""
    file = FileWriter()
    _chain(file, "", ("RELU", "TANH"), ("", "", ""))
    _chain(file, "", ("NEG",), ("", ""))
    _chain(file, "", ("ABS",), ("", ""))
    file.signature("serve", [("x", 0)], [("y", 1)], 1)
    path = tmp_path / "stripped.tflite"
    path.write_bytes(file.content())
    (graphs,) = explored(path)
    assert labels(graphs, node_data(EdgeFile(path))["scheme"]) == {
        "main": ["relu", "tanh"],
        "serve": ["neg"],
        "subgraph_2": ["abs"],
    }


def test_subgraphs_of_one_name(tmp_path: Path) -> None:
    """Model Explorer has one graph of that name: the first one's ops are shown."""
    file = FileWriter()
    _chain(file, "twin", ("RELU", "TANH"), ("a", "b", "c"))
    _chain(file, "twin", ("NEG",), ("a", "b"))
    path = tmp_path / "twins.tflite"
    path.write_bytes(file.content())
    (graphs,) = explored(path)
    assert labels(graphs, node_data(EdgeFile(path))["scheme"]) == {"twin": ["relu", "tanh"]}


def test_tensors_whose_names_are_numbers(tmp_path: Path) -> None:
    """As in files made from ONNX: an op's index would be taken for the name of another tensor."""
    file = FileWriter()
    _chain(file, "main", ("RELU", "TANH", "NEG"), ("2", "0", "1", "out"))
    path = tmp_path / "numbers.tflite"
    path.write_bytes(file.content())
    (graphs,) = explored(path)
    scheme = node_data(EdgeFile(path))["scheme"]
    assert labels(graphs, scheme) == {"main": ["relu", "tanh", "neg"]}
    assert list(scheme["main"]["results"]) == ["0", "1", "out"]


def test_the_layer_to_blame_is_red(tmp_path: Path) -> None:
    """A bias that was moved: its op alone has the verdict, and loses SQNR."""
    maker = Edgeq()
    quantized = maker.quantize(
        seeded(ConvBnRelu), ConvBnRelu.sample_inputs(), calibration=samples(ConvBnRelu, 8)
    )
    figures = {}
    for name, content in (("sound", quantized.tflite), ("damaged", _damaged(quantized.tflite))):
        held = quantized.with_tflite(content)
        layers = maker.localize(held, samples(ConvBnRelu, 2, seed=1))
        paths = write_node_data(held.edge, tmp_path / name, {0: layers.to_dict()})
        (tmp_path / f"{name}.tflite").write_bytes(content)
        figures[name] = {path.stem: loaded(path)["main"]["results"] for path in paths}
    (graphs,) = explored(tmp_path / "damaged.tflite")
    (blamed,) = [
        key for key, each in figures["damaged"]["verdict"].items() if each["value"] == "lowering"
    ]
    assert graphs["main"]["nodes"][blamed] == "conv_2d"
    assert {each["value"] for each in figures["sound"]["verdict"].values()} == {"sound"}
    assert figures["sound"].keys() == {
        "dtypes",
        "local_lsb_error",
        "local_sqnr_db",
        "scheme",
        "verdict",
    }
    sound, damaged = (figures[name]["local_sqnr_db"] for name in ("sound", "damaged"))
    assert damaged[blamed]["value"] < sound[blamed]["value"] - 10
    colours = {key: each["bgColor"] for key, each in figures["damaged"]["verdict"].items()}
    assert [key for key in colours if colours[key] == colours[blamed]] == [blamed]


def _damaged(content: bytes) -> bytes:
    """Return a file whose first convolution has another bias."""
    model = unpack(content)
    graph = model.subgraphs[0]
    op = next(op for op in graph.operators if len(op.inputs) == 3)
    buffer = model.buffers[graph.tensors[op.inputs[2]].buffer]
    buffer.data = (np.asarray(buffer.data, np.uint8).view(np.int32) + 5000).view(np.uint8)
    return pack(model)


def test_numbers_that_json_lacks_are_text(tmp_path: Path) -> None:
    """Infinity is no defect, NaN is one, and an unknown value is left out."""
    file = FileWriter()
    _chain(file, "main", ("RELU", "TANH", "NEG"), ("a", "b", "c", "d"))
    rows = [
        {"index": 0, "verdict": "sound", "local_sqnr_db": "inf", "local_lsb_error": 0.0},
        {"index": 1, "verdict": "lowering", "local_sqnr_db": "nan", "local_lsb_error": "inf"},
        {"index": 2, "verdict": "unmatched", "local_sqnr_db": None, "local_lsb_error": None},
    ]
    paths = write_node_data(EdgeFile(file.content()), tmp_path, {0: {"rows": rows}})
    figures = {path.stem: loaded(path)["main"]["results"] for path in paths}
    assert {key: each["value"] for key, each in figures["local_sqnr_db"].items()} == {
        "0": "inf",
        "1": "nan",
    }
    assert figures["local_lsb_error"]["0"] == {"value": 0.0}
    assert len({each["bgColor"] for each in figures["verdict"].values()}) == 3
    good, bad = (figures["local_sqnr_db"][key]["bgColor"] for key in "01")
    assert good == figures["verdict"]["0"]["bgColor"]
    assert bad == figures["verdict"]["1"]["bgColor"] == figures["local_lsb_error"]["1"]["bgColor"]
