"""Check what the interpreter follows blindly while it is built, before tables are verified."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from pytest_edgeq.numerics.findings import Place
from pytest_edgeq.tflite.verify.flexbuffer import is_flexbuffer

if TYPE_CHECKING:
    from pytest_edgeq.tflite.mapped import Buffer

_WITH_FLEXBUFFERS = (
    b"AudioSpectrogram",
    b"Mfcc",
    b"NumericVerify",
    b"TFLite_Detection_PostProcess",
)
"""Custom ops whose `Init` reads its options (tflite/kernels, ai-edge-litert 2.3.0)."""


def problem_unbuilt(content: Buffer) -> str:
    """
    Say what would end the process that builds an interpreter of a file; nothing where all is well.

    The pointer to the list of subgraphs may be absent to the verifier of flatbuffers, and is
    followed (`InterpreterBuilder::operator()` in interpreter_builder.cc, ai-edge-litert 2.3.0).
    Options of custom ops are bytes to it. Nothing is said of content whose tables lead out of it,
    which that verifier refuses.
    """
    from ai_edge_litert import schema_py_generated as schema

    try:
        model = schema.Model.GetRootAs(content, 0)
        if model.SubgraphsIsNone():
            return "it has no list of subgraphs"
        codes = [model.OperatorCodes(i).CustomCode() for i in range(model.OperatorCodesLength())]
        if not any(code in _WITH_FLEXBUFFERS for code in codes):
            return ""
        return _options_problem(model, codes, content)
    except (struct.error, IndexError, TypeError, ValueError, OverflowError):
        return ""


def _options_problem(model: Any, codes: list[bytes | None], content: Buffer) -> str:
    for number in range(model.SubgraphsLength()):
        subgraph = model.Subgraphs(number)
        for index in range(subgraph.OperatorsLength()):
            operator = subgraph.Operators(index)
            code = codes[operator.OpcodeIndex()]
            if code in _WITH_FLEXBUFFERS and not is_flexbuffer(_options(operator, content)):
                where = Place("op", f"CUSTOM:{code.decode()}", index, subgraph=number)
                return f"{where}: its custom options are no whole flexbuffer"
    return ""


def _options(operator: Any, content: Buffer) -> bytes:
    """Return the options, which large files keep behind the flatbuffer."""
    given = operator.CustomOptionsAsNumpy()
    if isinstance(given, np.ndarray):
        return given.tobytes()
    start = operator.LargeCustomOptionsOffset()
    return bytes(content[start : start + operator.LargeCustomOptionsSize()]) if start > 1 else b""
