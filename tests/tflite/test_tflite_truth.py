"""What the graph says of tensors, subgraphs and signatures is what the file holds."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema

from fixtures.tflite import make
from fixtures.tflite.writer import FileWriter, one_op, pack, unpack
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.op_dtypes import OpDtypeMap, OpDtypes
from tests.faults.seeds import tflite_seeds

Recipes = Callable[[str], bytes]


def _only(content: bytes, op: str) -> OpDtypes:
    (entry,) = OpDtypeMap(OpGraph.read(content)).ops(op)
    return entry


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("float", ("float32", "float32", "float32", None, "float")),
        ("float16", ("float32", "float16", "float32", None, "float16")),
        ("dynamic_wi8_afp32", ("float32", "int8", "float32", "per_channel", "dynamic")),
        ("dynamic_wi4_afp32", ("float32", "int4", "float32", "per_channel", "dynamic")),
        ("dynamic_wi4b32_afp32", ("float32", "int4", "float32", "blockwise_32", "dynamic")),
        ("dynamic_wi2b32_afp32", ("float32", "int2", "float32", "blockwise_32", "dynamic")),
        ("weight_only_wi8_afp32", ("float32", "int8", "float32", "per_channel", "weight_only")),
        ("weight_only_wi4_afp32", ("float32", "int4", "float32", "per_channel", "weight_only")),
        ("static_wi8_ai8", ("int8", "int8", "int32", "per_channel", "int8")),
        ("static_wi8_ai16", ("int16", "int8", "int64", "per_channel", "int16x8")),
    ],
)
def test_every_recipe_is_told_as_stored(
    by_recipe: Recipes, recipe: str, expected: tuple[Any, ...]
) -> None:
    """One linear layer under ai-edge-quantizer's recipes, from float to two bits."""
    entry = _only(by_recipe(recipe), "FULLY_CONNECTED")
    assert entry.inputs == entry.outputs
    told = (entry.inputs[0], entry.weight, entry.bias, entry.granularity, entry.scheme)
    assert told == expected


@pytest.mark.slow
def test_scales_of_blocks_are_read_from_their_tensor(by_recipe: Recipes) -> None:
    """64×64 weights in blocks of 32: two scales a row, in a float16 tensor."""
    graph = OpGraph.read(by_recipe("dynamic_wi4b32_afp32"))
    op = next(op for op in graph.ops if op.name == "FULLY_CONNECTED")
    weight = graph.tensor(op, op.inputs[1])
    assert (weight.granularity, weight.block_size, weight.is_quantized) == (
        "blockwise_32",
        32,
        True,
    )
    assert weight.block_zero_points == -1
    scales = graph.scales(op.subgraph, weight)
    assert scales.dtype == np.float32
    assert scales.size == 64 * 64 // 32
    assert np.all(scales > 0)
    # Two values a byte.
    assert graph.constant(weight).size == 64 * 64 // 2


def test_zero_points_of_blocks_are_not_taken_for_none() -> None:
    """Blocks with zero points of their own are not symmetric: their tensor is told."""
    content = one_op(
        "9999",
        [
            {"dtype": "float32", "shape": (1, 32)},
            {"dtype": "int4", "shape": (1, 32), "data": b"\0" * 16},
            {"dtype": "float16", "shape": (1, 1), "data": np.ones((1, 1), np.float16)},
            {"dtype": "int4", "shape": (1, 1), "data": b"\1"},
        ],
        [{"dtype": "float32", "shape": (1, 1)}],
    )
    model = unpack(content)
    for kind, zero_points in (
        (schema.BlockwiseQuantizationT, 3),
        (schema.MultiAxisQuantizationT, -1),
    ):
        details = kind()
        details.scales, details.zeroPoints, details.blockSize = 2, zero_points, 0
        if kind is schema.BlockwiseQuantizationT:
            details.blockShape = np.array([1, 32], np.int32)
        quantization = schema.QuantizationParametersT()
        quantization.details = details
        quantization.detailsType = getattr(schema.QuantizationDetails, kind.__name__[:-1])
        model.subgraphs[0].tensors[1].quantization = quantization
        weight = OpGraph.read(pack(model)).subgraphs[0].tensors[1]
        assert weight.block_zero_points == zero_points
        assert weight.granularity == ("blockwise_32" if zero_points == 3 else "multi_axis")


