"""Rounding of single ops on LiteRT's GPU engine, and what float16 cannot hold."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pytest_edgeq.runtimes.bounds import float_bound
from pytest_edgeq.runtimes.bounds.site import reach_of, scale_of
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.subgraph import Op

HALF_UNIT: Final = 2.0**13
"""Half a unit in the last place of float16, 2^-11, in those of float32."""

GREATEST_HALF: Final = float(np.finfo(np.float16).max)

OVERFLOWN: Final = 2.0**-8
"""Error of a value beyond float16's range, relative, of an engine that holds it all the same."""

_LEAST: Final = float(np.finfo(np.float16).smallest_subnormal)


BY_EXPONENTIALS: Final = ("TANH", "ELU")
"""Ops that the engine computes from e^x: near 0 its error is that of 1."""

STEPS: Final = ("CEIL", "FLOOR", "FLOOR_DIV", "FLOOR_MOD", "ROUND", "SIGN")
"""Ops whose result jumps."""


def float_error(graph: OpGraph, op: Op, tensor: int, *, half: bool) -> float:
    """
    Return the error of a quantized op that is computed in floats, in LSB of an output.

    The engine dequantizes operands, computes in floats and rounds the result to codes.
    """
    ends = [graph.tensor(op, index) for index in (*op.inputs, tensor) if index >= 0]
    reaches = [
        reach_of(each) * scale
        for each in ends
        if not each.is_constant and (scale := scale_of(each)) is not None
    ]
    scale = scale_of(graph.tensor(op, tensor))
    bound = float_bound(graph, op, half=half)
    return bound * max(reaches, default=0.0) / scale if scale else 0.0


def beyond_float16(values: Iterable[npt.NDArray[Any]]) -> str:
    """Return which values of an op float16 cannot hold; empty if it can hold all."""
    floats = [np.abs(each) for each in values if np.issubdtype(each.dtype, np.floating)]
    finite = [each[np.isfinite(each) & (each > 0)] for each in floats]
    greatest = max((float(each.max(initial=0.0)) for each in finite), default=0.0)
    if greatest > GREATEST_HALF:
        return (
            f"overflow: {greatest:,.6g} is beyond float16's greatest value, {GREATEST_HALF:,.0f}: "
            "scale the operands down in the model, or compute the mean in place of the sum"
        )
    least = min((float(each.min(initial=1.0)) for each in finite), default=1.0)
    if least < _LEAST:
        return (
            f"underflow: {least:.3g} is below float16's least value, {_LEAST:.3g}, and becomes 0: "
            "choose a greater epsilon, or scale the operands up in the model"
        )
    return ""
