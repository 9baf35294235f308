"""Which operand is an input, which a weight, which a bias, for each op that has weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from fixtures.tflite.writer import chain, one_op
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.op_dtypes import OpDtypeMap, OpDtypes
from pytest_edgeq.tflite.roles import roles_of

Given = dict[str, Any]


def _x(dtype: str = "int8") -> Given:
    return {"dtype": dtype, "scales": (0.5,) if dtype.startswith(("int8", "int16")) else ()}


def _constant(dtype: str, scales: int = 0) -> Given:
    bits = int("".join(filter(str.isdigit, dtype)))
    return {"dtype": dtype, "shape": (4, 1), "data": b"\1" * (bits // 2), "scales": (0.5,) * scales}


SHAPE: Given = {"dtype": "int32", "shape": (4,), "data": np.ones(4, np.int32)}
IDS: Given = {"dtype": "int32", "shape": (1,)}


@pytest.mark.parametrize(
    ("op", "operands", "inputs", "weight", "bias"),
    [
        ("CONV_2D", (_x(), _constant("int8", 4), _constant("int32", 4)), 1, "int8", "int32"),
        ("CONV_2D", (_x(), _constant("int8", 4)), 1, "int8", None),
        ("DEPTHWISE_CONV_2D", (_x(), _constant("int8", 4), None), 1, "int8", None),
        ("CONV_3D", (_x(), _constant("int8", 1), _constant("int32", 1)), 1, "int8", "int32"),
        ("TRANSPOSE_CONV", (SHAPE, _constant("int8", 1), _x()), 1, "int8", None),
        (
            "TRANSPOSE_CONV",
            (SHAPE, _constant("int8", 1), _x("int16"), _constant("int64", 1)),
            1,
            "int8",
            "int64",
        ),
        ("FULLY_CONNECTED", (_x(), _constant("int4", 1), None), 1, "int4", None),
        ("FULLY_CONNECTED", (_x(), _x(), None), 2, None, None),
        ("BATCH_MATMUL", (_x(), _constant("int8", 1)), 1, "int8", None),
        ("BATCH_MATMUL", (_constant("int8", 1), _x()), 1, "int8", None),
        ("BATCH_MATMUL", (_x(), _x()), 2, None, None),
        ("BATCH_MATMUL", (_constant("int8", 1), _constant("int8", 1)), 2, None, None),
        ("EMBEDDING_LOOKUP", (IDS, _constant("int8", 1)), 1, "int8", None),
        ("GATHER", (_constant("int8", 1), IDS), 1, "int8", None),
        ("GATHER", (_x(), IDS), 1, None, None),
        ("GATHER", (_x(), SHAPE), 1, None, None),
        ("PRELU", (_x(), _constant("int8", 1)), 1, "int8", None),
        ("ADD", (_x(), _constant("int8", 1)), 2, None, None),
        ("RESHAPE", (_x(), SHAPE), 1, None, None),
        ("PAD", (_x(), SHAPE), 1, None, None),
        (
            "SVDF",
            (_x(), _constant("int8", 1), _constant("int16", 1), None, _x()),
            1,
            "int16+int8",
            None,
        ),
    ],
)
def test_operands_have_the_kernels_roles(
    op: str, operands: Sequence[Given | None], inputs: int, weight: str | None, bias: str | None
) -> None:
    """By position where the op has weights by nature, by being constant where it may have."""
    content = one_op(op, operands, [_x()])
    (entry,) = OpDtypeMap(OpGraph.read(content))
    assert (len(entry.inputs), entry.weight, entry.bias) == (inputs, weight, bias)
    assert entry.outputs == ("int8",)


def test_the_input_is_the_input_not_the_weight() -> None:
    """TRANSPOSE_CONV has its input third: the dtypes differ, so swapped roles would show."""
    operands = (SHAPE, _constant("int8", 1), _x("int16"))
    (entry,) = OpDtypeMap(OpGraph.read(one_op("TRANSPOSE_CONV", operands, [_x("int16")])))
    assert (entry.inputs, entry.weight, entry.scheme) == (("int16",), "int8", "int16x8")


def _behind(
    stored: Given, carriers: Sequence[str], read_as: str = "float32", op: str = "FULLY_CONNECTED"
) -> tuple[OpGraph, OpDtypes]:
    """An op on float32 whose weight reaches it through other ops."""
    made = {"dtype": read_as, "scales": (0.5,) if read_as == "int8" else ()}
    ops = [
        (name, f"w{i}" + " shape" * (name in ("TRANSPOSE", "RESHAPE")), f"w{i + 1}")
        for i, name in enumerate(carriers)
    ]
    ops.append((op, f"x w{len(carriers)}" + " -" * (op != "BATCH_MATMUL"), "y"))
    tensors = {f"w{i + 1}": made for i in range(len(carriers))}
    read = OpGraph.read(chain(*ops, inputs="x", outputs="y", w0=stored, shape=SHAPE, **tensors))
    (entry,) = OpDtypeMap(read).ops(op)
    return read, entry


@pytest.mark.parametrize("op", ["FULLY_CONNECTED", "CONV_2D", "BATCH_MATMUL"])
@pytest.mark.parametrize(
    ("stored", "carriers", "expected"),
    [
        (_constant("float32"), (), ("float32", None, "float")),
        (_constant("int8", 4), (), ("int8", "per_channel", "dynamic")),
        (_constant("int8", 4), ("DEQUANTIZE",), ("int8", "per_channel", "weight_only")),
        (_constant("int4", 1), ("DEQUANTIZE",), ("int4", "per_tensor", "weight_only")),
        (_constant("int8", 4), ("DEQUANTIZE", "TRANSPOSE"), ("int8", "per_channel", "weight_only")),
        (_constant("int8", 1), ("DENSIFY", "DEQUANTIZE"), ("int8", "per_tensor", "weight_only")),
        (_constant("float16"), ("DEQUANTIZE",), ("float16", None, "float16")),
        (_constant("float16"), ("DENSIFY", "DEQUANTIZE", "RESHAPE"), ("float16", None, "float16")),
        (_constant("float16"), ("CAST",), ("float16", None, "float16")),
        (_constant("float32"), ("TRANSPOSE",), ("float32", None, "float")),
    ],
)
def test_weights_are_told_as_stored(
    op: str, stored: Given, carriers: Sequence[str], expected: tuple[str, str | None, str]
) -> None:
    """The dtype in the file, however the weight reaches its op, and the scheme that follows."""
    _, entry = _behind(stored, carriers)
    assert (entry.weight, entry.granularity, entry.scheme) == expected
    assert entry.inputs == ("float32",)


def test_a_weight_quantized_on_the_way_is_stored_in_float() -> None:
    """QUANTIZE of a float constant: the file holds floats, the op computes on integers."""
    graph, entry = _behind(_constant("float32"), ("QUANTIZE",), read_as="int8")
    assert (entry.weight, entry.scheme) == ("float32", "dynamic")
    (weight,) = roles_of(graph, graph.ops[-1]).weights
    assert (weight.tensor.dtype, weight.operand.dtype) == ("float32", "int8")
    assert not weight.dequantized


def test_a_computed_weight_is_an_input() -> None:
    """A hypernetwork: nothing of it is stored, so nothing is told of it."""
    ops = ("NEG", "x", "w"), ("FULLY_CONNECTED", "x w bias", "y")
    read = OpGraph.read(chain(*ops, inputs="x bias", outputs="y"))
    entry = OpDtypeMap(read).ops("FULLY_CONNECTED")[0]
    assert (entry.inputs, entry.weight, entry.bias) == (("float32", "float32"), None, "float32")