@pytest.mark.parametrize(
    "dtype",
    [
        *("float32", "float16", "float64", "bfloat16", "int2", "int4", "uint4", "int8", "uint8"),
        *("int16", "uint16", "int32", "uint32", "int64", "uint64", "bool", "string", "resource"),
        *("complex64", "variant", "float8_e4m3fn"),
    ],
)
def test_every_dtype_of_the_schema_is_told(dtype: str) -> None:
    """By the schema's name, not by what numpy can hold."""
    entry = _only(one_op("CUSTOM:mine", [{"dtype": dtype}], [{"dtype": "bool"}]), "CUSTOM:mine")
    assert entry.inputs == (dtype,)
    assert entry.outputs == ("bool",)


def test_dtypes_and_operators_to_come_are_told_by_number() -> None:
    """A file of a later release: nothing is guessed, nothing crashes."""
    graph = OpGraph.read(one_op("9999", [{"dtype": 77}], [{"dtype": "int8"}]))
    assert graph.ops[0].name == "UNKNOWN_9999"
    assert graph.subgraphs[0].tensors[0].dtype == "unknown_77"


def test_an_optional_input_left_out_is_no_tensor() -> None:
    """The index −1 must not become Python's "last of the list"."""
    content = one_op(
        "FULLY_CONNECTED",
        [{"dtype": "float32"}, {"dtype": "float32", "data": np.ones((1, 4), np.float32)}, None],
        [{"dtype": "float32", "shape": (1, 1)}],
    )
    graph = OpGraph.read(content)
    assert graph.ops[0].inputs == (0, 1, -1)
    assert _only(content, "FULLY_CONNECTED").bias is None
    with pytest.raises(IndexError, match=r"FULLY_CONNECTED.*left out"):
        graph.tensor(graph.ops[0], -1)


def test_ops_of_every_subgraph_are_in_the_map() -> None:
    """A float op in a branch is a float op: nothing hides in a subgraph."""
    graph = OpGraph.read(tflite_seeds()["IF"])
    entries = OpDtypeMap(graph)
    assert [(e.subgraph, e.index, e.op) for e in entries] == [
        (0, 0, "IF"),
        (1, 0, "NEG"),
        (2, 0, "ABS"),
    ]
    assert [subgraph.name for subgraph in graph.subgraphs] == ["main", "then", "else"]
    assert entries.ops("ABS")[0].where == "ABS #2:0"
    assert graph.subgraphs[1].producer[1] is graph.subgraphs[1].ops[0]


def test_signatures_have_their_own_subgraph_names_and_order() -> None:
    """Two entry points; outputs in the graph's order, whatever the order in the signature."""
    file = FileWriter()
    for _ in range(2):
        graph = file.graph()
        x, *outputs = (graph.tensor("float32") for _ in range(13))
        for output in outputs:
            graph.op("NEG", [x], [output])
        graph.borders([x], outputs)
    entries = [(name, 1 + int(name[7:])) for name in sorted(f"output_{i}" for i in range(12))]
    file.signature("encode", [("x", 0)], entries)
    file.signature("decode", [("x", 0)], entries, subgraph=1)
    signatures = OpGraph.read(file.content()).signatures
    assert [(s.key, s.subgraph) for s in signatures] == [("encode", 0), ("decode", 1)]
    for signature in signatures:
        assert [b.name for b in signature.outputs] == [f"output_{i}" for i in range(12)]
        assert [b.tensor.index for b in signature.outputs] == list(range(1, 13))


def test_a_file_without_signatures_goes_by_its_tensors() -> None:
    """Older converters write none, and some strip the names, too."""
    model = unpack((make.CONVERTED / "equal_weights.float.tflite").read_bytes())
    model.signatureDefs = []
    graph = OpGraph.read(pack(model))
    (signature,) = graph.signatures
    assert (signature.key, signature.subgraph) == (None, 0)
    assert [b.name for b in signature.inputs] == ["serving_default_args_0"]
    assert [b.name for b in signature.outputs] == [
        f"serving_default_output_{i}_output" for i in range(3)
    ]
    for tensor in model.subgraphs[0].tensors:
        tensor.name = ""
    stripped = OpGraph.read(pack(model)).signatures[0]
    assert [b.name for b in stripped.outputs] == ["output_0", "output_1", "output_2"]


