"""
Check of a `.tflite` file what kernels use without a check, and write beyond their memory by.

Those are the sizes of tensors, the operands of ops, and the dtypes of outputs. What ends a process
at once is left to the child process, in which a file from elsewhere is first run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pytest_edgeq.tflite.subgraph import Op, Subgraph, Tensor


_NAME_CHARACTERS = 80

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

_ARITY = {
    (0, 0): "CALL_ONCE STABLEHLO_COMPOSITE WHILE",
    (0, 1): "HASHTABLE VAR_HANDLE",
    (1, 0): "IF",
    (1, 1): """
        ABS ADD_N AVERAGE_POOL_2D BITCAST BUCKETIZE CAST CEIL COMPLEX_ABS CONCATENATION COS DENSIFY
        DEPTH_TO_SPACE DEQUANTIZE ELU EXP FAKE_QUANT FLOOR GELU HARD_SWISH HASHTABLE_SIZE IMAG
        L2_NORMALIZATION L2_POOL_2D LEAKY_RELU LOCAL_RESPONSE_NORMALIZATION LOG LOGICAL_NOT LOGISTIC
        LOG_SOFTMAX MATRIX_DIAG MAX_POOL_2D NEG PACK QUANTIZE RANDOM_STANDARD_NORMAL RANDOM_UNIFORM
        RANK READ_VARIABLE REAL RELU RELU6 RELU_0_TO_1 RELU_N1_TO_1 RESHAPE ROUND RSQRT SHAPE SIGN
        SIN SKIP_GRAM SOFTMAX SPACE_TO_DEPTH SQRT SQUARE SQUEEZE TANH UNPACK WHERE ZEROS_LIKE
    """,
    (1, 2): "UNIQUE",
    (2, 0): "ASSIGN_VARIABLE",
    (2, 1): """
        ADD ARG_MAX ARG_MIN ATAN2 BATCH_MATMUL BITWISE_XOR BROADCAST_ARGS BROADCAST_TO CONV_2D
        CONV_3D CUMSUM DEPTHWISE_CONV_2D DIV EMBEDDING_LOOKUP EQUAL EXPAND_DIMS FILL FLOOR_DIV
        FLOOR_MOD FULLY_CONNECTED GATHER GATHER_ND GREATER GREATER_EQUAL LESS LESS_EQUAL LOGICAL_AND
        LOGICAL_OR LSH_PROJECTION MATRIX_SET_DIAG MAXIMUM MEAN MINIMUM MIRROR_PAD MUL MULTINOMIAL
        NOT_EQUAL PAD POW PRELU REDUCE_ALL REDUCE_ANY REDUCE_MAX REDUCE_MIN REDUCE_PROD
        RESIZE_BILINEAR RESIZE_NEAREST_NEIGHBOR REVERSE_SEQUENCE REVERSE_V2 RFFT2D RIGHT_SHIFT
        SEGMENT_SUM SPLIT SQUARED_DIFFERENCE SUB SUM TILE TRANSPOSE
    """,
    (2, 2): "TOPK_V2",
    (3, 0): "HASHTABLE_IMPORT",
    (3, 1): """
        BATCH_TO_SPACE_ND CONV_3D_TRANSPOSE DILATE DYNAMIC_UPDATE_SLICE HASHTABLE_FIND PADV2 RANGE
        SCATTER_ND SELECT SELECT_V2 SLICE SPACE_TO_BATCH_ND SPLIT_V TRANSPOSE_CONV
        UNSORTED_SEGMENT_MAX UNSORTED_SEGMENT_MIN UNSORTED_SEGMENT_PROD UNSORTED_SEGMENT_SUM
    """,
    (3, 2): "HASHTABLE_LOOKUP",
    (4, 1): "ONE_HOT SPARSE_TO_DENSE STRIDED_SLICE",
    (5, 1): "EMBEDDING_LOOKUP_SPARSE LSTM RNN SVDF UNIDIRECTIONAL_SEQUENCE_RNN",
    (5, 2): "NON_MAX_SUPPRESSION_V4",
    (6, 3): "NON_MAX_SUPPRESSION_V5",
    (20, 1): "UNIDIRECTIONAL_SEQUENCE_LSTM",
}
"""
The least numbers of inputs and outputs, from `Prepare` in tflite/kernels (ai-edge-litert 2.3.0).

Operands beyond these are optional, or refused by the kernels with a sentence.
"""

_LEAST = {name: counts for counts, names in _ARITY.items() for name in names.split()}

_REQUIRED = {"LSTM": 1, "SVDF": 3, "UNIDIRECTIONAL_SEQUENCE_LSTM": 1}
"""How many of the first inputs may not be left out (−1), of ops with fewer than their least."""

_ALL_REQUIRED = {
    *("ADD_N", "CONCATENATION", "IF", "PACK", "RESHAPE", "STABLEHLO_COMPOSITE", "WHILE"),
}

_KEEPING_DTYPE = {
    **dict.fromkeys(
        (
            *("BATCH_MATMUL", "BATCH_TO_SPACE_ND", "BROADCAST_TO", "CUMSUM", "MEAN", "REDUCE_MAX"),
            *("REDUCE_MIN", "REDUCE_PROD", "RESHAPE", "SOFTMAX", "SPLIT_V", "SQUEEZE", "SUM"),
        ),
        0,
    ),
    **dict.fromkeys(("EMBEDDING_LOOKUP", "SPLIT"), 1),
}
"""
Ops whose kernels write elements of this input's dtype, whichever the output has.

