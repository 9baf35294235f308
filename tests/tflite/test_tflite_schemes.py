"""What an op computes in: a float op is never told int8, nor the reverse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from fixtures.tflite import make
from fixtures.tflite.writer import one_op
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.op_dtypes import SCHEMES, OpDtypeMap

Given = dict[str, Any]


def _q(dtype: str) -> Given:
    return {"dtype": dtype, "scales": (0.5,)}


def _p(dtype: str) -> Given:
    return {"dtype": dtype}


def _c(given: Given) -> Given:
    return given | {"data": np.ones(4, given["dtype"])}


@pytest.mark.parametrize(
    ("op", "inputs", "outputs", "scheme"),
    [
        # Borders have the scheme of the integer side.
        ("QUANTIZE", [_p("float32")], [_q("int8")], "int8"),
        ("QUANTIZE", [_p("float32")], [_q("int16")], "int16x8"),
        ("QUANTIZE", [_c(_p("float32"))], [_q("int8")], "int8"),
        ("DEQUANTIZE", [_q("int8")], [_p("float32")], "int8"),
        ("DEQUANTIZE", [_c(_q("int8"))], [_p("float32")], "weight_only"),
        ("DEQUANTIZE", [_c(_p("float16"))], [_p("float32")], "float16"),
        ("DEQUANTIZE", [_p("float16")], [_p("float32")], "float"),
        # Requantize.
        ("QUANTIZE", [_q("int16")], [_q("int8")], "int16x8"),
        ("QUANTIZE", [_q("uint8")], [_q("int8")], "int8"),
        # Casts and comparisons compute on what comes in.
        ("CAST", [_q("int8")], [_p("float32")], "float"),
        ("CAST", [_p("int64")], [_p("int32")], "integer"),
        ("ARG_MAX", [_q("int8"), _p("int32")], [_p("int64")], "int8"),
        ("ARG_MAX", [_p("float32"), _p("int32")], [_p("int64")], "float"),
        ("SELECT_V2", [_p("bool"), _q("int8"), _q("int8")], [_q("int8")], "int8"),
        ("EMBEDDING_LOOKUP", [_p("int32"), _c(_p("float32"))], [_p("float32")], "float"),
        ("EMBEDDING_LOOKUP", [_p("int32"), _c(_q("int8"))], [_p("float32")], "dynamic"),
        ("GATHER", [_c(_q("int8")), _p("int32")], [_q("int8")], "int8"),
        # Every width.
        ("ADD", [_q("uint8"), _q("uint8")], [_q("uint8")], "uint8"),
        ("ADD", [_q("int16"), _q("int16")], [_q("int16")], "int16x8"),
        ("ADD", [_q("int4"), _q("int4")], [_q("int4")], "int4"),
        ("ADD", [_q("int32"), _q("int32")], [_q("int32")], "int32"),
        ("ADD", [_p("float16"), _p("float16")], [_p("float16")], "float16"),
        ("ADD", [_p("float16"), _p("float32")], [_p("float32")], "float"),
        ("ADD", [_p("bfloat16"), _p("bfloat16")], [_p("bfloat16")], "float"),
        ("RFFT2D", [_p("float32"), _p("int32")], [_p("complex64")], "float"),
        # Integers without a scale are not quantized.
        ("ADD", [_p("int8"), _p("int8")], [_p("int8")], "integer"),
        ("FULLY_CONNECTED", [_p("float32"), _c(_p("int8"))], [_p("float32")], "float"),
        # A float among quantized operands makes a float op: nothing may hide it.
        ("CUSTOM:mine", [_q("int8"), _p("float32")], [_q("int8")], "float"),
        ("CUSTOM:mine", [_p("float32"), _c(_q("int8"))], [_p("float32")], "dynamic"),
        (
            "BIDIRECTIONAL_SEQUENCE_LSTM",
            [_p("float32"), _c(_q("int8"))],
            [_p("float32")],
            "dynamic",
        ),
        ("VAR_HANDLE", [], [_p("resource")], "integer"),
    ],
)
def test_the_scheme_follows_from_the_dtypes(
    op: str, inputs: Sequence[Given], outputs: Sequence[Given], scheme: str
) -> None:
    """Quantized means integers with a scale; an argument such as an axis does not count."""
    (entry,) = OpDtypeMap(OpGraph.read(one_op(op, inputs, outputs)))
    assert entry.scheme == scheme
    assert entry.scheme in SCHEMES


@pytest.mark.parametrize("file", sorted(path.name for path in make.CONVERTED.glob("*.tflite")))
def test_no_converted_file_contradicts_its_dtypes(file: str) -> None:
    """Over all converted files: integer schemes have no floats inside, float ones have some."""
    graph = OpGraph.read(make.CONVERTED / file)
    entries = OpDtypeMap(graph)
    assert len(entries) == len(graph.ops) > 0
    for entry in entries:
        floats = [dtype for dtype in (*entry.inputs, *entry.outputs) if "float" in dtype]
        assert entry.scheme in SCHEMES
        if entry.op in ("QUANTIZE", "DEQUANTIZE"):
            continue
        assert bool(floats) == (entry.scheme in ("float", "float16", "dynamic", "weight_only"))
        assert (entry.scheme == "integer") <= (not floats)


def test_selecting_and_counting() -> None:
    """By exact op and by glob on the module; an op without a module matches no glob."""
    entries = OpDtypeMap(OpGraph.read(make.CONVERTED / "nested.int8.tflite"))
    assert entries.counts() == {"ADD": 3, "FULLY_CONNECTED": 8}
    assert len(entries.ops("ADD")) == 3
    assert entries.ops("add") == ()
    assert entries.ops(module="*") == ()
    assert repr(entries) == "<OpDtypeMap of 11 ops: 11 int8>"
    same = OpDtypeMap(OpGraph.read(make.CONVERTED / "nested.int8.tflite"))
    assert entries == same
    assert entries != OpDtypeMap(OpGraph.read(make.CONVERTED / "nested.float.tflite"))
