"""
What TFLite's kernels require of the quantization parameters of each op.

From the specification (https://ai.google.dev/edge/litert/models/quantization_spec) and the function
named in each row, under `tensorflow/lite/kernels/`. Each row was run on xnnpack, builtin and
reference kernels of ai-edge-litert 2.3.0: what it demands, some of them refuse or compute wrongly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class OpRules:
    """
    The requirements of one op.

    Attributes:
        source: Where the kernels look, or do not.
        same: Operands that share scale and zero point with the outputs.
        rescaling: dtypes of which the kernels bring such operands to the output's scale.
        refused: Whether some kernels refuse any other scale; the others compute wrongly.
        outputs: Scale and zero point that the kernels write, by the output's dtype.
        exact: How far, relative, the output's scale may be from that.
        moves_zero_point: Whether CPU kernels compute 8 bits with another zero point of the output.
        symmetric: Whether int16 needs zero points of 0.
        one_scale: Operands of which the kernels read the first of several scales.
        to: Output dtypes that kernels have beside the input's, by the input's.
        without: Quantized dtypes that kernels compute as plain integers.
    """

    source: str
    same: tuple[int, ...] = ()
    rescaling: frozenset[str] = frozenset()
    refused: bool = False
    outputs: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    exact: float = 0.0
    moves_zero_point: bool = False
    symmetric: bool = False
    one_scale: tuple[int, ...] = ()
    to: Mapping[str, str] = field(default_factory=dict)
    without: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Weighted:
    """
    The requirements of an op with weights.

    Attributes:
        source: Where the kernels look, or do not.
        data: Position of the input.
        weight: Position of the weight.
        bias: Position of the bias; None where there is none.
        axis: Of the scales of a weight that has several; None where kernels read one scale alone.
        zero_point: dtypes of activations beside which kernels know a zero point of an int8 weight
            that has one scale.
        dynamic: dtypes of weights that kernels know beside float activations.
        to: Output dtypes that kernels have beside the input's, by the input's.
    """

    source: str
    data: int
    weight: int
    bias: int | None
    axis: int | None
    zero_point: frozenset[str] = frozenset()
    dynamic: frozenset[str] = frozenset({"int8", "int4"})
    to: Mapping[str, str] = field(default_factory=dict)


_FIRST = (0,)
_BOTH = (0, 1)
_EVERY = tuple(range(64))

RULES: Mapping[str, OpRules] = {
    "ABS": OpRules("elementwise.cc GenericPrepare", symmetric=True),
    "ADD": OpRules("add.cc Prepare", symmetric=True),
    "AVERAGE_POOL_2D": OpRules("pooling.cc AverageEvalQuantizedInt8", _FIRST),
    "BATCH_TO_SPACE_ND": OpRules("batch_to_space_nd.cc Prepare", _FIRST, refused=True),
    "BROADCAST_TO": OpRules("broadcast_to.cc Eval", _FIRST),
    "CONCATENATION": OpRules(
        "concatenation.cc Prepare",
        _EVERY,
        rescaling=frozenset({"uint8"}),
        refused=True,
        symmetric=True,
    ),
    "DEPTH_TO_SPACE": OpRules("depth_to_space.cc Eval; XNNPACK", _FIRST, refused=True),
    "DIV": OpRules("div.cc Prepare"),
    "DYNAMIC_UPDATE_SLICE": OpRules("dynamic_update_slice.cc Eval", _BOTH),
    "ELU": OpRules("activations.cc EluPrepare"),
    "EXP": OpRules("exp.cc Prepare", symmetric=True),
    "EXPAND_DIMS": OpRules("expand_dims.cc Prepare", _FIRST, refused=True),
    "FLOOR_DIV": OpRules("floor_div.cc Eval", without=frozenset({"int8", "int16"})),
    "GATHER": OpRules("gather.cc Eval", _FIRST, one_scale=_FIRST),
    "GATHER_ND": OpRules("gather_nd.cc Eval", _FIRST),
    "HARD_SWISH": OpRules("activations.cc HardSwishPrepare"),
    "L2_NORMALIZATION": OpRules(
        "l2norm.cc Prepare", outputs={"int8": (1 / 128, 0), "uint8": (1 / 128, 128)}, refused=True
    ),
    "LEAKY_RELU": OpRules("activations.cc LeakyReluPrepare", symmetric=True),
    "LOG": OpRules("elementwise.cc GenericPrepare", symmetric=True),
    "LOGISTIC": OpRules(
        "activations.cc SigmoidPrepare",
        outputs={"int8": (1 / 256, -128), "uint8": (1 / 256, 0), "int16": (1 / 32768, 0)},
        moves_zero_point=True,
        refused=True,
        symmetric=True,
    ),
    "LOG_SOFTMAX": OpRules(
        "activations.cc LogSoftmaxPrepare",
        outputs={"int8": (16 / 256, 127), "uint8": (16 / 256, 255)},
        refused=True,
    ),
    "MAXIMUM": OpRules("maximum_minimum.cc Eval", _BOTH),
    "MAX_POOL_2D": OpRules("pooling.cc MaxEvalQuantizedInt8; XNNPACK", _FIRST, refused=True),
    "MEAN": OpRules("reduce.cc PrepareMeanOrSum", symmetric=True),
    "MINIMUM": OpRules("maximum_minimum.cc Eval", _BOTH),
    "MIRROR_PAD": OpRules("mirror_pad.cc Prepare", _FIRST, refused=True),
    "MUL": OpRules("mul.cc Prepare", symmetric=True),
    "NEG": OpRules("neg.cc Eval", _FIRST),
    "PACK": OpRules("pack.cc Prepare", _EVERY, refused=True),
    "PAD": OpRules("pad.cc Eval; XNNPACK", _FIRST, refused=True),
    "PADV2": OpRules("pad.cc Prepare", (0, 2), refused=True),
    "PRELU": OpRules("activations.cc PreluPrepare", one_scale=(1,), without=frozenset({"int16"})),
    "REDUCE_MAX": OpRules("reduce.cc PrepareSimple", _FIRST, refused=True, symmetric=True),
    "REDUCE_MIN": OpRules("reduce.cc PrepareSimple", _FIRST, refused=True, symmetric=True),
    "REDUCE_PROD": OpRules("reduce.cc PrepareProd", symmetric=True),
    "RELU": OpRules("activations.cc ReluPrepare", symmetric=True),
    "RELU6": OpRules("activations.cc ReluPrepare", symmetric=True),
    "RELU_0_TO_1": OpRules("activations.cc ReluPrepare", symmetric=True),
    "RELU_N1_TO_1": OpRules("activations.cc ReluPrepare", symmetric=True),
    "RESHAPE": OpRules("reshape.cc Eval", _FIRST),
    "RESIZE_BILINEAR": OpRules("resize_bilinear.cc Eval; XNNPACK", _FIRST, refused=True),
    "RESIZE_NEAREST_NEIGHBOR": OpRules("resize_nearest_neighbor.cc Eval", _FIRST),
    "REVERSE_SEQUENCE": OpRules("reverse_sequence.cc Eval", _FIRST),
    "REVERSE_V2": OpRules("reverse.cc Eval", _FIRST),
    "RSQRT": OpRules("elementwise.cc GenericPrepare", symmetric=True),
    "SCATTER_ND": OpRules("scatter_nd.cc Eval", (1,)),
    "SELECT": OpRules("select.cc Eval", (1, 2)),
    "SELECT_V2": OpRules("select.cc Eval", (1, 2)),
    "SLICE": OpRules("slice.cc Eval; XNNPACK", _FIRST, refused=True),
    "SOFTMAX": OpRules(
        "activations.cc SoftmaxPrepare",
        outputs={"int8": (1 / 256, -128), "uint8": (1 / 256, 0), "int16": (1 / 32768, 0)},
        exact=1e-3,
        refused=True,
        symmetric=True,
        to={"int8": "int16"},
    ),
    "SPACE_TO_BATCH_ND": OpRules("space_to_batch_nd.cc Prepare", _FIRST, refused=True),
    "SPACE_TO_DEPTH": OpRules("space_to_depth.cc Eval; XNNPACK", _FIRST, refused=True),
    "SPLIT": OpRules("split.cc Eval; XNNPACK", (1,), refused=True),
    "SPLIT_V": OpRules("split_v.cc Eval", _FIRST),
    "SQRT": OpRules("elementwise.cc GenericPrepare", symmetric=True),
    "SQUARED_DIFFERENCE": OpRules("squared_difference.cc Prepare"),
    "SQUEEZE": OpRules("squeeze.cc Eval", _FIRST),
    "STRIDED_SLICE": OpRules("strided_slice.cc Eval; XNNPACK", _FIRST, refused=True),
    "SUB": OpRules("sub.cc Prepare", symmetric=True),
    "SUM": OpRules("reduce.cc PrepareMeanOrSum", symmetric=True),
    "TANH": OpRules(
        "activations.cc TanhPrepare",
        outputs={"int16": (1 / 32768, 0)},
        exact=1e-3,
        refused=True,
        symmetric=True,
    ),
    "TILE": OpRules("tile.cc Eval", _FIRST),
    "TOPK_V2": OpRules("topk_v2.cc Eval", _FIRST),
    "TRANSPOSE": OpRules("transpose.cc Eval; XNNPACK", _FIRST, refused=True),
    "UNPACK": OpRules("unpack.cc Prepare", _FIRST, refused=True),
}
"""By op. Kernels of TANH write any scale of 8 bits."""

WEIGHTED: Mapping[str, Weighted] = {
    "BATCH_MATMUL": Weighted(
        "batch_matmul.cc Prepare",
        0,
        1,
        None,
        axis=None,
        zero_point=frozenset({"int8"}),
        dynamic=frozenset({"int8"}),
    ),
    "CONV_2D": Weighted("conv.cc Prepare", 0, 1, 2, axis=0),
    "DEPTHWISE_CONV_2D": Weighted(
        "depthwise_conv.cc Prepare", 0, 1, 2, axis=3, dynamic=frozenset({"int8"})
    ),
    "EMBEDDING_LOOKUP": Weighted(
        "embedding_lookup.cc Prepare",
        0,
        1,
        None,
        axis=0,
        dynamic=frozenset({"int8", "int4", "int2"}),
    ),
    "FULLY_CONNECTED": Weighted(
        "fully_connected.cc PrepareImpl",
        0,
        1,
        2,
        axis=0,
        zero_point=frozenset({"int8", "int16"}),
        dynamic=frozenset({"int8", "int4", "int2"}),
        to={"uint8": "int16"},
    ),
    "TRANSPOSE_CONV": Weighted(
        "transpose_conv.cc Prepare", 2, 1, 3, axis=0, dynamic=frozenset({"int8"})
    ),
}
"""By op. Kernels of uint8 know all zero points, of a weight that has one scale."""


def keeps_scale(name: str) -> bool:
    """Whether an op's output has the scale of its input."""
    return name in RULES and bool(RULES[name].same)