@pytest.mark.parametrize(
    ("scales", "zero_points", "expected"),
    [
        ((0.5,), (), ((0.5,), (0,), "per_tensor")),
        ((0.5,), (-3,), ((0.5,), (-3,), "per_tensor")),
        ((1, 2, 3), (), ((1, 2, 3), (0, 0, 0), "per_channel")),
        ((1, 2, 3), (7,), ((1, 2, 3), (7, 7, 7), "per_channel")),
        ((1, 2, 3), (1, 2, 3), ((1, 2, 3), (1, 2, 3), "per_channel")),
        ((), (), ((), (), None)),
    ],
)
def test_scales_and_zero_points(
    scales: tuple[float, ...], zero_points: tuple[int, ...], expected: tuple[Any, ...]
) -> None:
    """
    Zero points may be left out, or given once for all channels.

    The interpreter of today refuses both, but looks only once it has kernels for all ops.
    """
    given = {"dtype": "int8", "shape": (2, 3), "scales": scales, "zero_points": zero_points}
    content = one_op("9999", [given | {"axis": 1}], [{"dtype": "int8"}])
    tensor = OpGraph.read(content).subgraphs[0].tensors[0]
    told = (tuple(tensor.scales), tuple(tensor.zero_points), tensor.granularity)
    assert told == expected


def test_a_float_tensor_with_a_scale_is_not_quantized() -> None:
    """Some converters leave parameters behind on float tensors."""
    content = one_op("NEG", [{"dtype": "float32", "scales": (0.5,)}], [{"dtype": "float32"}])
    assert not OpGraph.read(content).subgraphs[0].tensors[0].is_quantized
    assert _only(content, "NEG").scheme == "float"


@pytest.mark.parametrize("op", ["ADD", "9999"])
def test_data_behind_the_flatbuffer_is_found(op: str) -> None:
    """
    Files of more than 2 GB keep their data behind the tables, by offset and size.

    The verifier does not look there, nor the interpreter at a file whose ops it does not know.
    """
    content = one_op(
        op,
        [{"dtype": "int32"}, {"dtype": "int32", "data": np.arange(4, dtype=np.int32)}],
        [{"dtype": "int32"}],
    )
    model = unpack(content)
    data = model.buffers[1].data.tobytes()
    model.buffers[1].data, model.buffers[1].offset, model.buffers[1].size = None, 1 << 20, 16
    length = -(-len(pack(model)) // 16) * 16
    model.buffers[1].offset = length
    moved = pack(model).ljust(length, b"\0") + data
    graph = OpGraph.read(moved)
    constant = graph.subgraphs[0].tensors[1]
    assert constant.is_constant
    assert graph.constant(constant).view(np.int32).tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match=r"truncated|out of range"):
        OpGraph.read(moved[:-1])


def test_data_in_another_file_is_not_read_as_nothing() -> None:
    """It is a constant all the same, and asking for its bytes is an error, not an empty answer."""
    content = one_op("ADD", [{"dtype": "int32"}, {"dtype": "int32"}], [{"dtype": "int32"}])
    model = unpack(content)
    model.subgraphs[0].inputs = np.zeros(1, np.int32)
    model.subgraphs[0].tensors[1].externalBuffer = 1
    group, data = schema.ExternalBufferGroupT(), schema.ExternalBufferT()
    group.name, data.id, data.length = "weights.bin", 1, 16
    model.externalBufferGroups, model.externalBuffers = [group], [data]
    graph = OpGraph.read(pack(model))
    constant = graph.subgraphs[0].tensors[1]
    assert constant.is_constant
    with pytest.raises(ValueError, match="another file"):
        graph.constant(constant)


@pytest.mark.parametrize("as_path", [True, False])
def test_no_copy_of_the_buffers_is_made(tmp_path: Path, as_path: bool) -> None:
    """A 16 MB weight: mapping the file or using its bytes allocates a tiny part of that."""
    weight = np.ones((2048, 2048), np.float32)
    content = one_op(
        "FULLY_CONNECTED",
        [
            {"dtype": "float32", "shape": (1, 2048)},
            {"dtype": "float32", "shape": (2048, 2048), "data": weight},
            None,
        ],
        [{"dtype": "float32", "shape": (1, 2048)}],
        "FullyConnectedOptions",
    )
    path = tmp_path / "large.tflite"
    path.write_bytes(content)
    # Imports are paid for once.
    OpGraph.read(path)
    tracemalloc.start()
    graph = OpGraph.read(path if as_path else content)
    entries = OpDtypeMap(graph)
    constant = graph.constant(graph.subgraphs[0].tensors[1])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert entries.ops("FULLY_CONNECTED")[0].weight == "float32"
    assert constant.size == weight.nbytes
    assert not constant.flags.owndata
    assert peak < len(content) / 100
    if not as_path:
        assert np.shares_memory(constant, np.frombuffer(content, np.uint8))
