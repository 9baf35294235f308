"""Constants of a file, with all parameters that their values depend on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pytest_edgeq.errors import UnreadableError
from pytest_edgeq.tflite.boundary import bits_of, code_range, shape_along
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.roles import StoredTensor
from pytest_edgeq.tflite.subgraph import Op, Tensor

Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A constant with its quantization parameters, in one layout."""

    dtype: str  # the file's name for it: `int8`, `int4`, `float32`, …
    values: Array  # codes as int64, or floats unchanged
    # float64, broadcasting to `values`; None where the values are floats
    scales: Array | None = None
    zero_points: Array | None = None  # int64, likewise
    grouping: str | None = None  # `per_tensor`, `per_channel`, `blockwise_<size>`; None for floats

    @property
    def floats(self) -> Array:
        """The dequantized values, float64."""
        if self.scales is None or self.zero_points is None:
            return self.values.astype(np.float64)
        floats: Array = (self.values - self.zero_points) * self.scales
        return floats


def read_constant(graph: OpGraph, op: Op, stored: StoredTensor) -> Constant:
    """
    Read a constant operand in the op's layout, with RESHAPE and TRANSPOSE applied.

    Raises:
        UnreadableError: A tensor in a file of its own, of a dtype without values (strings), or
            damaged; the text says which.
    """
    tensor = stored.tensor
    values = _decoded(graph, tensor)
    subgraph = op.subgraph
    parts = [values, *(_spread_parameters(graph, subgraph, tensor) if tensor.is_quantized else ())]
    try:
        for name, argument in _layout_ops(graph, op, stored):
            spread = [np.broadcast_to(each, values.shape) for each in parts]
            change = np.reshape if name == "RESHAPE" else np.transpose
            parts = [change(each, argument) for each in spread]
            values = parts[0]
    except ValueError as error:
        raise UnreadableError(f"tensor {tensor.name!r}: {error}") from error
    if len(parts) == 1:
        return Constant(tensor.dtype, parts[0])
    return Constant(tensor.dtype, parts[0], parts[1], parts[2], tensor.granularity)


def dequantized(graph: OpGraph, subgraph: int, tensor: Tensor) -> Array:
    """Return the dequantized values of a constant, float64, in its stored shape."""
    values = _decoded(graph, tensor)
    if not tensor.is_quantized:
        return values.astype(np.float64)
    return Constant(tensor.dtype, values, *_spread_parameters(graph, subgraph, tensor)).floats


def _decoded(graph: OpGraph, tensor: Tensor) -> Array:
    raw = graph.constant(tensor)
    if (bits_of(tensor.dtype) or 8) < 8:
        values = _unpacked(raw, tensor.dtype)[: math.prod(tensor.shape)]
    elif tensor.dtype == "bfloat16":
        values = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        try:
            values = raw.view(np.dtype(tensor.dtype).newbyteorder("<"))
        except TypeError as error:
            raise UnreadableError(
                f"tensor {tensor.name!r}: {tensor.dtype} holds no numbers that could be compared"
            ) from error
    values = values.reshape(tensor.shape)
    return values if tensor.is_floating_point else values.astype(np.int64)


def _unpacked(raw: npt.NDArray[np.uint8], dtype: str) -> Array:
    """Unpack codes of less than a byte; the first is in the lowest bits."""
    low, high = code_range(dtype)
    mask = high - low
    shifts = np.arange(0, 8, mask.bit_length(), dtype=np.uint8)
    codes: Array = ((raw[:, None] >> shifts) & mask).ravel().astype(np.int64)
    return ((codes - low) & mask) + low


def _spread_parameters(graph: OpGraph, subgraph: int, tensor: Tensor) -> tuple[Array, Array]:
    """Return scales and zero points, broadcasting to the tensor's values."""
    scales = graph.scales(subgraph, tensor).astype(np.float64)
    if tensor.block_scales < 0:
        shape = shape_along(len(scales), len(tensor.shape), tensor.quantized_dimension)
        return scales.reshape(shape), tensor.zero_points.reshape(shape)
    # Blocks lie along the last axis, one row of scales for each index of those before.
    if not tensor.block_size or tensor.block_zero_points >= 0:
        raise UnreadableError(
            f"tensor {tensor.name!r}: scales on several axes, or zero points for each block, are "
            "not read"
        )
    if scales.size * tensor.block_size != math.prod(tensor.shape):
        raise UnreadableError(
            f"tensor {tensor.name!r}: its shape {list(tensor.shape)} is not that of {scales.size} "
            f"blocks of {tensor.block_size} elements"
        )
    rows = (*tensor.shape[:-1], -1)
    return np.repeat(scales.reshape(rows), tensor.block_size, axis=-1), np.zeros(1, np.int64)


def _layout_ops(graph: OpGraph, op: Op, stored: StoredTensor) -> list[tuple[str, tuple[int, ...]]]:
    """Return the RESHAPE and TRANSPOSE ops between a constant and its consumer, in order."""
    subgraph = graph.subgraphs[op.subgraph]
    found: list[tuple[str, tuple[int, ...]]] = []
    index = stored.operand.index
    while index != stored.tensor.index:
        layout_op = subgraph.producer[index]
        if layout_op.name == "RESHAPE":
            found.append((layout_op.name, subgraph.tensors[layout_op.outputs[0]].shape))
        elif layout_op.name == "TRANSPOSE":
            order = graph.constant(graph.tensor(layout_op, layout_op.inputs[1])).view("<i4")
            found.append((layout_op.name, tuple(order.tolist())))
        index = layout_op.inputs[0]
    return found[::-1]
