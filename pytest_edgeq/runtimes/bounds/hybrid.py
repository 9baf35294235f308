"""
The input of dynamically quantized kernels after its quantization.

With float activations and integer weights, TFLite's kernels quantize the input to int8 at each
run and sum integers. Symmetric: scale max|x| / 127, `SymmetricQuantizeFloats`. Asymmetric:
(max(x, 0) − min(x, 0)) / 255 with a rounded zero point, `AsymmetricQuantizeFloats`, both in
`internal/reference/portable_tensor_utils.cc`. Scheme and granularity depend on the kernel:

| op | granularity | scheme |
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

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pytest_edgeq.numerics.arrays import contiguous
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.ops import facts_of
from pytest_edgeq.tflite.subgraph import Op, Tensor

Floats = npt.NDArray[Any]

_WEIGHTS = ("int8", "uint8", "int4", "int2")

# Elements that are quantized together: a quarter of a MB each of a few arrays.
_TILE = 1 << 16

# float32 resolves halves up to 2^−14 at most: values as near as this are checked again.
_NEAR = 1e-3


def hybrid_position(graph: OpGraph, op: Op) -> int | None:
    """Return the position of the input that a kernel quantizes, or None."""
    facts = facts_of(op.name)
    if not facts.dynamic:
        return None
    data = facts.inputs[0]
    left, right = graph.tensor(op, op.inputs[data]), graph.tensor(op, op.inputs[facts.weights[0]])
    return data if left.dtype == "float32" and right.dtype in _WEIGHTS else None


class _Steps(NamedTuple):
    """Quantization of rows, a value a row."""

    factor: Floats
    zero_point: Floats  # added to the product
    scale: Floats  # size of one step


class Halves(NamedTuple):
    """Elements of an input near halfway between two codes: rows, parts and places there."""

    steps: _Steps
    near: list[tuple[slice, slice, npt.NDArray[np.intp]]]


class HybridInput:
    """Quantization of an op's float input inside the kernel, before the product."""

    def __init__(self, graph: OpGraph, op: Op) -> None:
        weights = graph.tensor(op, op.inputs[1])
        self._is_transposed = op.name == "BATCH_MATMUL" and bool(graph.option(op, "AdjX", False))
        # Granularity: so many values in a row, or an image of the batch.
        self._by_row = op.name in ("FULLY_CONNECTED", "BATCH_MATMUL")
        self._size = weights.shape[-1] if op.name == "FULLY_CONNECTED" else None
        self._is_asymmetric = _is_asymmetric(graph, op, weights)
        self._low = -128 if self._is_asymmetric else -127

    def accepts(self, shape: Sequence[int]) -> bool:
        """Return whether the op can quantize a shape; a wrongly wired op cannot."""
        return len(shape) > 0 and math.prod(shape) % (self._size or 1) == 0

    def fake_quantize_with_halves(self, x: Floats) -> tuple[Floats, Halves]:
        """Return the fake-quantized input, and its elements near halfway between codes."""
        rows = self._rows(x)
        seen = np.empty(rows.shape, x.dtype)
        near = []
        with np.errstate(all="ignore"):
            low, high = rows.min(axis=1, keepdims=True), rows.max(axis=1, keepdims=True)
            steps = (_asymmetric if self._is_asymmetric else _symmetric)(low, high)
            # Values whose step underflows float32 have no defined result.
            steps.factor[np.isinf(steps.factor)] = np.nan
            for lines, part in _tiles(*rows.shape):
                own = _Steps._make(each[lines] for each in steps)
                codes, places = _codes(rows[lines, part], own, self._low)
                np.multiply(codes, own.scale, out=seen[lines, part], dtype=x.dtype)
                near.append((lines, part, places))
        if not self._is_transposed:
            return seen.reshape(x.shape), Halves(steps, near)
        seen = seen.reshape(x.swapaxes(-1, -2).shape)
        return contiguous(seen.swapaxes(-1, -2)), Halves(steps, near)

    def rounding_ambiguity(self, x: Floats, halves: Halves) -> float:
        """
        Return the summed error of the inputs halfway between two codes, in units of the input.

        A float32 quotient is known to two units in the last place, so the code of such a value
        depends on the order in which a processor multiplies and adds. Each counts one step.
        """
        rows = self._rows(x)
        total = 0.0
        for lines, part, places in halves.near:
            tile = rows[lines, part]
            line = places // max(tile.shape[1], 1)
            values = tile[line, places - line * tile.shape[1]]
            steps = _Steps._make(each[lines][line, 0] for each in halves.steps)
            codes, _ = _codes(values, steps, self._low)
            exact = values.astype(np.float64) / steps.scale
            distances = np.abs(np.abs(exact - codes) - 0.5)
            tied = distances <= (np.abs(exact) + 256) * 2.0**-22
            total += float(steps.scale[tied].sum(dtype=np.float64))
        return total

    def _rows(self, x: Floats) -> Floats:
        seen = contiguous(x.swapaxes(-1, -2) if self._is_transposed else x, np.float32)
        size = self._size or seen.shape[-1] if self._by_row else math.prod(seen.shape[-3:])
        return seen.reshape(-1, size)


