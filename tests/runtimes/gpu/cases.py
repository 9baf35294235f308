"""
Files that are right on the CPU and wrong on the GPU, each with a sound counterpart.

Seen with LiteRT's WebGPU engine of ai-edge-litert 2.3.0 on Mesa 25's lavapipe. The counterpart has
the same inputs; where `counterpart_equal` is true it also computes the same function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fixtures.tflite.writer import chain, constant, one_op, pack, unpack

Array = npt.NDArray[Any]
#: `overflow`: values beyond 65,504. `underflow`: values below float16's least. `rounding`: a sum or
#: an integer that 11 bits cannot hold. `wrong`: another result, without a message. `logged`: the
#: engine logs an error, mostly of a shader that does not compile, and answers all the same.
#: `refused`: an op or the file is refused, with words on standard error.
Outcome = Literal["overflow", "underflow", "rounding", "wrong", "logged", "refused"]


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """
    A defect that shows on a GPU alone.

    Attributes:
        name: Of the case.
        build: Writes the file.
        counterpart: Writes a sound file with the same inputs.
        shapes: Of the inputs.
        precisions: Kernels on which the defect shows; others must be sound.
        outcome: What the engine does.
        cause: The cause, as a report should state it.
        op: Type of the op at fault.
        words: Part of the engine's message on standard error; empty if there is none.
        draw: Distribution of the inputs.
        dtype: Of the inputs.
        counterpart_equal: Whether the counterpart computes the same function.
    """

    name: str
    build: Callable[[], bytes]
    counterpart: Callable[[], bytes]
    shapes: Sequence[tuple[int, ...]]
    precisions: tuple[str, ...]
    outcome: Outcome
    cause: str
    op: str
    words: str = ""
    draw: Callable[[np.random.Generator, tuple[int, ...]], Array] = lambda rng, shape: (
        rng.standard_normal(shape)
    )
    dtype: str = "float32"
    counterpart_equal: bool = True

    def inputs(self, seed: int) -> list[Array]:
        """Return one sample."""
        rng = np.random.default_rng(seed)
        return [self.draw(rng, shape).astype(self.dtype) for shape in self.shapes]


#: SQNR to the CPU that no defect reaches, over samples; measured: 7 dB and less.
DEFECT_DB = 15.0
#: SQNR to the CPU that every counterpart reaches; measured: 29 dB (a product in int8, one code off)
#: and 112 dB (a SUM of 12,544 values).
SOUND_DB = {"gpu": 25.0, "gpu_f32": 100.0}

HALF = ("gpu",)
BOTH = ("gpu", "gpu_f32")


def _float(*shape: int) -> dict[str, Any]:
    return {"dtype": "float32", "shape": shape}


def _int8(*shape: int, scale: float = 0.05, zero_point: int = 3) -> dict[str, Any]:
    return {"dtype": "int8", "shape": shape, "scales": [scale], "zero_points": [zero_point]}


def _ints(values: Any) -> dict[str, Any]:
    return constant(values, "int32")


def _weights(*shape: int, seed: int = 7) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _positive(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return rng.uniform(0.5, 1.0, shape)


def _codes(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return rng.integers(-128, 128, shape)


_CONV = {"strideH": 1, "strideW": 1, "dilationHFactor": 1, "dilationWFactor": 1}


# Float16: overflow.


def _reduction(op: str) -> bytes:
    return one_op(
        op,
        [_float(1, 112, 112, 4), _ints([1, 2])],
        [_float(1, 4)],
        "ReducerOptions",
        keepDims=False,
    )


def _shares(product: str, *, scales: bool) -> bytes:
    """Products of positive values as shares of their sum; the sound file scales the input first."""
    shape, w, fields = {
        "FULLY_CONNECTED": ((4, 1024), np.abs(_weights(8, 1024)) * 16, {}),
        "CONV_2D": ((1, 6, 6, 32), np.abs(_weights(8, 3, 3, 32)), _CONV),
    }[product]
    sums, axis = (*shape[:-1], 8), len(shape) - 1
    options = {"FULLY_CONNECTED": "FullyConnectedOptions", "CONV_2D": "Conv2DOptions"}[product]
    return chain(
        *([("MUL", "x factor", "small", "MulOptions")] if scales else []),
        (product, "small w b" if scales else "x w b", "sums", options, fields),
        ("SUM", "sums axis", "total", "ReducerOptions", {"keepDims": True}),
        ("DIV", "sums total", "y", "DivOptions"),
        inputs="x",
        outputs="y",
        x=_float(*shape),
        small=_float(*shape),
        factor=constant(np.float32(1e-3)),
        w=constant(w),
        b=constant(np.zeros(8, np.float32)),
        sums=_float(*sums),
        axis=_ints([axis]),
        total=_float(*sums[:-1], 1),
        y=_float(*sums),
    )


def _scaled_scores(before: float, after: float) -> bytes:
    """Attention scores q·kᵀ, scaled before or after the product."""
    return chain(
        ("MUL", "q before", "small", "MulOptions"),
        ("BATCH_MATMUL", "small k", "scores", "BatchMatMulOptions", {"adjY": True}),
        ("MUL", "scores after", "scaled", "MulOptions"),
        ("SOFTMAX", "scaled", "y", "SoftmaxOptions", {"beta": 1.0}),
        inputs="q k",
        outputs="y",
        q=_float(2, 6, 256),
        k=_float(2, 6, 256),
        small=_float(2, 6, 256),
        before=constant(np.float32(before)),
        scores=_float(2, 6, 6),
        after=constant(np.float32(after)),
        scaled=_float(2, 6, 6),
        y=_float(2, 6, 6),
    )


def _norm(*, epsilon: float = 1e-5, before: float = 1.0) -> bytes:
    """LayerNorm of x·before as converters decompose it."""
    return chain(
        ("MUL", "x before", "scaled", "MulOptions"),
        ("MEAN", "scaled axis", "mean", "ReducerOptions", {"keepDims": True}),
        ("SQUARED_DIFFERENCE", "scaled mean", "squares", "SquaredDifferenceOptions"),
        ("MEAN", "squares axis", "variance", "ReducerOptions", {"keepDims": True}),
        ("ADD", "variance epsilon", "sum", "AddOptions"),
        ("RSQRT", "sum", "inverse"),
        ("SUB", "scaled mean", "centred", "SubOptions"),
        ("MUL", "centred inverse", "y", "MulOptions"),
        inputs="x",
        outputs="y",
        axis=_ints([2]),
        epsilon=constant(np.float32(epsilon)),
        before=constant(np.float32(before)),
        **dict.fromkeys(("x", "scaled", "squares", "centred", "y"), _float(1, 6, 32)),
        **dict.fromkeys(("mean", "variance", "sum", "inverse"), _float(1, 6, 1)),
    )


def _constant_rows(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Every second row is padding."""
    rows: Array = rng.standard_normal(shape)
    rows[:, ::2] = 0
    return rows


