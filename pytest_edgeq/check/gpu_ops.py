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


def beyond_float16(
    operands: Iterable[npt.NDArray[Any]],
    result: npt.NDArray[Any],
    computed: npt.NDArray[Any],
    n_terms: int,
) -> str:
    """
    Return what float16 cannot hold of an op; empty if it can hold all.

    Args:
        operands: Of the op.
        result: In float32.
        computed: The result in float16.
        n_terms: Number of terms that one value of the result sums.
    """
    broken = np.isfinite(result) & ~np.isfinite(computed)
    for each in (*operands, result):
        if not np.issubdtype(each.dtype, np.floating):
            continue
        is_beside = broken.any() and each.shape == broken.shape
        sizes = np.abs(each[broken] if is_beside else each)
        greatest = float(sizes[np.isfinite(sizes)].max(initial=0.0))
        if greatest > GREATEST_HALF:
            limit = f"{greatest:,.6g} is beyond float16's greatest value, {GREATEST_HALF:,.0f}"
            if each is result and n_terms > 1:
                most = int(n_terms * GREATEST_HALF / greatest)
                limit += f", as is each sum of more than {most:,} terms of this size"
            return f"overflow: {limit}: {_SCALE_DOWN}"
        if 0 < greatest < _LEAST / 2:
            return (
                f"underflow: {greatest:.3g} is below float16's least value, {_LEAST:.3g}, and "
                "becomes 0: choose a greater epsilon, or scale the operands up in the model"
            )
    if broken.any():
        return (
            "overflow: a product or a partial sum is beyond float16's greatest value, "
            f"{GREATEST_HALF:,.0f}, though the result is not: {_SCALE_DOWN}"
        )
    return ""


_SCALE_DOWN: Final = "scale the operands down in the model, or compute the mean in place of the sum"
