"""
The input of dynamically quantized kernels as they see it.

With floats outside and integer weights inside, TFLite's kernels quantize the input to int8 at each
run and sum whole numbers. Symmetric: scale max|x| / 127, `SymmetricQuantizeFloats`. Asymmetric:
(max(x, 0) − min(x, 0)) / 255 with a rounded zero point, `AsymmetricQuantizeFloats`, both in
`internal/reference/portable_tensor_utils.cc`. Which, and over what, is the kernel's choice:

| op | over | which |
| --- | --- | --- |
| FULLY_CONNECTED | a row of the input | `asymmetric_quantize_inputs` |
| FULLY_CONNECTED, int4, from 32 to 4 values on | a row | symmetric |
| FULLY_CONNECTED, int4 by blocks | a row | asymmetric |
| BATCH_MATMUL | a row of the left side | `asymmetric_quantize_inputs` |
| CONV_2D, scales that differ, or groups | an image of the batch | asymmetric |
| CONV_2D, one scale | an image | symmetric |
| DEPTHWISE_CONV_2D, TRANSPOSE_CONV | an image | asymmetric |
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.localize.kernels.site import option
from pytest_edgeq.tflite.graph import Op, OpGraph, Tensor

__all__ = ["HybridInput", "hybrid_position", "is_packed"]

Floats = npt.NDArray[Any]

_WEIGHTS = ("int8", "uint8", "int4", "int2")

#: Position of the input that is quantized and of the weights.
_SIDES = {
    "FULLY_CONNECTED": (0, 1),
    "BATCH_MATMUL": (0, 1),
    "CONV_2D": (0, 1),
    "DEPTHWISE_CONV_2D": (0, 1),
    "TRANSPOSE_CONV": (2, 1),
}


def hybrid_position(graph: OpGraph, op: Op) -> int | None:
    """Position of the input that the kernel quantizes at each run; None where it quantizes none."""
    if op.name not in _SIDES:
        return None
    data, weights = _SIDES[op.name]
    left, right = graph.tensor(op, op.inputs[data]), graph.tensor(op, op.inputs[weights])
    return data if left.dtype == "float32" and right.dtype in _WEIGHTS else None


class HybridInput:
    """
    What the kernel of an op makes of its input before it multiplies.

    Args:
        graph: The file.
        op: An op with a `hybrid_position`.
        runtime: `builtin`, `reference` or `xnnpack`.
    """

    def __init__(self, graph: OpGraph, op: Op, *, runtime: str = "builtin") -> None:
        weights = graph.tensor(op, op.inputs[1])
        self._turned = op.name == "BATCH_MATMUL" and bool(option(graph, op, "AdjX"))
        # What gets one scale each: so many values in a row, or an image of the batch.
        self._by_row = op.name in ("FULLY_CONNECTED", "BATCH_MATMUL")
        self._size = weights.shape[-1] if op.name == "FULLY_CONNECTED" else None
        self._is_asymmetric = _is_asymmetric(graph, op, weights, runtime)

    def seen(self, x: Floats) -> Floats:
        """
        The op's input as the kernel sees it after quantizing it.

        Args:
            x: The input that is quantized, of the shape that it has in the file. The kernel takes
                float32; float64 is rounded to it first.

        Returns:
            Dequantized, of the same shape and dtype.
        """
        codes, scale = self._quantized(self._rows(x))
        seen: Floats = codes.astype(x.dtype, copy=False)
        seen *= scale.astype(x.dtype)
        if self._turned:
            seen = seen.reshape(x.swapaxes(-1, -2).shape)
            return np.ascontiguousarray(seen.swapaxes(-1, -2))
        return seen.reshape(x.shape)

    def ties(self, x: Floats) -> float:
        """
        What the inputs that lie halfway between two codes may be off, in sum.

        A quotient of float32 is known to two units in the last place, so which code such a value
        takes depends on the order in which a processor multiplies and adds. Each is worth one step.

        Returns:
            In units of the input; the results are off by as much times the largest weight at most.
        """
        rows = self._rows(x)
        codes, scale = self._quantized(rows)
        # The zero point is a whole number, so the halves are the same with it and without.
        apart = rows / scale
        apart -= codes
        np.abs(apart, out=apart)
        apart -= 0.5
        # float32 tells halves up to 2^−14 at most: what is near is looked at again.
        near = np.abs(apart, out=apart) < 1e-3
        line = np.nonzero(near)[0]
        steps = rows[near].astype(np.float64) / scale[line, 0]
        tied = np.abs(np.abs(steps - codes[near]) - 0.5) <= (np.abs(steps) + 256) * 2.0**-22
        return float(scale[line, 0][tied].sum(dtype=np.float64))

    def _rows(self, x: Floats) -> Floats:
        seen = np.ascontiguousarray(x.swapaxes(-1, -2) if self._turned else x, np.float32)
        if self._by_row:
            return seen.reshape(-1, self._size or seen.shape[-1])
        return seen.reshape(len(seen), -1)

    def _quantized(self, rows: Floats) -> tuple[Floats, Floats]:
        return _asymmetric(rows) if self._is_asymmetric else _symmetric(rows)


def _is_asymmetric(graph: OpGraph, op: Op, weights: Tensor, runtime: str) -> bool:
    # XNNPACK knows no other way (`src/operators/`, `qd8`).
    if weights.block_scales >= 0 or runtime == "xnnpack":
        return True
    if runtime == "builtin" and is_packed(op, weights):
        return False
    if op.name in ("FULLY_CONNECTED", "BATCH_MATMUL"):
        return bool(option(graph, op, "AsymmetricQuantizeInputs"))
    if op.name == "CONV_2D":
        has_groups = weights.shape[3] != graph.tensor(op, op.inputs[0]).shape[3]
        return has_groups or len(np.unique(weights.scales)) > 1
    return True


def is_packed(op: Op, weights: Tensor) -> bool:
    """
    Whether FULLY_CONNECTED takes its own kernel for int4, which knows no zero points.

    (`fully_connected.cc`, `Prepare`: even rows of 32 at least, 4 outputs at least.)
    """
    if op.name != "FULLY_CONNECTED" or weights.dtype != "int4" or not weights.is_constant:
        return False
    n_out, n_in = weights.shape[0], weights.shape[-1]
    return n_in % 2 == 0 and n_in >= 32 and n_out >= 4


def _symmetric(rows: Floats) -> tuple[Floats, Floats]:
    """Codes −127 … 127, and their scales, max|x| / 127."""
    reach = np.maximum(rows.max(axis=1, keepdims=True), -rows.min(axis=1, keepdims=True))
    empty = reach == 0
    safe = np.where(empty, np.float32(1), reach)
    scale = np.where(empty, np.float32(1), safe / np.float32(127))
    codes = _rounded(rows * (np.float32(127) / safe))
    return np.clip(codes, -127, 127, out=codes), scale


def _asymmetric(rows: Floats) -> tuple[Floats, Floats]:
    """Codes less their zero point, over the range with 0 in it, and their scales."""
    low = np.minimum(rows.min(axis=1, keepdims=True), 0).astype(np.float64)
    high = np.maximum(rows.max(axis=1, keepdims=True), 0).astype(np.float64)
    empty = low == high
    scale = np.where(empty, 1.0, (high - low) / 255)
    # From the end that is nearer to 0 in codes, which the rounding harms less.
    by_low = 128 + np.abs(low / scale) < 127 + np.abs(high / scale)
    exact = np.where(by_low, -128 - low / scale, 127 - high / scale)
    zero_point = np.where(empty, 0, np.clip(_rounded(exact), -128, 127)).astype(np.float32)
    held = scale.astype(np.float32)
    codes = rows * (np.float32(1) / held)
    codes += zero_point
    codes = _rounded(codes)
    np.clip(codes, -128, 127, out=codes)
    codes -= zero_point
    return codes, held


def _rounded(values: Floats) -> Floats:
    """Half away from zero, as C's `round`. What is cut off, and its double, are exact."""
    whole: Floats = np.trunc(values)
    rest = np.subtract(values, whole)
    rest *= 2
    whole += np.trunc(rest, out=rest)
    return whole
