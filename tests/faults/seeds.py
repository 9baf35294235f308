"""The sound `.tflite` files that mutations start from: small, of many ops and structures."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from fixtures.tflite import make
from fixtures.tflite.single import FLOATS, HYBRID, QUANTIZED
from fixtures.tflite.writer import FileWriter, chain, composite, constant, sparse_row
from tests.tflite.one_op_files import KINDS, data_of, layer, write

_CONVERTED = (
    "activation_elsewhere.recipe_static_wi8_ai16",
    "add_then_relu.int8",
    "attention.int8",
    "batch_norms.float",
    "decomposed.int8",
    "functional_convs.int8",
    "functional_linears.recipe_dynamic_wi8_afp32",
    "nested.recipe_weight_only_wi4_afp32",
    "transposed.int8",
    "two_loops.int8",
)


@functools.cache
def tflite_seeds() -> dict[str, bytes]:
    """Return the files by name, the same in every process."""
    files = {name: (make.CONVERTED / f"{name}.tflite").read_bytes() for name in _CONVERTED}
    for name, (build, dtypes) in QUANTIZED.items():
        for dtype in dtypes:
            files[f"{name} {dtype}"] = build(np.random.default_rng(0), dtype).content
    for name, (hybrid, kinds) in HYBRID.items():
        for kind in kinds:
            files[f"{name} {kind}"] = hybrid(np.random.default_rng(0), kind).content
    for name, single in FLOATS.items():
        files[f"{name} float"] = single(np.random.default_rng(0), "float").content
    for op in KINDS:
        if not any(name.startswith(f"{op} ") for name in files):
            count = len(data_of(op)) + 1
            files[op] = write(op, ["float32"] * count, [(1.0, 0)] * count)
    files["EMBEDDING_LOOKUP"] = layer("EMBEDDING_LOOKUP", weight="float32", output="float32")[1]
    return files | {
        "WHILE": _loop(),
        "IF": _branch(),
        "CALL_ONCE": _variable(),
        "STABLEHLO_COMPOSITE": _composite(),
        "CUSTOM": chain(("CUSTOM:Mine", "x", "y"), inputs="x", outputs="y"),
        "sparse": _sparse(),
        "dynamic shape": _dynamic(),
        "two signatures": _two_signatures(),
    }


_INDEX: dict[str, Any] = {"dtype": "int32", "shape": ()}
_HANDLE: dict[str, Any] = {"dtype": "resource", "shape": ()}


def _loop() -> bytes:
    """A counter, up to 10."""
    file = FileWriter()
    loop = ("WHILE", "i", "done", "WhileOptions", {"condSubgraphIndex": 1, "bodySubgraphIndex": 2})
    file.graph().fill(loop, inputs="i", outputs="done", i=_INDEX, done=_INDEX)
    less, add = ("LESS", "i end", "less", "LessOptions"), ("ADD", "i one", "more", "AddOptions")
    truth = {"dtype": "bool", "shape": ()}
    end, one = constant(10, "int32"), constant(1, "int32")
    file.graph("condition").fill(less, inputs="i", outputs="less", i=_INDEX, end=end, less=truth)
    file.graph("body").fill(add, inputs="i", outputs="more", i=_INDEX, one=one, more=_INDEX)
    return file.content()


def _branch() -> bytes:
    """Either the negative or the root."""
    file = FileWriter()
    choice = ("IF", "choice x", "y", "IfOptions", {"thenSubgraphIndex": 1, "elseSubgraphIndex": 2})
    truth = {"dtype": "bool", "shape": (1,)}
    file.graph().fill(choice, inputs="choice x", outputs="y", choice=truth)
    for name, op in (("then", "NEG"), ("else", "ABS")):
        file.graph(name).fill((op, "x", "y"), inputs="x", outputs="y")
    return file.content()


def _variable() -> bytes:
    """A variable that is set once and read."""
    file = FileWriter()
    handle = ("VAR_HANDLE", "", "v", "VarHandleOptions", {"sharedName": b"v", "container": b""})
    file.graph().fill(
        ("CALL_ONCE", "", "", "CallOnceOptions", {"initSubgraphIndex": 1}),
        handle,
        ("READ_VARIABLE", "v", "y", "ReadVariableOptions"),
        ("ADD", "x y", "z", "AddOptions"),
        inputs="x",
        outputs="z",
        v=_HANDLE,
    )
    assign = ("ASSIGN_VARIABLE", "v one", "", "AssignVariableOptions")
    ones = constant(np.ones((1, 4)))
    file.graph("first").fill(handle, assign, inputs="", outputs="", v=_HANDLE, one=ones)
    return file.content()


def _composite() -> bytes:
    """A composite, and what it is made of."""
    file = FileWriter()
    file.graph().fill(composite("mine", "x", "y", 1), inputs="x", outputs="y")
    file.graph("inner").fill(("ABS", "x", "y"), inputs="x", outputs="y")
    return file.content()


def _sparse() -> bytes:
    """A matrix of one row with one value, made dense."""
    file = FileWriter()
    graph = file.graph()
    row = {"shape": (1, 2)}
    graph.fill(
        ("DENSIFY", "held", "dense", "DensifyOptions"),
        ("FULLY_CONNECTED", "x dense -", "y", "FullyConnectedOptions"),
        inputs="x",
        outputs="y",
        x=row,
        dense=row,
        y={"shape": (1, 1)},
        held=row | {"data": np.ones(1, np.float32)},
    )
    graph.raw.tensors[1].sparsity = sparse_row()
    return file.content()


def _dynamic() -> bytes:
    """Any batch, read by SHAPE."""
    free = {"signature": (-1, 4)}
    return chain(
        ("SHAPE", "x", "size", "ShapeOptions", {"outType": 2}),
        ("FILL", "size half", "filled", "FillOptions"),
        ("ADD", "x filled", "y", "AddOptions"),
        inputs="x",
        outputs="y",
        key="main",
        x=free,
        y=free,
        filled=free,
        size={"dtype": "int32", "shape": (2,)},
        half=constant(0.5),
    )


def _two_signatures() -> bytes:
    """Two entry points of one file."""
    file = FileWriter()
    for op in ("NEG", "ABS"):
        file.graph(op).fill((op, "x", "y"), inputs="x", outputs="y", key=op.lower())
    return file.content()
