"""
Files that are right on the CPU and wrong on the GPU, each with a sound counterpart.

Seen with LiteRT's WebGPU engine of ai-edge-litert 2.3.0 on Mesa 25's lavapipe. A graph is a text of
ops, `OP operands > results option=1; …`, whose last results are the file's outputs, and
`OP@2` is an op of version 2. Tensors are float32 of the shape in `shapes`, or constants and others
in `tensors`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from ai_edge_litert import schema_py_generated as schema

from fixtures.tflite.writer import FileWriter, constant
from pytest_edgeq.names import GPU_KERNELS
from pytest_edgeq.tflite.boundary import numpy_dtype
from pytest_edgeq.tflite.graph import OpGraph

Array = npt.NDArray[Any]
Draw = Callable[[np.random.Generator, tuple[int, ...]], Array]

_OPTIONS = {name.lower(): name for name in vars(schema.BuiltinOptions)}
for _reducer in ("sum", "mean", "reducemax"):
    _OPTIONS[f"{_reducer}options"] = "ReducerOptions"


def _tensor(value: Any) -> dict[str, Any]:
    """Return the arguments of a tensor: of a constant float, integer, list or array."""
    if isinstance(value, dict):
        return value
    array = np.asarray(value)
    dtype = {"float64": "float32", "int64": "int32"}.get(array.dtype.name, array.dtype.name)
    return constant(array, dtype)


def write(inputs: str, ops: str, shapes: str, tensors: Mapping[str, Any]) -> bytes:
    """Write the file of a graph."""
    known: dict[str, Any] = {name: _tensor(value) for name, value in tensors.items()}
    for names, _, shape in (each.partition(":") for each in shapes.split()):
        of_shape = {"dtype": "float32", "shape": tuple(map(int, shape.split("x")))}
        known |= dict.fromkeys(names.split(","), of_shape)
    rows: list[Any] = []
    versions = []
    for operation in ops.split("; "):
        given, _, made = operation.partition(" > ")
        head, _, operands = given.partition(" ")
        name, _, version = head.partition("@")
        words = [word.partition("=") for word in made.split()]
        fields = {key: json.loads(value) for key, _, value in words if value}
        results = " ".join(key for key, _, value in words if not value)
        if name == "RESHAPE":
            fields["newShape"] = known[operands.split()[1]]["data"].tolist()
        options = _OPTIONS.get(f"{name.replace('_', '').lower()}options")
        rows.append((name, operands, results, options, fields))
        versions.append(int(version or 1))
    file = FileWriter()
    file.graph().fill(*rows, inputs=inputs, outputs=rows[-1][2], **known)
    for code, number in zip(file.model.operatorCodes, versions, strict=True):
        code.version = number
    return file.content()


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return rng.standard_normal(shape)


def _around(mean: float, deviation: float = 1.0) -> Draw:
    return lambda rng, shape: mean + deviation * rng.standard_normal(shape)


def _between(low: float, high: float) -> Draw:
    return lambda rng, shape: rng.uniform(low, high, shape)


def _codes(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return rng.integers(-128, 128, shape)


def _constant_rows(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Every second row is padding."""
    rows: Array = rng.standard_normal(shape)
    rows[:, ::2] = 0
    return rows


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """
    A defect that shows on a GPU alone.

    Attributes:
        name: Of the case.
        op: Type of the op at fault.
        inputs: Names of the file's inputs.
        wrong: Graph with the defect.
        sound: Graph without it, of the same inputs.
        shapes: Shapes of float tensors.
        tensors: Other tensors of both graphs.
        draw: Distribution of the inputs.
        precisions: Kernels on which the defect shows; others must be sound.
        says: Part of the cause.
    """

    name: str
    op: str
    inputs: str
    wrong: str
    sound: str
    shapes: str
    tensors: Mapping[str, Any] = field(default_factory=dict)
    draw: Draw = _normal
    precisions: tuple[str, ...] = GPU_KERNELS
    says: str = ""

    def build(self) -> bytes:
        """Write the file."""
        return write(self.inputs, self.wrong, self.shapes, self.tensors)

    def counterpart(self) -> bytes:
        """Write the sound file."""
        return write(self.inputs, self.sound, self.shapes, self.tensors)

    def samples(self, count: int) -> list[list[Array]]:
        """Return samples of the inputs."""
        [signature] = OpGraph.read(self.build()).signatures
        tensors = [each.tensor for each in signature.inputs]
        drawn = []
        for seed in range(count):
            rng = np.random.default_rng(seed)
            drawn.append([self.draw(rng, t.shape).astype(numpy_dtype(t.dtype)) for t in tensors])
        return drawn


