"""The sound `.tflite` files that mutations start from: small, of many ops and structures."""

from __future__ import annotations

import functools

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from flatbuffers import flexbuffers  # type: ignore[import-untyped] # ships no types

from fixtures.tflite import make
from fixtures.tflite.single import FLOATS, HYBRID, QUANTIZED
from fixtures.tflite.writer import FileWriter, one_op, sparse_row

__all__ = ["tflite_seeds"]

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
    files |= {
        "WHILE": _loop(),
        "IF": _branch(),
        "CALL_ONCE": _variable(),
        "STABLEHLO_COMPOSITE": _composite(),
        "CUSTOM": one_op("CUSTOM:Mine", [{"dtype": "float32"}], [{"dtype": "float32"}]),
        "sparse": _sparse(),
        "dynamic shape": _dynamic(),
        "two signatures": _two_signatures(),
        **_moving(),
    }
    return files


def _ints(*values: int) -> dict[str, object]:
    data = np.array(values, np.int32)
    return {"dtype": "int32", "shape": data.shape, "data": data}


def _moving() -> dict[str, bytes]:
    """Ops that copy: their operands are indices, shapes and axes."""
    x = {"dtype": "float32", "shape": (2, 4)}
    table = {
        "dtype": "float32",
        "shape": (5, 3),
        "data": np.arange(15, dtype=np.float32),
    }
    return {
        "GATHER": one_op(
            "GATHER",
            [table, {"dtype": "int32", "shape": (2,)}],
            [{"dtype": "float32", "shape": (2, 3)}],
            "GatherOptions",
            axis=0,
        ),
        "EMBEDDING_LOOKUP": one_op(
            "EMBEDDING_LOOKUP",
            [_ints(0, 4), table],
            [{"dtype": "float32", "shape": (2, 3)}],
        ),
        "RESHAPE": one_op(
            "RESHAPE",
            [x, _ints(4, 2)],
            [{"dtype": "float32", "shape": (4, 2)}],
            "ReshapeOptions",
        ),
        "PAD": one_op(
            "PAD",
            [x, {**_ints(1, 1, 0, 2), "shape": (2, 2)}],
            [{"dtype": "float32", "shape": (4, 6)}],
            "PadOptions",
        ),
        "STRIDED_SLICE": one_op(
            "STRIDED_SLICE",
            [x, _ints(0, 1), _ints(2, 4), _ints(1, 2)],
            [{"dtype": "float32", "shape": (2, 2)}],
            "StridedSliceOptions",
        ),
        "SPLIT": one_op(
            "SPLIT",
            [{**_ints(1), "shape": ()}, x],
            [{"dtype": "float32", "shape": (2, 2)}] * 2,
            "SplitOptions",
            numSplits=2,
        ),
        "TOPK_V2": one_op(
            "TOPK_V2",
            [x, {**_ints(2), "shape": ()}],
            [{"dtype": "float32", "shape": (2, 2)}, {"dtype": "int32", "shape": (2, 2)}],
            "TopKV2Options",
        ),
        "PACK": one_op(
            "PACK",
            [x, x],
            [{"dtype": "float32", "shape": (2, 2, 4)}],
            "PackOptions",
            valuesCount=2,
        ),
        "UNPACK": one_op(
            "UNPACK",
            [x],
            [{"dtype": "float32", "shape": (4,)}] * 2,
            "UnpackOptions",
            num=2,
        ),
        "SELECT_V2": one_op(
            "SELECT_V2",
            [{"dtype": "bool", "shape": (2, 4)}, x, x],
            [x],
            "SelectV2Options",
        ),
        "SCATTER_ND": one_op(
            "SCATTER_ND",
            [
                {**_ints(1, 3), "shape": (2, 1)},
                {"dtype": "float32", "shape": (2, 2)},
                _ints(4, 2),
            ],
            [{"dtype": "float32", "shape": (4, 2)}],
            "ScatterNdOptions",
        ),
        "GATHER_ND": one_op(
            "GATHER_ND",
            [x, {**_ints(1, 3), "shape": (1, 2)}],
            [{"dtype": "float32", "shape": (1,)}],
            "GatherNdOptions",
        ),
        "ARG_MAX": one_op(
            "ARG_MAX",
            [x, {**_ints(1), "shape": ()}],
            [{"dtype": "int32", "shape": (2,)}],
            "ArgMaxOptions",
            outputType=2,
        ),
        "BROADCAST_TO": one_op(
            "BROADCAST_TO",
            [x, _ints(3, 2, 4)],
            [{"dtype": "float32", "shape": (3, 2, 4)}],
            "BroadcastToOptions",
        ),
        "CUMSUM": one_op("CUMSUM", [x, {**_ints(1), "shape": ()}], [x], "CumsumOptions"),
        "SPACE_TO_BATCH_ND": one_op(
            "SPACE_TO_BATCH_ND",
            [
                {"dtype": "float32", "shape": (1, 4, 4, 1)},
                _ints(2, 2),
                {**_ints(0, 0, 0, 0), "shape": (2, 2)},
            ],
            [{"dtype": "float32", "shape": (4, 2, 2, 1)}],
            "SpaceToBatchNDOptions",
        ),
    }