Their `Prepare` functions neither compare the dtypes nor set the output's (ai-edge-litert 2.3.0).
"""

_OTHER_DTYPES = {
    # ai-edge-quantizer 0.10.0 writes it for a product of two constants: the kernels write fewer
    # bytes than the tensor has, which `localize` reports.
    ("BATCH_MATMUL", "float32"),
    ("BATCH_MATMUL", "int32"),
    ("EMBEDDING_LOOKUP", "float16"),
    ("EMBEDDING_LOOKUP", "float32"),
    ("SOFTMAX", "int16"),
}
"""Outputs that these ops can have for inputs of 8 bits or less."""


def verify(model: Any, subgraphs: Sequence[Subgraph]) -> None:
    """
    Check every tensor and every op of a file.

    Raises:
        ValueError: Names the tensor or op and what is wrong with it.
    """
    for subgraph in subgraphs:
        for tensor in subgraph.tensors:
            problem = (
                _shape_problem(tensor)
                or _data_problem(model, tensor)
                or _quantization_problem(subgraph, tensor)
            )
            if problem:
                raise _damaged(_tensor_place(subgraph, tensor), problem)
        _verify_ops(subgraph)


def _damaged(where: str, what: str) -> ValueError:
    return ValueError(f"damaged .tflite file: {where}: {what}; build or download it again")


def _tensor_place(subgraph: Subgraph, tensor: Tensor) -> str:
    name = f" ({tensor.name[:_NAME_CHARACTERS]!r})" if tensor.name else ""
    # Most files have one subgraph, which need not be named.
    end = f" of subgraph {subgraph.index}" if subgraph.index else ""
    return f"tensor {tensor.index}{name}{end}"


def _op_place(op: Op) -> str:
    return str(op.place._replace(name=op.name[:_NAME_CHARACTERS]))


def _shape_problem(tensor: Tensor) -> str:
    if min(tensor.shape, default=0) < 0:
        return f"its shape {list(tensor.shape)} has a negative dimension"
    if math.prod(tensor.shape) * _BITS.get(tensor.dtype, 8) > _MOST_BYTES * 8:
        return f"its shape {list(tensor.shape)} is of more elements than any memory holds"
    return ""


def _data_problem(model: Any, tensor: Tensor) -> str:
    if tensor.is_external or not tensor.is_constant:
        return ""
    if tensor.is_variable:
        return "it is a variable, and has data"
    bits = _BITS.get(tensor.dtype)
    if bits is None or tensor.is_sparse:
        return ""
    buffer = model.Buffers(tensor.buffer)
    size = buffer.Size() if buffer.DataIsNone() else buffer.DataLength()
    expected = -(-math.prod(tensor.shape) * bits // 8)
    if size != expected:
        return (
            f"{tensor.dtype} {list(tensor.shape)} needs {expected:,} bytes, its buffer "
            f"{tensor.buffer} has {size:,}"
        )
    return ""


def _quantization_problem(subgraph: Subgraph, tensor: Tensor) -> str:
    if tensor.block_scales >= 0:
        holder = subgraph.tensors[tensor.block_scales]
        if tensor.block_size < 0:
            return f"it has blocks of {tensor.block_size} elements"
        if not holder.is_constant or not holder.is_floating_point:
            return f"its scales are in tensor {holder.index}, which is no constant of floats"
        return ""
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


def _verify_ops(subgraph: Subgraph) -> None:
    """Check the operands of every op, in execution order."""
    tensors = subgraph.tensors
    for index in subgraph.inputs:
        if tensors[index].is_constant:
            raise _damaged(
                _tensor_place(subgraph, tensors[index]), "it is an input, and a constant"
            )
    inputs = set(subgraph.inputs)
    computed: dict[int, Op] = {}
    for op in subgraph.ops:
        problem = (
            _count_problem(op)
            or _input_problem(op, tensors, inputs, computed)
            or _dtype_problem(op, tensors)
        )
        if problem:
            raise _damaged(_op_place(op), problem)
        for index in op.outputs:
            problem = _output_problem(op, tensors, inputs, computed, index)
            if problem:
                raise _damaged(_op_place(op), problem)
            computed[index] = op


def _count_problem(op: Op) -> str:
    if op.name not in _LEAST:
        return ""
    for noun, operands, least in zip(
        ("input", "output"), (op.inputs, op.outputs), _LEAST[op.name], strict=True
    ):
        if len(operands) < least:
            plural = "" if len(operands) == 1 else "s"
            return f"it has {len(operands)} {noun}{plural}, expected {least}"
    required = _REQUIRED.get(op.name, _LEAST[op.name][0])
    if -1 in (op.inputs if op.name in _ALL_REQUIRED else op.inputs[:required]):
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
    position = _KEEPING_DTYPE.get(op.name)
    if position is None:
        return ""
    expected = tensors[op.inputs[position]].dtype
    for index in op.outputs:
        dtype = tensors[index].dtype
        if dtype != expected and not (
            expected in ("int8", "uint8", "int4", "int2") and (op.name, dtype) in _OTHER_DTYPES
        ):
            return f"its output, tensor {index}, is {dtype}, and its input {expected}"
    return ""


def _output_problem(
    op: Op, tensors: Sequence[Tensor], inputs: set[int], computed: dict[int, Op], index: int
) -> str:
    if index < 0:
        return ""
    where = f"it writes tensor {index} ({tensors[index].name[:80]!r}), which"
    if tensors[index].is_constant:
        return f"{where} is a constant"
    if tensors[index].is_variable:
        return f"{where} is a variable"
    if index in inputs:
        return f"{where} is an input of the graph"
    if index in computed:
        return f"{where} {_op_place(computed[index])} has written already"
    return ""