#: SQNR to the CPU that no defect reaches, over samples; measured: 7 dB and less.
DEFECT_DB = 15.0
#: SQNR to the CPU that counterparts reach in float32; measured: 112 dB (a SUM of 12,544 values).
SOUND_DB = 100.0

_HALF: Any = {"precisions": ("gpu",)}
_OVERFLOWS: Any = {**_HALF, "says": "overflow"}
_UNDERFLOWS: Any = {**_HALF, "says": "underflow"}

_POINT = "dilationHFactor=1 dilationWFactor=1"
_CONV = f"strideH=1 strideW=1 {_POINT}"
_SHARES = "SUM sums axis > total keepDims=1; DIV sums total > y"
_SCORES = "BATCH_MATMUL small k > scores adjY=1"
_NORM = (
    "MUL x {} > scaled; MEAN scaled axis > mean keepDims=1; SQUARED_DIFFERENCE scaled mean > "
    "squares; MEAN squares axis > variance keepDims=1; ADD variance {} > sum; RSQRT sum > inverse; "
    "SUB scaled mean > centred; MUL centred inverse > y"
)
_NORM_SHAPES = "x,scaled,squares,centred,y:1x6x32 mean,variance,sum,inverse:1x6x1"
_NORM_TENSORS = {"axis": [2], "one": 1.0, "factor": 1 / 64, "epsilon": 1e-5, "least": 1e-12}
_SOFTMAX = "EXP {} > powers; SUM powers axis > total keepDims=1; DIV powers total > y"
_TRANSPOSED = "shape w x b > sums strideH=2 strideW=2 padding=1; RELU sums > y"
_L2 = "MUL x x > squares; SUM squares axis > total keepDims=1; RSQRT total > inverse"


def _weights(*shape: int) -> Array:
    return np.random.default_rng(7).standard_normal(shape).astype(np.float32)


def _stored(dtype: str, shape: tuple[int, ...], scale: float, zero: int = 0) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "scales": [scale], "zero_points": [zero]}


def _int8_weights(*shape: int, channels: int = 1) -> dict[str, Any]:
    codes = np.rint(_weights(*shape).clip(-2, 2) / 0.02).astype(np.int8)
    return {"dtype": "int8", "shape": shape, "data": codes, "scales": [0.02] * channels}


def _bias(dtype: str, count: int, scale: float) -> dict[str, Any]:
    return _stored(dtype, (count,), scale) | {"data": np.zeros(count, dtype)}


