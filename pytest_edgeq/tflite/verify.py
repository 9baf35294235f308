"""
Verify properties of a `.tflite` file on which kernels rely unchecked.

These are the sizes of tensors, the operands of ops, and the dtypes of outputs. The child process
in which a file from elsewhere is first run protects from immediate crashes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pytest_edgeq.tflite.boundary import bits_of
from pytest_edgeq.tflite.flatbuffer import damaged
from pytest_edgeq.tflite.ops import facts_of

if TYPE_CHECKING:
    from pytest_edgeq.tflite.subgraph import Op, Subgraph, Tensor


_NAME_CHARACTERS = 80

_MOST_BYTES = 1 << 40
"""A terabyte for one tensor: beyond any machine, and the kernels' own sums may overflow."""


def verify(model: Any, subgraphs: Sequence[Subgraph]) -> None:
    """Verify every tensor and every op of a file."""
    for subgraph in subgraphs:
        problem = next(_tensor_problems(model, subgraph), "") or next(_op_problems(subgraph), "")
        if problem:
            raise damaged(problem)


def _op_place(op: Op) -> str:
    return str(op.place._replace(name=op.name[:_NAME_CHARACTERS]))


def _tensor_problems(model: Any, subgraph: Subgraph) -> Iterator[str]:
    for tensor in subgraph.tensors:
        problem = _shape_or_data_problem(model, tensor) or _quantization_problem(subgraph, tensor)
        if tensor.is_constant and tensor.index in subgraph.inputs:
            problem = problem or "it is an input, and a constant"
        if problem:
            name = f" ({tensor.name[:_NAME_CHARACTERS]!r})" if tensor.name else ""
            # Most files have one subgraph, which need not be named.
            end = f" of subgraph {subgraph.index}" if subgraph.index else ""
            yield f"tensor {tensor.index}{name}{end}: {problem}"


def _shape_or_data_problem(model: Any, tensor: Tensor) -> str:
    shape, bits = list(tensor.shape), bits_of(tensor.dtype)
    if min(shape, default=0) < 0:
        return f"its shape {shape} has a negative dimension"
    if math.prod(shape) * (bits or 8) > _MOST_BYTES * 8:
        return f"its shape {shape} is of more elements than any memory holds"
    if tensor.is_external or not tensor.is_constant:
        return ""
    if tensor.is_variable:
        return "it is a variable, and has data"
    if bits is None or tensor.is_sparse:
        return ""
    buffer = model.Buffers(tensor.buffer)
    size = buffer.Size() if buffer.DataIsNone() else buffer.DataLength()
    expected = -(-math.prod(shape) * bits // 8)
    if size == expected:
        return ""
    needs = f"{tensor.dtype} {shape} needs {expected:,} bytes"
    return f"{needs}, its buffer {tensor.buffer} has {size:,}"


def _quantization_problem(subgraph: Subgraph, tensor: Tensor) -> str:
    if tensor.block_scales >= 0:
        holder = subgraph.tensors[tensor.block_scales]
        if tensor.block_size < 0:
            return f"it has blocks of {tensor.block_size} elements"
        if not holder.is_constant or not holder.is_floating_point:
            return f"its scales are in tensor {holder.index}, which is no constant of floats"
        return ""
    n_scales = len(tensor.scales)
    # Nothing reads those of floats.
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


def _op_problems(subgraph: Subgraph) -> Iterator[str]:
    """Yield the problems of the operands of ops, in execution order."""
    tensors, inputs = subgraph.tensors, set(subgraph.inputs)
    computed: dict[int, Op] = {}
    for op in subgraph.ops:
        problem = (
            _count_problem(op)
            or _input_problem(op, tensors, inputs, computed)
            or _dtype_problem(op, tensors)
        )
        if problem:
            yield f"{_op_place(op)}: {problem}"
        for index in (i for i in op.outputs if i >= 0):
            problem = ""
            if tensors[index].is_constant:
                problem = "is a constant"
            elif tensors[index].is_variable:
                problem = "is a variable"
            elif index in inputs:
                problem = "is an input of the graph"
            elif index in computed:
                problem = f"{_op_place(computed[index])} has written already"
            if problem:
                name = repr(tensors[index].name[:_NAME_CHARACTERS])
                yield f"{_op_place(op)}: it writes tensor {index} ({name}), which {problem}"
            computed[index] = op


def _count_problem(op: Op) -> str:
    facts = facts_of(op.name)
    if facts.least is None:
        return ""
    sides = ("input", op.inputs, facts.least[0]), ("output", op.outputs, facts.least[1])
    for noun, operands, least in sides:
        if len(operands) < least:
            plural = "" if len(operands) == 1 else "s"
            return f"it has {len(operands)} {noun}{plural}, expected {least}"
    if -1 in op.inputs[: facts.required or facts.least[0]]:
        return f"its input {op.inputs.index(-1)} is left out, and is not optional"
    if -1 in op.outputs:
        return "an output is left out"
    return ""


def _input_problem(
    op: Op, tensors: Sequence[Tensor], inputs: set[int], computed: dict[int, Op]
) -> str:
    for index in op.inputs:
        if index < 0 or index in computed or index in inputs:
            continue
        tensor = tensors[index]
        # The empty shape of a scalar is an empty constant.
        if tensor.is_constant or tensor.is_variable or 0 in tensor.shape:
            continue
        return f"it reads tensor {index} ({tensor.name[:80]!r}), which no op before it computes"
    return ""


def _dtype_problem(op: Op, tensors: Sequence[Tensor]) -> str:
    facts = facts_of(op.name)
    if facts.dtype_of is None:
        return ""
    expected = tensors[op.inputs[facts.dtype_of]].dtype
    others = facts.other_dtypes if expected in ("int8", "uint8", "int4", "int2") else ()
    for index in op.outputs:
        dtype = tensors[index].dtype
        if dtype not in (expected, *others):
            return f"its output, tensor {index}, is {dtype}, and its input {expected}"
    return ""
