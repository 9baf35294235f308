"""Check shapes, sizes and quantization parameters of tensors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from pytest_edgeq.tflite.verify.damage import damaged, tensor_place
from pytest_edgeq.tflite.verify.sparsity import stored_elements

if TYPE_CHECKING:
    import numpy.typing as npt

    from pytest_edgeq.tflite.mapped import Buffer
    from pytest_edgeq.tflite.subgraph import Subgraph, Tensor


_BITS = {
    **dict.fromkeys(("int2", "uint2"), 2),
    **dict.fromkeys(("int4", "uint4"), 4),
    **dict.fromkeys(("int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"), 8),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 16),
    **dict.fromkeys(("int32", "uint32", "float32"), 32),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 64),
    "complex128": 128,
}
"""Of the dtypes whose elements all have one size."""

_MOST_BYTES = 1 << 40
"""No machine that runs a file has a terabyte for one tensor, and the kernels' own sums overflow."""


def verify_tensors(model: Any, raw: Any, subgraph: Subgraph, content: Buffer) -> None:
    """
    Check every tensor of a subgraph.

    Raises:
        ValueError: Names the tensor and what is wrong with it.
    """
    for tensor in subgraph.tensors:
        problem = (
            _shape_problem(tensor)
            or _data_problem(model, raw, subgraph, tensor, content)
            or _quantization_problem(subgraph, tensor)
        )
        if problem:
            raise damaged(tensor_place(subgraph, tensor), problem)


def _shape_problem(tensor: Tensor) -> str:
    bits = _BITS.get(tensor.dtype, 8)
    if min(tensor.shape, default=0) < 0:
        return f"its shape {list(tensor.shape)} has a negative dimension"
    if math.prod(tensor.shape) * bits > _MOST_BYTES * 8:
        return f"its shape {list(tensor.shape)} is of more elements than any memory holds"
    return ""


def _data_problem(model: Any, raw: Any, subgraph: Subgraph, tensor: Tensor, content: Buffer) -> str:
    if tensor.is_external:
        return _external_problem(model, raw.Tensors(tensor.index), tensor)
    if not tensor.buffer:
        return ""
    buffer = model.Buffers(tensor.buffer)
    inside = not buffer.DataIsNone()
    if not inside and buffer.Offset() <= 1:
        return ""
    if tensor.is_variable:
        return "it is a variable, and has data"
    size = buffer.DataLength() if inside else buffer.Size()
    if tensor.dtype == "string":
        return _string_problem(_bytes(buffer, content))
    bits = _BITS.get(tensor.dtype)
    if bits is None:
        return ""
    elements = math.prod(tensor.shape)
    if tensor.is_sparse:
        stored = stored_elements(raw.Tensors(tensor.index).Sparsity(), tensor.shape)
        if isinstance(stored, str):
            return stored
        elements = stored
    expected = -(-elements * bits // 8)
    if size != expected:
        return (
            f"{tensor.dtype} {list(tensor.shape)} needs {expected:,} bytes, its buffer "
            f"{tensor.buffer} has {size:,}"
        )
    return ""


def _bytes(buffer: Any, content: Buffer) -> npt.NDArray[np.uint8]:
    """Return a view of a buffer's data."""
    if buffer.DataIsNone():
        return np.frombuffer(content, np.uint8, buffer.Size(), buffer.Offset())
    data = buffer.DataAsNumpy()
    return data if isinstance(data, np.ndarray) else np.empty(0, np.uint8)


def _string_problem(data: npt.NDArray[np.uint8]) -> str:
    """
    Check the head of packed strings: their number, where each starts, where the last ends.

    Kernels read at these offsets without a look (tensorflow/lite/string_util.h).
    """
    if not data.size:
        return ""
    if data.size < 4:
        return f"its {data.size} bytes are no list of strings"
    count = int(data[:4].view("<i4")[0])
    head = 4 * (count + 2)
    if count < 0 or head > data.size:
        return f"its {data.size:,} bytes cannot hold a list of {count:,} strings"
    starts = data[4:head].view("<i4").astype(np.int64)
    if starts[0] != head or starts[-1] != data.size or np.any(np.diff(starts) < 0):
        return "the offsets of its strings do not lie one behind the other inside its buffer"
    return ""


def _external_problem(model: Any, raw: Any, tensor: Tensor) -> str:
    """Check the entry for data in a file beside this one, which has a number of its own."""
    number = raw.ExternalBuffer()
    entries = (model.ExternalBuffers(i) for i in range(model.ExternalBuffersLength()))
    entry = next((each for each in entries if each.Id() == number), None)
    if entry is None:
        return f"its data is external buffer {number}, which the file does not describe"
    count = model.ExternalBufferGroupsLength()
    if entry.Group() >= count:
        return f"external buffer {number} is of group {entry.Group()}, and there are {count}"
    bits = _BITS.get(tensor.dtype)
    if bits is None or entry.Packing():
        return ""
    expected = -(-math.prod(tensor.shape) * bits // 8)
    if entry.Length() < expected:
        return (
            f"{tensor.dtype} {list(tensor.shape)} needs {expected:,} bytes, external buffer "
            f"{number} has {entry.Length():,}"
        )
    return ""


def _quantization_problem(subgraph: Subgraph, tensor: Tensor) -> str:
    if tensor.block_scales >= 0:
        return _block_problem(subgraph, tensor)
    n_scales = len(tensor.scales)
    # Of floats nothing reads them.
    if not n_scales or tensor.is_floating_point:
        return ""
    if len(tensor.zero_points) != n_scales:
        return f"it has {n_scales} scales and {len(tensor.zero_points)} zero points"
    if not np.isfinite(tensor.scales).all() or tensor.scales.min() < 0:
        bad = tensor.scales[~(np.isfinite(tensor.scales) & (tensor.scales >= 0))]
        return (
            f"it has a scale of {bad[0]:.3g}, expected finite ones of 0 and more: its range was "
            "computed from values that are no numbers, or was never observed"
        )
    if n_scales == 1:
        return ""
    axis, rank = tensor.quantized_dimension, len(tensor.shape)
    if not 0 <= axis < rank:
        return f"its {n_scales} scales are of axis {axis}, and its shape is {list(tensor.shape)}"
    if tensor.shape[axis] != n_scales:
        return (
            f"it has {n_scales} scales for the {tensor.shape[axis]} channels of axis {axis} of "
            f"its shape {list(tensor.shape)}"
        )
    return ""


def _block_problem(subgraph: Subgraph, tensor: Tensor) -> str:
    if tensor.block_size < 0:
        return f"it has blocks of {tensor.block_size} elements"
    holder = subgraph.tensors[tensor.block_scales]
    if holder.index == tensor.index or not (holder.is_constant or holder.is_external):
        return f"its scales are to stand in tensor {holder.index}, which is no constant"
    if not holder.is_floating_point:
        return f"its scales are to stand in tensor {holder.index}, which is {holder.dtype}"
    return ""