def _softmax(*, subtracts: bool) -> bytes:
    """Softmax of exponentials, with or without the greatest logit subtracted."""
    shift = [
        ("REDUCE_MAX", "x axis", "top", "ReducerOptions", {"keepDims": True}),
        ("SUB", "x top", "logits", "SubOptions"),
    ]
    return chain(
        *(shift if subtracts else []),
        ("EXP", "logits" if subtracts else "x", "powers", "ExpOptions"),
        ("SUM", "powers axis", "total", "ReducerOptions", {"keepDims": True}),
        ("DIV", "powers total", "y", "DivOptions"),
        inputs="x",
        outputs="y",
        axis=_ints([1]),
        top=_float(2, 1),
        total=_float(2, 1),
        **dict.fromkeys(("x", "logits", "powers", "y"), _float(2, 10)),
    )


# Float16: underflow and rounding.


def _product(*factors: float) -> bytes:
    """Write x · factor · factor …, in this order."""
    names = ["x", *(f"p{index}" for index in range(len(factors) - 1)), "y"]
    tensors: dict[str, Any] = {name: _float(1, 16) for name in names}
    ops = []
    for index, factor in enumerate(factors):
        tensors[f"c{index}"] = constant(np.float32(factor))
        ops.append(("MUL", f"{names[index]} c{index}", names[index + 1], "MulOptions"))
    return chain(*ops, inputs="x", outputs="y", **tensors)


def _similarity(op: str) -> bytes:
    """Long products of positive values: in one accumulator, or as the mean of the products."""
    shared: dict[str, Any] = {"inputs": "a b", "outputs": "y"}
    if op == "BATCH_MATMUL":
        return chain(
            ("BATCH_MATMUL", "a b", "sums", "BatchMatMulOptions", {"adjY": True}),
            ("MUL", "sums scale", "y", "MulOptions"),
            a=_float(1, 1, 8192),
            b=_float(1, 1, 8192),
            sums=_float(1, 1, 1),
            scale=constant(np.float32(1 / 8192)),
            y=_float(1, 1, 1),
            **shared,
        )
    return chain(
        ("MUL", "a b", "products", "MulOptions"),
        ("MEAN", "products axis", "y", "ReducerOptions", {"keepDims": True}),
        a=_float(1, 1, 8192),
        b=_float(1, 1, 8192),
        products=_float(1, 1, 8192),
        axis=_ints([2]),
        y=_float(1, 1, 1),
        **shared,
    )


