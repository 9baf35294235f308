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


def _constant(dtype: str, scales: int = 0) -> Given:
    bits = int("".join(filter(str.isdigit, dtype)))
    return {"dtype": dtype, "shape": (4, 1), "data": b"\1" * (bits // 2), "scales": (0.5,) * scales}


X: Given = {"dtype": "float32"}
WEIGHT = _constant("int8", 1)
SHAPE: Given = {"dtype": "int32", "shape": (4,), "data": np.ones(4, np.int32)}
IDS: Given = {"dtype": "int32", "shape": (1,)}


@pytest.mark.parametrize(
    ("op", "operands", "inputs", "weight", "bias"),
    [
        ("CONV_2D", (X, _constant("int4", 4), _constant("int32", 4)), "float32", "int4", "int32"),
        ("CONV_2D", (X, _constant("int8", 4)), "float32", "int8", None),
        ("DEPTHWISE_CONV_2D", (X, _constant("int8", 4), None), "float32", "int8", None),
        # Its input is the third operand.
        ("TRANSPOSE_CONV", (SHAPE, WEIGHT, X, _constant("int64", 1)), "float32", "int8", "int64"),
        ("FULLY_CONNECTED", (X, X, None), "float32 float32", None, None),
        ("BATCH_MATMUL", (X, WEIGHT), "float32", "int8", None),
        ("BATCH_MATMUL", (WEIGHT, X), "float32", "int8", None),
        ("BATCH_MATMUL", (X, X), "float32 float32", None, None),
        ("BATCH_MATMUL", (WEIGHT, WEIGHT), "int8 int8", None, None),
        ("EMBEDDING_LOOKUP", (IDS, WEIGHT), "int32", "int8", None),
        ("GATHER", (WEIGHT, IDS), "int32", "int8", None),
        ("GATHER", (X, IDS), "float32", None, None),
        ("ADD", (X, WEIGHT), "float32 int8", None, None),
        ("RESHAPE", (X, SHAPE), "float32", None, None),
        ("SVDF", (X, WEIGHT, _constant("int4", 1), None, X), "float32", "int4+int8", None),
    ],
)
def test_operands_have_the_kernels_roles(
    op: str, operands: Sequence[Given | None], inputs: str, weight: str | None, bias: str | None
) -> None:
    """By position where the op has weights by nature, by being constant where it may have."""
    (entry,) = OpDtypeMap(OpGraph.read(one_op(op, operands, [X])))
    assert (" ".join(entry.inputs), entry.weight, entry.bias) == (inputs, weight, bias)
    assert entry.outputs == ("float32",)


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