def _loop() -> bytes:
    """A counter, up to 10."""
    file = FileWriter()
    main, condition, body = (file.graph(name) for name in ("main", "condition", "body"))
    i, done = main.tensor("int32", ()), main.tensor("int32", ())
    main.op("WHILE", [i], [done], "WhileOptions", condSubgraphIndex=1, bodySubgraphIndex=2)
    main.borders([i], [done])
    i = condition.tensor("int32", ())
    limit = condition.tensor("int32", (), data=np.array(10, np.int32))
    less = condition.tensor("bool", ())
    condition.op("LESS", [i, limit], [less], "LessOptions")
    condition.borders([i], [less])
    i, one = body.tensor("int32", ()), body.tensor("int32", (), data=np.array(1, np.int32))
    more = body.tensor("int32", ())
    body.op("ADD", [i, one], [more], "AddOptions")
    body.borders([i], [more])
    return file.content()


def _branch() -> bytes:
    """Either the negative or the root."""
    file = FileWriter()
    main, first, second = (file.graph(name) for name in ("main", "then", "else"))
    choice, x, y = main.tensor("bool", (1,)), main.tensor("float32"), main.tensor("float32")
    main.op("IF", [choice, x], [y], "IfOptions", thenSubgraphIndex=1, elseSubgraphIndex=2)
    main.borders([choice, x], [y])
    for graph, op in ((first, "NEG"), (second, "ABS")):
        x, y = graph.tensor("float32"), graph.tensor("float32")
        graph.op(op, [x], [y])
        graph.borders([x], [y])
    return file.content()


def _variable() -> bytes:
    """A variable that is set once and read."""
    file = FileWriter()
    main, first = file.graph("main"), file.graph("first")
    y, handle = main.tensor("float32"), main.tensor("resource", ())
    main.op("CALL_ONCE", [], [], "CallOnceOptions", initSubgraphIndex=1)
    main.op("VAR_HANDLE", [], [handle], "VarHandleOptions", sharedName=b"v", container=b"")
    main.op("READ_VARIABLE", [handle], [y], "ReadVariableOptions")
    x, z = main.tensor("float32"), main.tensor("float32")
    main.op("ADD", [x, y], [z], "AddOptions")
    main.borders([x], [z])
    handle = first.tensor("resource", ())
    value = first.tensor("float32", data=np.ones((1, 4), np.float32))
    first.op("VAR_HANDLE", [], [handle], "VarHandleOptions", sharedName=b"v", container=b"")
    first.op("ASSIGN_VARIABLE", [handle, value], [], "AssignVariableOptions")
    return file.content()


def _composite() -> bytes:
    """A composite, and what it is made of."""
    file = FileWriter()
    main, inner = file.graph("main"), file.graph("inner")
    x, y = main.tensor("float32"), main.tensor("float32")
    main.op("STABLEHLO_COMPOSITE", [x], [y])
    raw = main.raw.operators[0]
    raw.builtinOptions2Type = schema.BuiltinOptions2.StableHLOCompositeOptions
    raw.builtinOptions2 = schema.StableHLOCompositeOptionsT()
    raw.builtinOptions2.name = "mine"
    raw.builtinOptions2.decompositionSubgraphIndex = 1
    raw.builtinOptions2.compositeAttributes = np.frombuffer(flexbuffers.Dumps({}), np.uint8)
    main.borders([x], [y])
    x, y = inner.tensor("float32"), inner.tensor("float32")
    inner.op("ABS", [x], [y])
    inner.borders([x], [y])
    return file.content()


def _sparse() -> bytes:
    """A matrix of one row with one value, made dense."""
    file = FileWriter()
    graph = file.graph()
    x, y = graph.tensor("float32", (1, 2)), graph.tensor("float32", (1, 1))
    held = graph.tensor("float32", (1, 2), data=np.ones(1, np.float32))
    dense = graph.tensor("float32", (1, 2))
    graph.raw.tensors[held].sparsity = sparse_row()
    graph.op("DENSIFY", [held], [dense], "DensifyOptions")
    graph.op("FULLY_CONNECTED", [x, dense, -1], [y], "FullyConnectedOptions")
    graph.borders([x], [y])
    return file.content()


def _dynamic() -> bytes:
    """Any batch, read by SHAPE."""
    file = FileWriter()
    graph = file.graph()
    x = graph.tensor("float32", (1, 4), signature=(-1, 4))
    size, y = graph.tensor("int32", (2,)), graph.tensor("float32", (1, 4), signature=(-1, 4))
    zero = graph.tensor("float32", (), data=np.array(0.5, np.float32))
    filled = graph.tensor("float32", (1, 4), signature=(-1, 4))
    graph.op("SHAPE", [x], [size], "ShapeOptions", outType=2)
    graph.op("FILL", [size, zero], [filled], "FillOptions")
    graph.op("ADD", [x, filled], [y], "AddOptions")
    graph.borders([x], [y])
    file.signature("main", [("x", x)], [("y", y)])
    return file.content()


def _two_signatures() -> bytes:
    """Two entry points of one file."""
    file = FileWriter()
    for number, op in enumerate(("NEG", "ABS")):
        graph = file.graph(op)
        x, y = graph.tensor("float32"), graph.tensor("float32")
        graph.op(op, [x], [y])
        graph.borders([x], [y])
        file.signature(op.lower(), [("x", x)], [("y", y)], number)
    return file.content()
