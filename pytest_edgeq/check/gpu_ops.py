"""Rounding of single ops on LiteRT's GPU engine, and values beyond the range of float16."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pytest_edgeq.runtimes.bounds import float_bound
from pytest_edgeq.runtimes.bounds.site import reach_of, scale_of
from pytest_edgeq.runtimes.gpu_known import Explanation
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.subgraph import Op

_Array = npt.NDArray[Any]

HALF_UNIT: Final = 2.0**13
"""Half a unit in the last place of float16, 2^-11, as a multiple of float32's."""

GREATEST_HALF: Final = float(np.finfo(np.float16).max)

OVERFLOWN: Final = 2.0**-8
"""Relative error allowed of a value that is too large for float16."""

LEAST_HALF: Final = float(np.finfo(np.float16).smallest_subnormal)

BY_EXPONENTIALS: Final = ("TANH", "ELU")
"""Ops that the engine computes from e^x: near 0 its error is that of 1."""

STEPS: Final = ("CEIL", "FLOOR", "FLOOR_DIV", "FLOOR_MOD", "ROUND", "SIGN")
"""Ops with a discontinuous result."""


def _of_result(operands: Sequence[_Array], result: _Array) -> _Array:
    """Return the size of each value of a result: its operands are off by a share of themselves."""
    size: _Array = np.abs(result)
    return size


def _of_any(operands: Sequence[_Array], result: _Array) -> _Array:
    """Return the greatest size of the operands and the result, by element."""
    sizes = [np.broadcast_to(np.abs(each), result.shape) for each in operands]
    greatest: _Array = np.max([np.abs(result), *sizes], axis=0)
    return greatest


BY_ELEMENT: Final[dict[str, Callable[[Sequence[_Array], _Array], _Array]]] = {
    **dict.fromkeys(("ABS", "DIV", "MUL", "NEG", "RSQRT", "SQRT"), _of_result),
    **dict.fromkeys(("ADD", "MAXIMUM", "MINIMUM", "SUB"), _of_any),
}
"""Sizes that the error of an elementwise op is relative to: a mask of -1e4 hides no other value."""


def subnormal_error(operands: Iterable[_Array], result: _Array) -> _Array:
    """Return the error of a result by operands that float16 rounds to multiples of its least."""
    error = np.full(result.shape, LEAST_HALF)
    for each in operands:
        with np.errstate(divide="ignore", invalid="ignore"):
            slope = np.abs(result / each)
        error += LEAST_HALF * np.where(np.isfinite(slope), slope, 0.0)
    return error


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
) -> Explanation | None:
    """
    Explain which values of an op overflow or underflow float16, if any do.

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
            text = f"{greatest:,.6g} is above the greatest value of float16, {GREATEST_HALF:,.0f}"
            if each is result and n_terms > 1:
                most = int(n_terms * GREATEST_HALF / greatest)
                text += f"; sums of more than {most:,} terms of this size overflow"
            return Explanation(f"overflow: {text}", _SCALE_DOWN)
        if 0 < greatest < LEAST_HALF / 2:
            return Explanation(
                f"underflow: {greatest:.3g} is below the least value of float16, {LEAST_HALF:.3g}, "
                "and becomes 0",
                "use a larger epsilon, or scale the operands up in the model",
            )
    if broken.any():
        return Explanation(
            "overflow: a product or a partial sum is above the greatest value of float16, "
            f"{GREATEST_HALF:,.0f}, although the result is not",
            _SCALE_DOWN,
        )
    return None


_SCALE_DOWN: Final = "scale the operands down in the model, or use a mean in place of a sum"
