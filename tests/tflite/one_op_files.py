"""Files of one op in float or in codes, and whether kernels compute the same of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from ai_edge_litert.interpreter import Interpreter, OpResolverType

from fixtures.tflite.writer import constant, one_op

RESOLVERS = {
    "xnnpack": OpResolverType.AUTO,
    "builtin": OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
    "reference": OpResolverType.BUILTIN_REF,
}
CODES: dict[str, Any] = {"int8": np.int8, "uint8": np.uint8, "int16": np.int16}
Array = npt.NDArray[Any]
Parameters = tuple[float, int]


class Kind(NamedTuple):
    """Options, operands (a shape of data, or an argument) and output shapes of an op."""

    options: str | None
    operands: Sequence[Any]
    outputs: Sequence[tuple[int, ...]]
    fields: Mapping[str, Any] = {}
    low: float = -1.0
    version: int = 1


def _ints(*values: Any) -> Array:
    return np.array(values[0] if np.ndim(values[0]) else values, np.int32)


_ROW = [(1, 8)]
_POOL = {"strideH": 2, "strideW": 2, "filterHeight": 2, "filterWidth": 2, "padding": 1}
_REDUCED = ([(2, 8), _ints(1)], [(2,)])
_CHOICE = np.array([[1, 0, 1, 0]], bool)
_IMAGE, _DEEP, _ZEROS = (1, 4, 4, 1), (1, 2, 2, 4), _ints([[0, 0], [0, 0]])
_PADDED = ([(1, 4), _ints([[0, 0], [1, 1]])], [(1, 6)])

KINDS = {
    "ABS": Kind("AbsOptions", _ROW, _ROW),
    "ADD": Kind("AddOptions", _ROW * 2, _ROW),
    "AVERAGE_POOL_2D": Kind("Pool2DOptions", [(1, 4, 4, 2)], [(1, 2, 2, 2)], _POOL),
    "BATCH_TO_SPACE_ND": Kind(
        "BatchToSpaceNDOptions", [(4, 2, 2, 1), _ints(2, 2), _ZEROS], [_IMAGE]
    ),
    "BROADCAST_TO": Kind("BroadcastToOptions", [(1, 4), _ints(3, 4)], [(3, 4)], version=2),
    "CONCATENATION": Kind("ConcatenationOptions", [(1, 4)] * 2, _ROW, {"axis": 1}),
    "DEPTH_TO_SPACE": Kind("DepthToSpaceOptions", [_DEEP], [_IMAGE], {"blockSize": 2}),
    "DIV": Kind("DivOptions", _ROW * 2, _ROW, low=0.5),
    "DYNAMIC_UPDATE_SLICE": Kind("DynamicUpdateSliceOptions", [(1, 8), (1, 2), _ints(0, 3)], _ROW),
    "EXP": Kind("ExpOptions", _ROW, _ROW),
    "EXPAND_DIMS": Kind("ExpandDimsOptions", [(1, 8), np.array(1, np.int32)], [(1, 1, 8)]),
    "FLOOR_DIV": Kind("FloorDivOptions", _ROW * 2, _ROW, low=0.5),
    "GATHER": Kind("GatherOptions", [(4, 3), _ints(2, 0)], [(2, 3)]),
    "GATHER_ND": Kind("GatherNdOptions", [(4, 3), _ints([[2], [0]])], [(2, 3)]),
    "HARD_SWISH": Kind("HardSwishOptions", _ROW, _ROW),
    "L2_NORMALIZATION": Kind("L2NormOptions", _ROW, _ROW),
    "LEAKY_RELU": Kind("LeakyReluOptions", _ROW, _ROW, {"alpha": 0.1}),
    "LOG": Kind(None, _ROW, _ROW, low=0.2),
    "LOGISTIC": Kind(None, _ROW, _ROW),
    "LOG_SOFTMAX": Kind("LogSoftmaxOptions", _ROW, _ROW),
    "MAXIMUM": Kind("MaximumMinimumOptions", _ROW * 2, _ROW),
    "MAX_POOL_2D": Kind("Pool2DOptions", [(1, 4, 4, 2)], [(1, 2, 2, 2)], _POOL),
    "MEAN": Kind("ReducerOptions", *_REDUCED),
    "MINIMUM": Kind("MaximumMinimumOptions", _ROW * 2, _ROW),
    "MIRROR_PAD": Kind("MirrorPadOptions", *_PADDED),
    "MUL": Kind("MulOptions", _ROW * 2, _ROW),
    "NEG": Kind("NegOptions", _ROW, _ROW),
    "PACK": Kind("PackOptions", [(1, 4)] * 2, [(2, 1, 4)], {"axis": 0, "valuesCount": 2}),
    "PAD": Kind("PadOptions", *_PADDED),
    "PADV2": Kind("PadV2Options", [*_PADDED[0], (1,)], _PADDED[1]),
    "PRELU": Kind(None, [(1, 2, 2, 4), (1, 1, 4)], [(1, 2, 2, 4)]),
    "REDUCE_MAX": Kind("ReducerOptions", *_REDUCED),
    "REDUCE_MIN": Kind("ReducerOptions", *_REDUCED),
    "REDUCE_PROD": Kind("ReducerOptions", *_REDUCED),
    "RELU": Kind(None, _ROW, _ROW),
    "RELU6": Kind(None, _ROW, _ROW),
    "RESHAPE": Kind("ReshapeOptions", [(2, 4), np.array([8], np.int32)], [(8,)]),
    "RESIZE_BILINEAR": Kind("ResizeBilinearOptions", [(1, 2, 2, 1), _ints(4, 4)], [_IMAGE]),
    "RESIZE_NEAREST_NEIGHBOR": Kind(
        "ResizeNearestNeighborOptions", [(1, 2, 2, 1), _ints(4, 4)], [_IMAGE]
    ),
    "REVERSE_SEQUENCE": Kind(
        "ReverseSequenceOptions", [(2, 4), _ints(2, 3)], [(2, 4)], {"seqDim": 1}
    ),
    "REVERSE_V2": Kind("ReverseV2Options", [(1, 4), np.array([1], np.int32)], [(1, 4)]),
    "RSQRT": Kind(None, _ROW, _ROW, low=0.2),
    # Every row is given: the kernels fill others with the code 0.
    "SCATTER_ND": Kind("ScatterNdOptions", [_ints([[1], [0]]), (2, 3), _ints(2, 3)], [(2, 3)]),
    "SELECT": Kind("SelectOptions", [_CHOICE, (1, 4), (1, 4)], [(1, 4)]),
    "SELECT_V2": Kind("SelectV2Options", [_CHOICE, (1, 4), (1, 4)], [(1, 4)]),
    "SLICE": Kind("SliceOptions", [(1, 8), _ints(0, 2), _ints(1, 4)], [(1, 4)]),
    "SOFTMAX": Kind("SoftmaxOptions", _ROW, _ROW, {"beta": 1.0}),
    "SPACE_TO_BATCH_ND": Kind(
        "SpaceToBatchNDOptions", [_IMAGE, _ints(2, 2), _ZEROS], [(4, 2, 2, 1)]
    ),
    "SPACE_TO_DEPTH": Kind("SpaceToDepthOptions", [_IMAGE], [_DEEP], {"blockSize": 2}),
    "SPLIT": Kind("SplitOptions", [np.array(1, np.int32), (1, 8)], [(1, 4)] * 2, {"numSplits": 2}),
    "SPLIT_V": Kind(
        "SplitVOptions",
        [(1, 8), _ints(4, 4), np.array(1, np.int32)],
        [(1, 4)] * 2,
        {"numSplits": 2},
    ),
    "SQRT": Kind(None, _ROW, _ROW, low=0.1),
    "SQUARED_DIFFERENCE": Kind("SquaredDifferenceOptions", _ROW * 2, _ROW),
    "SQUEEZE": Kind("SqueezeOptions", _ROW, [(8,)], {"squeezeDims": [0]}),
    "STRIDED_SLICE": Kind(
        "StridedSliceOptions", [(1, 8), _ints(0, 2), _ints(1, 6), _ints(1, 1)], [(1, 4)]
    ),
    "SUB": Kind("SubOptions", _ROW * 2, _ROW),
    "SUM": Kind("ReducerOptions", *_REDUCED),
    "TANH": Kind(None, _ROW, _ROW),
    "TILE": Kind("TileOptions", [(1, 4), _ints(1, 2)], [(1, 8)]),
    "TOPK_V2": Kind("TopKV2Options", [(1, 8), np.array(3, np.int32)], [(1, 3)]),
    "TRANSPOSE": Kind("TransposeOptions", [(2, 3), _ints(1, 0)], [(3, 2)]),
    "UNPACK": Kind("UnpackOptions", [(2, 4)], [(4,)] * 2, {"axis": 0, "num": 2}),
}


def encode(values: Any, parameters: Parameters, dtype: str) -> Array:
    """Round values to codes."""
    scale, zero_point = parameters
    limits = np.iinfo(CODES[dtype])
    codes = np.round(np.asarray(values, np.float64) / scale) + zero_point
    return np.clip(codes, limits.min, limits.max).astype(CODES[dtype])


def write(
    op: str,
    dtypes: Sequence[str],
    parameters: Sequence[Parameters],
    constants: Mapping[int, Array] = {},
) -> bytes:
    """Write a file of one op: dtypes and parameters of each data operand, and of the outputs."""
    kind = KINDS[op]

    def tensor(place: int, shape: Any) -> dict[str, Any]:
        given: dict[str, Any] = {"dtype": dtypes[place], "shape": shape}
        if dtypes[place] in CODES:
            scale, zero_point = parameters[place]
            given |= {"scales": [scale], "zero_points": [zero_point]}
        return given

    operands, number = [], 0
    for each in kind.operands:
        if isinstance(each, np.ndarray):
            operands.append(constant(each, str(each.dtype)))
            continue
        operands.append(tensor(number, each) | {"data": constants.get(number)})
        number += 1
    made = [tensor(-1, shape) for shape in kind.outputs]
    if op == "TOPK_V2":
        made.append({"dtype": "int32", "shape": kind.outputs[0]})
    return one_op(op, operands, made, kind.options, version=kind.version, **kind.fields)


def run(content: bytes, runtime: str, inputs: Sequence[Array]) -> list[Array] | None:
    """Run a file; None where the kernels refuse it."""
    try:
        interpreter = Interpreter(
            model_content=content, experimental_op_resolver_type=RESOLVERS[runtime]
        )
        interpreter.allocate_tensors()
        for detail, value in zip(interpreter.get_input_details(), inputs, strict=True):
            interpreter.set_tensor(detail["index"], value)
        interpreter.invoke()
    except RuntimeError:
        return None
    return [interpreter.get_tensor(each["index"]) for each in interpreter.get_output_details()]


def data_of(op: str) -> list[tuple[int, ...]]:
    """Shapes of the operands that are data."""
    return [each for each in KINDS[op].operands if not isinstance(each, np.ndarray)]


def errors(op: str, dtype: str, parameters: Sequence[Parameters]) -> dict[str, float]:
    """Return how far kernels are from the op in float, in LSB, by runtime; ∞ where they refuse."""
    draws = np.random.default_rng(7)
    values = []
    for shape, (scale, zero_point) in zip(data_of(op), parameters, strict=False):
        codes = encode(draws.uniform(KINDS[op].low, 1, shape), (scale, zero_point), dtype)
        values.append((codes.astype(np.float64) - zero_point) * scale)
    count = len(values) + 1
    floats = run(
        write(op, ["float32"] * count, [(1.0, 0)] * count),
        "builtin",
        [each.astype(np.float32) for each in values],
    )
    assert floats is not None
    content = write(op, [dtype] * count, parameters)
    codes_in = [encode(x, p, dtype) for x, p in zip(values, parameters, strict=False)]
    expected = [encode(x, parameters[-1], dtype).astype(int) for x in floats]
    found = {}
    for runtime in RESOLVERS:
        # TOPK_V2 has a second output, of indices.
        codes_out = (run(content, runtime, codes_in) or [])[: len(KINDS[op].outputs)]
        pairs = zip(codes_out, expected, strict=False)
        found[runtime] = max((float(np.abs(x - y).max()) for x, y in pairs), default=np.inf)
    return found


CHANNELS = (1 / 254, 2 / 254, 3 / 254, 4 / 254)
"""Scales of four channels."""

_STEPS = {"int8": 1 / 127, "uint8": 1 / 127, "int16": 1 / 32767}
_STRIDES = {"strideH": 1, "strideW": 1}
_DILATED = {**_STRIDES, "dilationHFactor": 1, "dilationWFactor": 1}
_IMAGES = (1, 4, 4, 4)

# Options, fields, shapes of input, weight and output, axis of the output channels, version.
LAYERS: dict[str, tuple[Any, ...]] = {
    "BATCH_MATMUL": ("BatchMatMulOptions", {}, (1, 4, 4), (1, 4, 4), (1, 4, 4), 2, 4),
    "CONV_2D": ("Conv2DOptions", _DILATED, _IMAGES, (4, 1, 1, 4), _IMAGES, 0, 8),
    "DEPTHWISE_CONV_2D": (
        *("DepthwiseConv2DOptions", {**_DILATED, "depthMultiplier": 1}),
        *(_IMAGES, (1, 2, 2, 4), _IMAGES, 3, 6),
    ),
    "EMBEDDING_LOOKUP": (None, {}, None, (4, 4), (3, 4), 0, 3),
    "FULLY_CONNECTED": ("FullyConnectedOptions", {}, (1, 4), (4, 4), (1, 4), 0, 9),
    "TRANSPOSE_CONV": ("TransposeConvOptions", _STRIDES, _IMAGES, (4, 2, 2, 4), _IMAGES, 0, 4),
}


def layer(
    op: str,
    *,
    data: str = "int8",
    weight: str = "int8",
    bias: str = "int32",
    output: str | None = None,
    scales: Sequence[float] = (1 / 127,),
    point: int = 0,
    axis: int | None = None,
    bias_factor: float = 1.0,
    bias_point: int = 0,
    has_bias: bool = True,
    fields: Mapping[str, Any] = {},
    is_computed: bool = False,
) -> tuple[bytes, bytes, tuple[Array, Array] | None, float]:
    """
    Write a file of one op with weights, and the same in float.

    Also return the input for each (None where rows are looked up), and the output's step.
    """
    options, own, taken, held, made, right, version = LAYERS[op]
    output = output or data
    draws = np.random.default_rng(3)
    spread = [1] * len(held)
    if len(scales) > 1:
        spread[right if axis is None else axis] = -1
    codes = draws.integers(*((-6, 7) if weight == "int4" else (-90, 91)), held)
    weights = codes * np.array(scales).reshape(spread)
    biases = draws.uniform(-1, 1, 4) * has_bias
    step = scales[0] if op == "EMBEDDING_LOOKUP" else 16 * _STEPS.get(output, 1 / 16 / 64)
    values = None
    if taken is not None:
        values = draws.uniform(0, 1, taken)
        if data in _STEPS:
            values = encode(values, (_STEPS[data], 0), data) * _STEPS[data]

    def content(data: str, weight: str, bias: str, output: str) -> bytes:
        x: dict[str, Any] = constant([2, 0, 1], "int32")
        if taken is not None:
            x = {"dtype": data, "shape": taken, "scales": [_STEPS[data]] if data in _STEPS else []}
        w: dict[str, Any] = {"dtype": weight, "shape": held}
        if weight != "float32":
            w |= {"scales": scales, "zero_points": [point] * len(scales)}
            w["axis"] = right if axis is None else axis
        if not is_computed:
            is_float = weight == "float32"
            w["data"] = weights.astype(weight) if is_float else _stored(codes + point, weight)
        operands = [x, w]
        if op == "TRANSPOSE_CONV":
            operands = [constant(made, "int32"), w, x]
        if op not in ("BATCH_MATMUL", "EMBEDDING_LOOKUP"):
            steps = np.array(scales) * _STEPS.get(data, 1.0)
            b = constant(biases)
            if bias != "float32":
                b = constant(np.round(biases / steps), bias, scales=steps * bias_factor)
                b["zero_points"] = [bias_point] * len(scales)
            operands.append(b)
        y: dict[str, Any] = {"dtype": output, "shape": made}
        if output in _STEPS:
            made_point = point if op == "EMBEDDING_LOOKUP" else 128 if output == "uint8" else 0
            y |= {"scales": [step], "zero_points": [made_point]}
        return one_op(op, operands, [y], options, version=version, **own, **fields)

    inputs = None
    if values is not None:
        floats = values.astype(np.float32)
        coded = encode(values, (_STEPS[data], 0), data) if data in _STEPS else floats
        inputs = coded, floats
    return (
        content(data, weight, bias, output),
        content("float32", "float32", "float32", "float32"),
        inputs,
        step,
    )


def _stored(codes: Array, dtype: str) -> Array:
    if dtype != "int4":
        return codes.astype(CODES[dtype])
    low, high = codes.ravel()[::2] & 15, codes.ravel()[1::2] & 15
    return (low | high << 4).astype(np.uint8)