def _positions(*, wraps: bool) -> bytes:
    """Sine of positions up to 4,095 + x; the sound file first wraps them to one period."""
    positions = np.arange(3000, 3016, dtype=np.float32).reshape(1, 16)
    if wraps:
        positions = np.mod(positions.astype(np.float64), 2 * np.pi).astype(np.float32)
    return chain(
        ("ADD", "x positions", "angles", "AddOptions"),
        ("SIN", "angles", "y"),
        inputs="x",
        outputs="y",
        positions=constant(positions),
        **dict.fromkeys(("x", "angles", "y"), _float(1, 16)),
    )


# Both precisions: another result, without a message.


def _row_constant(shape: tuple[int, ...]) -> bytes:
    offsets = constant(np.arange(1, 5, dtype=np.float32).reshape(shape))
    if shape == (4, 1):
        return one_op("ADD", [_float(4, 4), offsets], [_float(4, 4)], "AddOptions")
    # The same sum on a batch of one.
    return chain(
        ("RESHAPE", "x up", "x4", "ReshapeOptions", {"newShape": [1, 1, 4, 4]}),
        ("ADD", "x4 offsets", "y4", "AddOptions"),
        ("RESHAPE", "y4 down", "y", "ReshapeOptions", {"newShape": [4, 4]}),
        inputs="x",
        outputs="y",
        x=_float(4, 4),
        y=_float(4, 4),
        x4=_float(1, 1, 4, 4),
        y4=_float(1, 1, 4, 4),
        up=_ints([1, 1, 4, 4]),
        down=_ints([4, 4]),
        offsets=offsets,
    )


def _flattening(*, reshapes: bool) -> bytes:
    weights = constant(_weights(5, 36))
    if not reshapes:
        return one_op(
            "FULLY_CONNECTED",
            [_float(1, 3, 3, 4), weights, None],
            [_float(1, 5)],
            "FullyConnectedOptions",
        )
    return chain(
        ("RESHAPE", "x shape", "row", "ReshapeOptions", {"newShape": [1, 36]}),
        ("FULLY_CONNECTED", "row w -", "y", "FullyConnectedOptions"),
        inputs="x",
        outputs="y",
        x=_float(1, 3, 3, 4),
        row=_float(1, 36),
        shape=_ints([1, 36]),
        w=weights,
        y=_float(1, 5),
    )


def _selection(*, expands: bool) -> bytes:
    condition = np.array([True, False, False, True, False])
    if expands:
        condition = np.tile(condition, (4, 1))
    sides = [_float(4, 5), _float(4, 5)]
    return one_op("SELECT_V2", [constant(condition, "bool"), *sides], sides[:1], "SelectV2Options")


def _batch_matmul(*, repeats: bool) -> bytes:
    """Write x @ y with one y for all batches; the sound file repeats it."""
    tile = [("TILE", "k times", "whole", "TileOptions")] if repeats else []
    product = f"q {'whole' if repeats else 'k'}"
    return chain(
        *tile,
        ("BATCH_MATMUL", product, "y", "BatchMatMulOptions"),
        inputs="q k",
        outputs="y",
        q=_float(2, 3, 4),
        k=_float(1, 4, 5),
        times=_ints([2, 1, 1]),
        whole=_float(2, 4, 5),
        y=_float(2, 3, 5),
    )


def _padding(rank: int) -> bytes:
    if rank == 3:
        return one_op(
            "PAD",
            [_float(3, 4, 5), _ints([[0, 0], [1, 1], [0, 0]])],
            [_float(3, 6, 5)],
            "PadOptions",
        )
    return chain(
        ("RESHAPE", "x up", "x4", "ReshapeOptions", {"newShape": [1, 3, 4, 5]}),
        ("PAD", "x4 pads", "y4", "PadOptions"),
        ("RESHAPE", "y4 down", "y", "ReshapeOptions", {"newShape": [3, 6, 5]}),
        inputs="x",
        outputs="y",
        x=_float(3, 4, 5),
        y=_float(3, 6, 5),
        x4=_float(1, 3, 4, 5),
        y4=_float(1, 3, 6, 5),
        up=_ints([1, 3, 4, 5]),
        down=_ints([3, 6, 5]),
        pads=_ints([[0, 0], [0, 0], [1, 1], [0, 0]]),
    )


