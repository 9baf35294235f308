"""Check that an op has the options table of its kind, and values that its kernels index by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_edgeq.tflite.flatbuffer import enum_names
from pytest_edgeq.tflite.verify.damage import damaged, op_place

if TYPE_CHECKING:
    from pytest_edgeq.tflite.subgraph import Subgraph


_OPTIONS = {
    "ADD": "AddOptions",
    "ARG_MAX": "ArgMaxOptions",
    "ARG_MIN": "ArgMinOptions",
    "AVERAGE_POOL_2D": "Pool2DOptions",
    "BATCH_MATMUL": "BatchMatMulOptions",
    "BIDIRECTIONAL_SEQUENCE_LSTM": "BidirectionalSequenceLSTMOptions",
    "BIDIRECTIONAL_SEQUENCE_RNN": "BidirectionalSequenceRNNOptions",
    "BUCKETIZE": "BucketizeOptions",
    "CALL_ONCE": "CallOnceOptions",
    "CONCATENATION": "ConcatenationOptions",
    "CONV_2D": "Conv2DOptions",
    "CONV_3D": "Conv3DOptions",
    "CONV_3D_TRANSPOSE": "Conv3DOptions",
    "CUMSUM": "CumsumOptions",
    "DEPTHWISE_CONV_2D": "DepthwiseConv2DOptions",
    "DEPTH_TO_SPACE": "DepthToSpaceOptions",
    "DIV": "DivOptions",
    "FULLY_CONNECTED": "FullyConnectedOptions",
    "GATHER": "GatherOptions",
    "GELU": "GeluOptions",
    "IF": "IfOptions",
    "L2_NORMALIZATION": "L2NormOptions",
    "L2_POOL_2D": "Pool2DOptions",
    "LEAKY_RELU": "LeakyReluOptions",
    "LSTM": "LSTMOptions",
    "MAX_POOL_2D": "Pool2DOptions",
    "MIRROR_PAD": "MirrorPadOptions",
    "MUL": "MulOptions",
    "ONE_HOT": "OneHotOptions",
    "PACK": "PackOptions",
    "RESIZE_BILINEAR": "ResizeBilinearOptions",
    "RESIZE_NEAREST_NEIGHBOR": "ResizeNearestNeighborOptions",
    "SOFTMAX": "SoftmaxOptions",
    "SPACE_TO_DEPTH": "SpaceToDepthOptions",
    "SPLIT": "SplitOptions",
    "SPLIT_V": "SplitVOptions",
    "STRIDED_SLICE": "StridedSliceOptions",
    "SUB": "SubOptions",
    "SVDF": "SVDFOptions",
    "TRANSPOSE_CONV": "TransposeConvOptions",
    "UNIDIRECTIONAL_SEQUENCE_LSTM": "UnidirectionalSequenceLSTMOptions",
    "UNPACK": "UnpackOptions",
    "VAR_HANDLE": "VarHandleOptions",
    "WHILE": "WhileOptions",
}
"""What the parser of each op reads (tflite/core/api/flatbuffer_conversions.cc, 2.3.0)."""


def verify_options(raw: Any, subgraph: Subgraph) -> None:
    """
    Check the options of every op whose kernels read them.

    Raises:
        ValueError: Names the op and what is wrong with it.
    """
    for op in subgraph.ops:
        expected = _OPTIONS.get(op.name)
        if expected is None:
            continue
        operator = raw.Operators(op.index)
        kind = enum_names("BuiltinOptions").get(operator.BuiltinOptionsType(), "of no known kind")
        if kind not in (expected, "NONE"):
            raise damaged(op_place(op), f"it has the options {kind}, expected {expected}")
        count = _OUTPUT_COUNTS.get(op.name)
        if count is None:
            continue
        side, field = count
        told = _field(operator, expected, field) if kind == expected else 0
        if told != len(getattr(op, side)):
            raise damaged(
                op_place(op), f"its options tell of {told} {side}, it has {len(getattr(op, side))}"
            )


_OUTPUT_COUNTS = {
    "PACK": ("inputs", "ValuesCount"),
    "SPLIT": ("outputs", "NumSplits"),
    "SPLIT_V": ("outputs", "NumSplits"),
    "UNPACK": ("outputs", "Num"),
}
"""Counts by which XNNPACK's delegate indexes before the kernel compares them."""


def _field(operator: Any, options: str, field: str) -> int:
    from ai_edge_litert import schema_py_generated as schema

    table = operator.BuiltinOptions()
    if table is None:
        return 0
    parsed = getattr(schema, options)()
    parsed.Init(table.Bytes, table.Pos)
    return int(getattr(parsed, field)())