_B8 = np.zeros(8, np.float32)
_POSITIONS = np.arange(3000, 3016, dtype=np.float32).reshape(1, 16)
_ROWS = np.arange(1, 5, dtype=np.float32)
_CONDITION = np.array([True, False, False, True, False])
_POINTWISE, _GROUPS = _weights(8).reshape(1, 1, 1, 8), _weights(8, 3, 3, 2)
_IN_GROUP = np.equal.outer(np.arange(8) // 2, np.arange(8) // 2)[:, None, None]
_CODES = _int8_weights(5, 4, channels=5)

# fmt: off
CASES: tuple[Case, ...] = (
    # The sum of 12,544 values near 10 is 125,440, beyond float16's 65,504.
    Case("sum_overflow", "SUM", "x", "SUM x axes > y", "MEAN x axes > y", "x:1x112x112x4 y:1x4",
         {"axes": [1, 2]}, _around(10), **_OVERFLOWS),
    # The sums of 1,024 products are beyond it.
    Case("matmul_overflow", "FULLY_CONNECTED", "x", f"FULLY_CONNECTED x w b > sums; {_SHARES}",
         f"MUL x factor > small; FULLY_CONNECTED small w b > sums; {_SHARES}",
         "x,small:4x1024 sums,y:4x8 total:4x1",
         {"w": np.abs(_weights(8, 1024)) * 16, "b": _B8, "axis": [1], "factor": 1e-3},
         _around(10), **_OVERFLOWS),
    # Attention scores are beyond it, and scaled only after the product.
    Case("scores_overflow", "BATCH_MATMUL", "q k",
         f"MUL q one > small; {_SCORES}; MUL scores factor > scaled; SOFTMAX scaled > y beta=1",
         f"MUL q factor > small; {_SCORES}; MUL scores one > scaled; SOFTMAX scaled > y beta=1",
         "q,k,small:2x6x256 scores,scaled,y:2x6x6", {"one": 1.0, "factor": 1 / 4096},
         _around(0, 40), **_OVERFLOWS),
    # The convolution's sums of 288 products are beyond it.
    Case("conv_overflow", "CONV_2D", "x", f"CONV_2D x w b > sums {_CONV}; {_SHARES}",
         f"MUL x factor > small; CONV_2D small w b > sums {_CONV}; {_SHARES}",
         "x,small:1x6x6x32 sums,y:1x6x6x8 total:1x6x6x1",
         {"w": np.abs(_weights(8, 3, 3, 32)), "b": _B8, "axis": [3], "factor": 1e-3},
         _around(1000, 100), **_OVERFLOWS),
    # The squared difference of a LayerNorm is beyond it.
    Case("norm_overflow", "SQUARED_DIFFERENCE", "x", _NORM.format("one", "epsilon"),
         _NORM.format("factor", "epsilon"), _NORM_SHAPES, _NORM_TENSORS, _around(0, 400),
         **_OVERFLOWS),
    # The exponential of logits above 11.09 is beyond it.
    Case("exp_overflow", "EXP", "x", _SOFTMAX.format("x"),
         f"REDUCE_MAX x axis > top keepDims=1; SUB x top > logits; {_SOFTMAX.format('logits')}",
         "x,logits,powers,y:2x10 top,total:2x1", {"axis": [1]}, _around(10, 4), **_OVERFLOWS),
    # Products of 1e-9 are below float16's smallest number, 6e-8, and become zero.
    Case("vanishing_product", "MUL", "x", "MUL x a > p; MUL p b > q; MUL q c > r; MUL r c > y",
         "MUL x a > p; MUL p c > q; MUL q b > r; MUL r c > y", "x,p,q,r,y:1x16",
         {"a": 1e-5, "b": 1e-4, "c": 3e4}, _between(0.1, 1.0), **_UNDERFLOWS),
    # The epsilon 1e-12 is zero in float16: rows without variance divide by zero.
    Case("epsilon_vanishes", "RSQRT", "x", _NORM.format("one", "least"),
         _NORM.format("one", "epsilon"), _NORM_SHAPES, _NORM_TENSORS, _constant_rows,
         **_UNDERFLOWS),
    # A float16 accumulator stops growing at 2,048 times its terms.
    Case("long_product", "BATCH_MATMUL", "a b",
         "BATCH_MATMUL a b > sums adjY=1; MUL sums scale > y",
         "MUL a b > products; MEAN products axis > y keepDims=1",
         "a,b,products:1x1x8192 sums,y:1x1x1", {"scale": 1 / 8192, "axis": [2]},
         _between(0.5, 1.0), **_HALF),
    # Float16 has steps of 2 between 2,048 and 4,096: the angle is lost.
    Case("large_positions", "SIN", "x", "ADD x positions > angles; SIN angles > y",
         "ADD x wrapped > angles; SIN angles > y", "x,angles,y:1x16",
         {"positions": _POSITIONS, "wrapped": np.mod(_POSITIONS.astype(float), 2 * np.pi)},
         **_HALF),
    # A constant with a batch axis is stored without it: its first row is used for all.
    Case("constant_per_row", "ADD", "x", "ADD x rows > y",
         "RESHAPE x up > x4; ADD x4 rows4 > y4; RESHAPE y4 down > y", "x,y:4x4 x4,y4:1x1x4x4",
         {"rows": _ROWS.reshape(4, 1), "rows4": _ROWS.reshape(1, 1, 4, 1),
          "up": [1, 1, 4, 4], "down": [4, 4]}),
    # A condition that broadcasts is not repeated over the rows.
    Case("broadcast_condition", "SELECT_V2", "a b", "SELECT_V2 condition a b > y",
         "SELECT_V2 whole a b > y", "a,b,y:4x5",
         {"condition": _CONDITION, "whole": np.tile(_CONDITION, (4, 1))}),
    # FULLY_CONNECTED does not flatten an input of rank 4.
    Case("flattening_fully_connected", "FULLY_CONNECTED", "x", "FULLY_CONNECTED x w - > y",
         "RESHAPE x shape > row; FULLY_CONNECTED row w - > y", "x:1x3x3x4 row:1x36 y:1x5",
         {"w": _weights(5, 36), "shape": [1, 36]}),
    # BATCH_MATMUL does not broadcast its batch axis.
    Case("broadcasting_matmul", "BATCH_MATMUL", "q k", "BATCH_MATMUL q k > y",
         "TILE k times > whole; BATCH_MATMUL q whole > y", "q:2x3x4 k:1x4x5 whole:2x4x5 y:2x3x5",
         {"times": [2, 1, 1]}),
    # PAD of a tensor of rank 3 applies its paddings to other axes.
    Case("padding_rank_3", "PAD", "x", "PAD x pads > y",
         "RESHAPE x up > x4; PAD x4 pads4 > y4; RESHAPE y4 down > y",
         "x:3x4x5 y:3x6x5 x4:1x3x4x5 y4:1x3x6x5",
         {"pads": [[0, 0], [1, 1], [0, 0]], "pads4": [[0, 0], [0, 0], [1, 1], [0, 0]],
          "up": [1, 3, 4, 5], "down": [3, 6, 5]}),
    # REVERSE_V2 does not reverse the last axis.
    Case("reversed_channels", "REVERSE_V2", "x", "REVERSE_V2 x axis > y",
         "GATHER x order > y axis=3", "x,y:1x3x4x5", {"axis": [3], "order": [4, 3, 2, 1, 0]}),
    # CUMSUM ignores its option reverse.
    Case("reverse_cumsum", "CUMSUM", "x", "CUMSUM x axis > y reverse=1",
         "CUMSUM x axis > sums; SUM x axes > whole keepDims=1; SUB whole sums > later; "
         "ADD later x > y", "x,sums,later,y:1x3x4x5 whole:1x3x1x5", {"axis": 2, "axes": [2]}),
    # DEPTHWISE_CONV_2D of 1 × 1 ignores its depth multiplier.
    Case("pointwise_depthwise", "DEPTHWISE_CONV_2D", "x",
         f"DEPTHWISE_CONV_2D x w1 b > y depthMultiplier=2 {_CONV}",
         f"DEPTHWISE_CONV_2D x w3 b > y depthMultiplier=2 {_CONV}", "x:1x4x4x4 y:1x4x4x8",
         {"w1": _POINTWISE, "w3": np.pad(_POINTWISE, ((0, 0), (1, 1), (1, 1), (0, 0))), "b": _B8}),
    # The engine takes an ADD of int16 and computes it wrong.
    Case("int16_sum", "ADD", "x",
         "QUANTIZE x > q16; ADD q16 q16 > p16 potScaleInt16=0; DEQUANTIZE p16 > y",
         "QUANTIZE x > q8; ADD q8 q8 > p8 potScaleInt16=0; DEQUANTIZE p8 > y", "x,y:2x8",
         {"q16": _stored("int16", (2, 8), 0.0002), "p16": _stored("int16", (2, 8), 0.0004),
          "q8": _stored("int8", (2, 8), 0.04), "p8": _stored("int8", (2, 8), 0.08)}),
    # ARG_MAX counts the zeros that pad 10 channels to 12: it returns 10 if all are negative.
    Case("argmax_of_negatives", "ARG_MAX", "x", "ARG_MAX x axis > y outputType=2",
         "RESHAPE x shape > x3; ARG_MAX x3 axis > tall outputType=2; RESHAPE tall flat > y",
         "x:16x10 x3:16x10x1",
         {"shape": [16, 10, 1], "flat": [16], "axis": 1, "y": {"dtype": "int32", "shape": (16,)},
          "tall": {"dtype": "int32", "shape": (16, 1)}}, _between(-8.0, -0.5)),
    # The shader of an int8 ADD of operands of different ranks does not compile.
    Case("int8_ranks_differ", "ADD", "a b", "ADD a b > y", "RESHAPE b shape > b3; ADD a b3 > y", "",
         {"a": _stored("int8", (1, 5, 8), 0.05, 3), "b": _stored("int8", (5, 8), 0.03, -7),
          "b3": _stored("int8", (1, 5, 8), 0.03, -7), "y": _stored("int8", (1, 5, 8), 0.09, -2),
          "shape": [1, 5, 8]}, _codes),
    # TOPK_V2 needs a last axis that is a multiple of 4; here the values stand there twice.
    Case("topk", "TOPK_V2", "x", "TOPK_V2 x k > y places",
         "CONCATENATION x x > xx axis=1; TOPK_V2 xx k > y places", "x:4x6 xx:4x12 y:4x1",
         {"k": 1, "places": {"dtype": "int32", "shape": (4, 1)}}),
    # A convolution in groups of two channels reads buffers of size zero; zeros fill the groups.
    Case("narrow_groups", "CONV_2D", "x", f"CONV_2D x groups b > y {_CONV}",
         f"CONV_2D x whole b > y {_CONV}", "x,y:1x6x6x8",
         {"groups": _GROUPS, "whole": np.where(_IN_GROUP, np.tile(_GROUPS, 4), 0), "b": _B8}),
    # A convolution of 1 × 1 in int8 ignores its strides, as in the shortcuts of a ResNet.
    Case("strided_pointwise_int8", "CONV_2D", "x",
         f"CONV_2D x w b > y strideH=2 strideW=2 {_POINT}",
         f"STRIDED_SLICE x begin end strides > half; CONV_2D half w b > y {_CONV}", "",
         {"x": _stored("int8", (1, 6, 6, 4), 0.05, 3), "w": _int8_weights(8, 1, 1, 4),
          "half": _stored("int8", (1, 3, 3, 4), 0.05, 3), "b": _bias("int32", 8, 0.001),
          "y": _stored("int8", (1, 3, 3, 8), 0.2, 3),
          "begin": [0, 0, 0, 0], "end": [1, 6, 6, 4], "strides": [1, 2, 2, 1]}, _codes),
    # The shader of SPACE_TO_DEPTH does not compile for a batch of two.
    Case("batched_space_to_depth", "SPACE_TO_DEPTH", "x", "SPACE_TO_DEPTH x > y blockSize=2",
         "SPLIT axis x > h0 h1 numSplits=2; SPACE_TO_DEPTH h0 > d0 blockSize=2; "
         "SPACE_TO_DEPTH h1 > d1 blockSize=2; CONCATENATION d0 d1 > y axis=0",
         "x:2x4x6x3 y:2x2x3x12 h0,h1:1x4x6x3 d0,d1:1x2x3x12", {"axis": 0}),
    # The engine supports TRANSPOSE_CONV up to version 3; version 4 knows a fused activation.
    Case("transpose_conv_version", "TRANSPOSE_CONV", "x", f"TRANSPOSE_CONV@4 {_TRANSPOSED}",
         f"TRANSPOSE_CONV@3 {_TRANSPOSED}", "x:1x4x4x3 sums,y:1x8x8x5",
         {"shape": [1, 8, 8, 5], "w": _weights(5, 2, 2, 3), "b": _weights(5)}),
    # The engine supports SUB up to version 2.
    Case("sub_version", "SUB", "a b", "SUB@3 a b > y", "SUB@2 a b > y", "a,b,y:1x8"),
    # The engine has no int16.
    Case("int16_activations", "FULLY_CONNECTED", "x",
         "QUANTIZE x > q16; FULLY_CONNECTED q16 w b64 > p16; DEQUANTIZE p16 > y",
         "QUANTIZE x > q8; FULLY_CONNECTED q8 w b32 > p8; DEQUANTIZE p8 > y", "x:2x8 y:2x4",
         {"q16": _stored("int16", (2, 8), 0.0002), "p16": _stored("int16", (2, 4), 0.0008),
          "q8": _stored("int8", (2, 8), 0.04), "p8": _stored("int8", (2, 4), 0.16),
          "w": _int8_weights(4, 8), "b64": _bias("int64", 4, 4e-6),
          "b32": _bias("int32", 4, 8e-4)}),
    # The engine refuses int8 weights of rank 2 with a DEQUANTIZE of their own.
    Case("weight_only_linear", "FULLY_CONNECTED", "x",
         "DEQUANTIZE codes > w; FULLY_CONNECTED x w - > y", "FULLY_CONNECTED x real - > y",
         "x:2x4 y:2x5 w:5x4",
         {"codes": _CODES, "real": _CODES["data"].astype(np.float32) * np.float32(0.02)}),
    # The engine has no L2_NORMALIZATION.
    Case("unsupported_op", "L2_NORMALIZATION", "x", "L2_NORMALIZATION x > y",
         f"{_L2}; MUL x inverse > y", "x,squares,y:2x8 total,inverse:2x1", {"axis": [1]}),
)