def _is_asymmetric(graph: OpGraph, op: Op, weights: Tensor) -> bool:
    if weights.block_scales >= 0:
        return True
    if is_packed(op, weights):
        return False
    if op.name in ("FULLY_CONNECTED", "BATCH_MATMUL"):
        return bool(graph.option(op, "AsymmetricQuantizeInputs", False))
    if op.name == "CONV_2D":
        has_groups = weights.shape[3] != graph.tensor(op, op.inputs[0]).shape[3]
        return has_groups or len(np.unique(weights.scales)) > 1
    return True


def is_packed(op: Op, weights: Tensor) -> bool:
    """
    Return whether FULLY_CONNECTED uses its int4 kernel, which ignores zero points.

    (`fully_connected.cc`, `Prepare`: even rows of 32 at least, 4 outputs at least.)
    """
    if op.name != "FULLY_CONNECTED" or weights.dtype != "int4" or not weights.is_constant:
        return False
    n_out, n_in = weights.shape[0], weights.shape[-1]
    return n_in % 2 == 0 and n_in >= 32 and n_out >= 4


def _symmetric(low: Floats, high: Floats) -> _Steps:
    """Return the symmetric quantization: codes −127 … 127, scales max|x| / 127."""
    reach = np.maximum(high, -low)
    empty = reach == 0
    safe = np.where(empty, np.float32(1), reach)
    scale = np.where(empty, np.float32(1), safe / np.float32(127))
    return _Steps(np.float32(127) / safe, np.zeros_like(safe), scale)


def _asymmetric(low: Floats, high: Floats) -> _Steps:
    """Return the asymmetric quantization of the range, extended to 0."""
    low = np.minimum(low, 0).astype(np.float64)
    high = np.maximum(high, 0).astype(np.float64)
    scale = (high - low) / 255
    empty = scale == 0
    scale[empty] = 1.0
    below, above = low / scale, high / scale
    # Computed from the end nearer to 0 in codes, where rounding errs less.
    zero_point = _rounded(np.where(128 - below < 127 + above, -128 - below, 127 - above))
    zero_point[empty] = 0.0
    stored = scale.astype(np.float32)
    return _Steps(np.float32(1) / stored, zero_point.astype(np.float32), stored)


def _tiles(count: int, size: int) -> Iterator[tuple[slice, slice]]:
    """Yield tiles of rows that fit a processor's cache."""
    lines, part = max(_TILE // max(size, 1), 1), min(size, _TILE)
    for line in range(0, count, lines):
        for start in range(0, size, max(part, 1)):
            yield slice(line, line + lines), slice(start, start + part)


def _codes(rows: Floats, steps: _Steps, low: int) -> tuple[Floats, npt.NDArray[np.intp]]:
    """Return codes from `low` to 127, minus their zero point, and the elements near halfway."""
    exact = rows * steps.factor
    exact += steps.zero_point
    codes = np.rint(exact)
    rest = np.subtract(exact, codes)
    near = (np.abs(rest, out=rest) > 0.5 - _NEAR).reshape(-1).nonzero()[0]
    if near.size:
        # Halves are rounded away from zero, as by C's `round`.
        halves = near[rest.reshape(-1)[near] == 0.5]
        exact = exact.reshape(-1)[halves]
        codes.reshape(-1)[halves] = exact + np.copysign(np.float32(0.5), exact)
    np.clip(codes, low, 127, out=codes)
    codes -= steps.zero_point
    return codes, near


def _rounded(values: Floats) -> Floats:
    """Round half away from zero, as C's `round`; all steps are exact."""
    whole: Floats = np.trunc(values)
    whole += np.trunc(2 * (values - whole))
    return whole