def _reversal(*, gathers: bool) -> bytes:
    shape = (1, 3, 4, 5)
    if gathers:
        order = _ints([4, 3, 2, 1, 0])
        return one_op("GATHER", [_float(*shape), order], [_float(*shape)], "GatherOptions", axis=3)
    return one_op("REVERSE_V2", [_float(*shape), _ints([3])], [_float(*shape)], "ReverseV2Options")


def _cumulative(*, reverse: bool) -> bytes:
    """Sums of all later values; the sound file subtracts the earlier ones from the whole."""
    x = _float(1, 3, 4, 5)
    axis = constant(np.int32(2), "int32")
    if reverse:
        return one_op("CUMSUM", [x, axis], [x], "CumsumOptions", reverse=True)
    return chain(
        ("CUMSUM", "x axis", "sums", "CumsumOptions"),
        ("SUM", "x axes", "whole", "ReducerOptions", {"keepDims": True}),
        ("SUB", "whole sums", "later", "SubOptions"),
        ("ADD", "later x", "y", "AddOptions"),
        inputs="x",
        outputs="y",
        axis=axis,
        axes=_ints([2]),
        whole=_float(1, 3, 1, 5),
        **dict.fromkeys(("x", "sums", "later", "y"), x),
    )


def _pointwise_depthwise(*, size: int) -> bytes:
    """Depthwise with two outputs a channel: 1 × 1, or the same in the middle of 3 × 3."""
    weights = np.zeros((1, size, size, 8), np.float32)
    weights[0, size // 2, size // 2] = _weights(8)
    return one_op(
        "DEPTHWISE_CONV_2D",
        [_float(1, 4, 4, 4), constant(weights), constant(np.zeros(8, np.float32))],
        [_float(1, 4, 4, 8)],
        "DepthwiseConv2DOptions",
        depthMultiplier=2,
        **_CONV,
    )


# Both precisions: an error in the log, and an answer.


def _residual(*, reshapes: bool) -> bytes:
    """int8 sum of tensors of rank 3 and 2; the sound file makes the ranks equal."""
    lift = [("RESHAPE", "b shape", "b3", "ReshapeOptions", {"newShape": [1, 5, 8]})]
    return chain(
        *(lift if reshapes else []),
        ("ADD", "a b3" if reshapes else "a b", "y", "AddOptions"),
        inputs="a b",
        outputs="y",
        a=_int8(1, 5, 8),
        b=_int8(5, 8, scale=0.03, zero_point=-7),
        b3=_int8(1, 5, 8, scale=0.03, zero_point=-7),
        shape=_ints([1, 5, 8]),
        y=_int8(1, 5, 8, scale=0.09, zero_point=-2),
    )


def _greatest(*, twice: bool) -> bytes:
    """The greatest of 6 values; the sound file writes them twice, so that 12 is a multiple of 4."""
    twin = [("CONCATENATION", "x x", "xx", "ConcatenationOptions", {"axis": 1})]
    return chain(
        *(twin if twice else []),
        ("TOPK_V2", "xx k" if twice else "x k", "y places", "TopKV2Options"),
        inputs="x",
        outputs="y places",
        x=_float(4, 6),
        xx=_float(4, 12),
        k=constant(np.int32(1), "int32"),
        y=_float(4, 1),
        places={"dtype": "int32", "shape": (4, 1)},
    )


def _argmax(*, reshapes: bool) -> bytes:
    """The class of negative logits; the sound file moves the classes to another axis."""
    lift = [("RESHAPE", "x shape", "x3", "ReshapeOptions", {"newShape": [16, 10, 1]})]
    return chain(
        *(lift if reshapes else []),
        ("ARG_MAX", "x3 axis" if reshapes else "x axis", "raw", "ArgMaxOptions", {"outputType": 2}),
        *([("RESHAPE", "raw flat", "y", "ReshapeOptions", {"newShape": [16]})] if reshapes else []),
        inputs="x",
        outputs="y" if reshapes else "raw",
        x=_float(16, 10),
        x3=_float(16, 10, 1),
        shape=_ints([16, 10, 1]),
        flat=_ints([16]),
        axis=constant(np.int32(1), "int32"),
        raw={"dtype": "int32", "shape": (16, 1) if reshapes else (16,)},
        y={"dtype": "int32", "shape": (16,)},
    )


def _grouped(*, split: bool) -> bytes:
    """Convolution in four groups of two channels; the sound file fills other weights with zeros."""
    groups = _weights(8, 3, 3, 2)
    weights = groups
    if not split:
        weights = np.zeros((8, 3, 3, 8), np.float32)
        for channel in range(8):
            first = channel // 2 * 2
            weights[channel, :, :, first : first + 2] = groups[channel]
    return one_op(
        "CONV_2D",
        [_float(1, 6, 6, 8), constant(weights), constant(np.zeros(8, np.float32))],
        [_float(1, 6, 6, 8)],
        "Conv2DOptions",
        **_CONV,
    )


def _shortcut(*, slices: bool) -> bytes:
    """A convolution of 1×1 with stride 2 in int8; the sound file slices the image before."""
    codes = np.rint(_weights(8, 1, 1, 4).clip(-2, 2) / 0.02).astype(np.int8)
    begin, end, strides = _ints([0, 0, 0, 0]), _ints([1, 6, 6, 4]), _ints([1, 2, 2, 1])
    step = {"strideH": 1, "strideW": 1} if slices else {"strideH": 2, "strideW": 2}
    convolve = ("CONV_2D", "half w b" if slices else "x w b", "y", "Conv2DOptions", _CONV | step)
    cut = [("STRIDED_SLICE", "x begin end strides", "half", "StridedSliceOptions")]
    return chain(
        *(cut if slices else []),
        convolve,
        inputs="x",
        outputs="y",
        x=_int8(1, 6, 6, 4),
        half=_int8(1, 3, 3, 4),
        w={"dtype": "int8", "shape": codes.shape, "data": codes, "scales": [0.02]},
        b={"dtype": "int32", "shape": (8,), "data": np.zeros(8, np.int32), "scales": [0.001]},
        y=_int8(1, 3, 3, 8, scale=0.2),
        **({"begin": begin, "end": end, "strides": strides} if slices else {}),
    )


def _space_to_depth(op: str) -> bytes:
    if op == "SPACE_TO_DEPTH":
        return one_op(
            op, [_float(2, 4, 6, 3)], [_float(2, 2, 3, 12)], "SpaceToDepthOptions", blockSize=2
        )
    halves = [f"h{index}" for index in range(2)], [f"d{index}" for index in range(2)]
    split = ("SPLIT", "axis x", " ".join(halves[0]), "SplitOptions", {"numSplits": 2})
    moves = [
        ("SPACE_TO_DEPTH", image, moved, "SpaceToDepthOptions", {"blockSize": 2})
        for image, moved in zip(*halves, strict=True)
    ]
    return chain(
        split,
        *moves,
        ("CONCATENATION", " ".join(halves[1]), "y", "ConcatenationOptions", {"axis": 0}),
        inputs="x",
        outputs="y",
        axis=constant(np.int32(0), "int32"),
        x=_float(2, 4, 6, 3),
        y=_float(2, 2, 3, 12),
        **dict.fromkeys(halves[0], _float(1, 4, 6, 3)),
        **dict.fromkeys(halves[1], _float(1, 2, 3, 12)),
    )


# Both precisions: refused with words.


def _version(content: bytes, op: str, version: int) -> bytes:
    """Raise the version of the file's only operator code of this name."""
    from ai_edge_litert import schema_py_generated as schema

    model = unpack(content)
    (code,) = [
        each
        for each in model.operatorCodes
        if each.builtinCode == getattr(schema.BuiltinOperator, op)
    ]
    code.version = version
    return pack(model)


def _transpose_conv(version: int) -> bytes:
    """TRANSPOSE_CONV with a bias; version 4 knows a fused activation."""
    content = chain(
        ("TRANSPOSE_CONV", "shape w x b", "sums", "TransposeConvOptions", _STRIDES),
        ("RELU", "sums", "y"),
        inputs="x",
        outputs="y",
        shape=_ints([1, 8, 8, 5]),
        w=constant(_weights(5, 2, 2, 3)),
        b=constant(_weights(5)),
        x=_float(1, 4, 4, 3),
        sums=_float(1, 8, 8, 5),
        y=_float(1, 8, 8, 5),
    )
    return _version(content, "TRANSPOSE_CONV", version)


_STRIDES = {"strideH": 2, "strideW": 2, "padding": 1}


def _subtraction(version: int) -> bytes:
    content = one_op("SUB", [_float(1, 8)] * 2, [_float(1, 8)], "SubOptions")
    return _version(content, "SUB", version)


def _sum(dtype: str) -> bytes:
    """A sum of codes, between floats."""
    scale = {"int8": 0.04, "int16": 0.0002}[dtype]
    codes = {"dtype": dtype, "shape": (2, 8), "scales": [scale]}
    return chain(
        ("QUANTIZE", "x", "q"),
        ("ADD", "q q", "p", "AddOptions", {"potScaleInt16": False}),
        ("DEQUANTIZE", "p", "y"),
        inputs="x",
        outputs="y",
        **dict.fromkeys("xy", _float(2, 8)),
        q=codes,
        p=codes | {"scales": [2 * scale]},
    )


def _activations(dtype: str) -> bytes:
    """A matrix product in codes, between floats."""
    scale = {"int8": 0.04, "int16": 0.0002}[dtype]
    bias = "int32" if dtype == "int8" else "int64"
    codes = np.rint(_weights(4, 8).clip(-2, 2) / 0.02).astype(np.int8)
    return chain(
        ("QUANTIZE", "x", "q"),
        ("FULLY_CONNECTED", "q w b", "p", "FullyConnectedOptions"),
        ("DEQUANTIZE", "p", "y"),
        inputs="x",
        outputs="y",
        x=_float(2, 8),
        y=_float(2, 4),
        q={"dtype": dtype, "shape": (2, 8), "scales": [scale]},
        p={"dtype": dtype, "shape": (2, 4), "scales": [4 * scale]},
        w={"dtype": "int8", "shape": (4, 8), "data": codes, "scales": [0.02]},
        b={"dtype": bias, "shape": (4,), "data": np.zeros(4, bias), "scales": [scale * 0.02]},
    )


def _weight_only(*, dequantizes: bool) -> bytes:
    """int8 weights with a DEQUANTIZE before a float matrix product, or float weights."""
    codes = np.rint(_weights(5, 4).clip(-2, 2) / 0.02).astype(np.int8)
    stored = {"dtype": "int8", "shape": (5, 4), "data": codes, "scales": [0.02] * 5}
    real = constant(codes.astype(np.float32) * np.float32(0.02))
    return chain(
        *([("DEQUANTIZE", "codes", "w")] if dequantizes else []),
        ("FULLY_CONNECTED", "x w -", "y", "FullyConnectedOptions"),
        inputs="x",
        outputs="y",
        x=_float(2, 4),
        y=_float(2, 5),
        codes=stored,
        w=_float(5, 4) if dequantizes else real,
    )


def _l2(*, decomposed: bool) -> bytes:
    x = _float(2, 8)
    if not decomposed:
        return one_op("L2_NORMALIZATION", [x], [x], "L2NormOptions")
    return chain(
        ("MUL", "x x", "squares", "MulOptions"),
        ("SUM", "squares axis", "total", "ReducerOptions", {"keepDims": True}),
        ("RSQRT", "total", "inverse"),
        ("MUL", "x inverse", "y", "MulOptions"),
        inputs="x",
        outputs="y",
        axis=_ints([1]),
        total=_float(2, 1),
        inverse=_float(2, 1),
        **dict.fromkeys(("x", "squares", "y"), x),
    )


CASES: tuple[Case, ...] = (
    Case(
        "sum_overflow",
        partial(_reduction, "SUM"),
        partial(_reduction, "MEAN"),
        [(1, 112, 112, 4)],
        HALF,
        "overflow",
        "the sum of 12,544 values near 10 is 125,440, beyond float16's 65,504",
        "SUM",
        draw=lambda rng, shape: 10 + rng.standard_normal(shape),
        counterpart_equal=False,
    ),
    Case(
        "matmul_overflow",
        partial(_shares, "FULLY_CONNECTED", scales=False),
        partial(_shares, "FULLY_CONNECTED", scales=True),
        [(4, 1024)],
        HALF,
        "overflow",
        "the sums of 1,024 products are beyond float16's 65,504",
        "FULLY_CONNECTED",
        draw=lambda rng, shape: 10 + rng.standard_normal(shape),
    ),
    Case(
        "scores_overflow",
        partial(_scaled_scores, 1.0, 1 / 4096),
        partial(_scaled_scores, 1 / 4096, 1.0),
        [(2, 6, 256), (2, 6, 256)],
        HALF,
        "overflow",
        "attention scores are beyond float16's 65,504, and scaled only after the product",
        "BATCH_MATMUL",
        draw=lambda rng, shape: 40 * rng.standard_normal(shape),
    ),
    Case(
        "conv_overflow",
        partial(_shares, "CONV_2D", scales=False),
        partial(_shares, "CONV_2D", scales=True),
        [(1, 6, 6, 32)],
        HALF,
        "overflow",
        "the convolution's sums of 288 products are beyond float16's 65,504",
        "CONV_2D",
        draw=lambda rng, shape: 1000 + 100 * rng.standard_normal(shape),
    ),
    Case(
        "norm_overflow",
        partial(_norm, before=1.0),
        partial(_norm, before=1 / 64),
        [(1, 6, 32)],
        HALF,
        "overflow",
        "the squared difference of the norm is beyond float16's 65,504",
        "SQUARED_DIFFERENCE",
        draw=lambda rng, shape: 400 * rng.standard_normal(shape),
    ),
    Case(
        "exp_overflow",
        partial(_softmax, subtracts=False),
        partial(_softmax, subtracts=True),
        [(2, 10)],
        HALF,
        "overflow",
        "the exponential of logits above 11.09 is beyond float16's 65,504",
        "EXP",
        draw=lambda rng, shape: 10 + 4 * rng.standard_normal(shape),
    ),
    Case(
        "vanishing_product",
        partial(_product, 1e-5, 1e-4, 3e4, 3e4),
        partial(_product, 1e-5, 3e4, 1e-4, 3e4),
        [(1, 16)],
        HALF,
        "underflow",
        "products of 1e-9 are below float16's smallest number, 6e-8, and become zero",
        "MUL",
        draw=lambda rng, shape: rng.uniform(0.1, 1.0, shape),
    ),
    Case(
        "epsilon_vanishes",
        partial(_norm, epsilon=1e-12),
        partial(_norm, epsilon=1e-5),
        [(1, 6, 32)],
        HALF,
        "underflow",
        "the epsilon 1e-12 is zero in float16: rows without variance divide by zero",
        "RSQRT",
        draw=_constant_rows,
    ),
    Case(
        "long_product",
        partial(_similarity, "BATCH_MATMUL"),
        partial(_similarity, "MEAN"),
        [(1, 1, 8192), (1, 1, 8192)],
        HALF,
        "rounding",
        "a float16 accumulator stops growing at 2,048 times its terms",
        "BATCH_MATMUL",
        draw=_positive,
    ),
    Case(
        "large_positions",
        partial(_positions, wraps=False),
        partial(_positions, wraps=True),
        [(1, 16)],
        HALF,
        "rounding",
        "float16 has steps of 2 between 2,048 and 4,096: the angle is lost",
        "SIN",
    ),
    Case(
        "constant_per_row",
        partial(_row_constant, (4, 1)),
        partial(_row_constant, (1, 1, 4, 1)),
        [(4, 4)],
        BOTH,
        "wrong",
        "a constant with a batch axis is stored without it: its first row is used for all",
        "ADD",
    ),
    Case(
        "broadcast_condition",
        partial(_selection, expands=False),
        partial(_selection, expands=True),
        [(4, 5), (4, 5)],
        BOTH,
        "wrong",
        "a condition that broadcasts is not repeated over the rows",
        "SELECT_V2",
    ),
    Case(
        "flattening_fully_connected",
        partial(_flattening, reshapes=False),
        partial(_flattening, reshapes=True),
        [(1, 3, 3, 4)],
        BOTH,
        "wrong",
        "FULLY_CONNECTED does not flatten an input of rank 4",
        "FULLY_CONNECTED",
    ),
    Case(
        "broadcasting_matmul",
        partial(_batch_matmul, repeats=False),
        partial(_batch_matmul, repeats=True),
        [(2, 3, 4), (1, 4, 5)],
        BOTH,
        "wrong",
        "BATCH_MATMUL does not broadcast its batch axis",
        "BATCH_MATMUL",
    ),
    Case(
        "padding_rank_3",
        partial(_padding, 3),
        partial(_padding, 4),
        [(3, 4, 5)],
        BOTH,
        "wrong",
        "PAD of a tensor of rank 3 applies its paddings to other axes",
        "PAD",
    ),
    Case(
        "reversed_channels",
        partial(_reversal, gathers=False),
        partial(_reversal, gathers=True),
        [(1, 3, 4, 5)],
        BOTH,
        "wrong",
        "REVERSE_V2 does not reverse the last axis",
        "REVERSE_V2",
    ),
    Case(
        "reverse_cumsum",
        partial(_cumulative, reverse=True),
        partial(_cumulative, reverse=False),
        [(1, 3, 4, 5)],
        BOTH,
        "wrong",
        "CUMSUM ignores its option reverse",
        "CUMSUM",
    ),
    Case(
        "pointwise_depthwise",
        partial(_pointwise_depthwise, size=1),
        partial(_pointwise_depthwise, size=3),
        [(1, 4, 4, 4)],
        BOTH,
        "wrong",
        "DEPTHWISE_CONV_2D of 1 × 1 ignores its depth multiplier",
        "DEPTHWISE_CONV_2D",
    ),
    Case(
        "int16_sum",
        partial(_sum, "int16"),
        partial(_sum, "int8"),
        [(2, 8)],
        BOTH,
        "wrong",
        "the engine takes an ADD of int16 and computes it wrong",
        "ADD",
        counterpart_equal=False,
    ),
    Case(
        "argmax_of_negatives",
        partial(_argmax, reshapes=False),
        partial(_argmax, reshapes=True),
        [(16, 10)],
        BOTH,
        "wrong",
        "ARG_MAX counts the zeros that pad 10 channels to 12: it returns 10 if all are negative",
        "ARG_MAX",
        draw=lambda rng, shape: -rng.uniform(0.5, 8.0, shape),
    ),
    Case(
        "int8_ranks_differ",
        partial(_residual, reshapes=False),
        partial(_residual, reshapes=True),
        [(1, 5, 8), (5, 8)],
        BOTH,
        "logged",
        "the shader of an int8 ADD of operands of different ranks does not compile",
        "ADD",
        words="to 'vec4<i32>'",
        draw=_codes,
        dtype="int8",
    ),
    Case(
        "topk",
        partial(_greatest, twice=False),
        partial(_greatest, twice=True),
        [(4, 6)],
        BOTH,
        "logged",
        "TOPK_V2 needs a last axis that is a multiple of 4",
        "TOPK_V2",
        words="TopK requires src tensor C dimension to be divisible by 4.",
    ),
    Case(
        "narrow_groups",
        partial(_grouped, split=True),
        partial(_grouped, split=False),
        [(1, 6, 6, 8)],
        BOTH,
        "logged",
        "a convolution in groups of two channels reads buffers of size zero",
        "CONV_2D",
        words="Binding size for [Buffer (unlabeled)] is zero",
    ),
    Case(
        "strided_pointwise_int8",
        partial(_shortcut, slices=False),
        partial(_shortcut, slices=True),
        [(1, 6, 6, 4)],
        BOTH,
        "logged",
        "a convolution of 1 × 1 in int8 ignores its strides, as in the shortcuts of a ResNet",
        "CONV_2D",
        words="Shape mismatch",
        draw=_codes,
        dtype="int8",
    ),
    Case(
        "batched_space_to_depth",
        partial(_space_to_depth, "SPACE_TO_DEPTH"),
        partial(_space_to_depth, "SPLIT"),
        [(2, 4, 6, 3)],
        BOTH,
        "logged",
        "the shader of SPACE_TO_DEPTH does not compile for a batch of two",
        "SPACE_TO_DEPTH",
        words="invalid character found",
    ),
    Case(
        "transpose_conv_version",
        partial(_transpose_conv, 4),
        partial(_transpose_conv, 3),
        [(1, 4, 4, 3)],
        BOTH,
        "refused",
        "the engine supports TRANSPOSE_CONV up to version 3, the file has version 4",
        "TRANSPOSE_CONV",
        words="TRANSPOSE_CONV: Max version supported: 3. Requested version 4.",
    ),
    Case(
        "sub_version",
        partial(_subtraction, 3),
        partial(_subtraction, 2),
        [(1, 8), (1, 8)],
        BOTH,
        "refused",
        "the engine supports SUB up to version 2, the file has version 3",
        "SUB",
        words="SUB: Max version supported: 2. Requested version 3.",
    ),
    Case(
        "int16_activations",
        partial(_activations, "int16"),
        partial(_activations, "int8"),
        [(2, 8)],
        BOTH,
        "refused",
        "the engine has no int16",
        "FULLY_CONNECTED",
        words="FULLY_CONNECTED: Tensor type(INT16) is not supported.",
        counterpart_equal=False,
    ),
    Case(
        "weight_only_linear",
        partial(_weight_only, dequantizes=True),
        partial(_weight_only, dequantizes=False),
        [(2, 4)],
        BOTH,
        "refused",
        "the engine refuses int8 weights of rank 2 with a DEQUANTIZE of their own",
        "FULLY_CONNECTED",
        words="Shape mismatch",
    ),
    Case(
        "unsupported_op",
        partial(_l2, decomposed=False),
        partial(_l2, decomposed=True),
        [(2, 8)],
        BOTH,
        "refused",
        "the engine has no L2_NORMALIZATION",
        "L2_NORMALIZATION",
        words="L2_NORMALIZATION: Operation is not supported.",
    ),
)
