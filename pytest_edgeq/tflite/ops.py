"""
The table of TFLite's ops, and sets derived from it.

Demands of kernels are from the specification
(https://ai.google.dev/edge/litert/models/quantization_spec) and the function named in each row,
under `tensorflow/lite/kernels/`. Each such row was tested on xnnpack, builtin and reference
kernels of ai-edge-litert 2.3.0: some of them refuse a file that violates it, or compute wrongly.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from pytest_edgeq.names import hint, nearest


@dataclass(frozen=True, slots=True)
class OpFacts:
    """Properties of one op."""

    # Least numbers of inputs and outputs, from the kernel's `Prepare`. Operands beyond these are
    # optional, or refused by the kernel with a sentence.
    least: tuple[int, int] | None = None
    # Function that demands the quantization parameters; empty where no rule is known
    source: str = ""
    # Positions of data (`kInputTensor` of the kernel); all operands where none is named. Operands
    # in no role are arguments, such as shapes and axes.
    inputs: tuple[int, ...] = ()
    weights: tuple[int, ...] = ()  # positions of weights (`kWeightsTensor`)
    biases: tuple[int, ...] = ()  # positions of biases (`kBiasTensor`)
    computed_weight: bool = False  # whether the weight may as well be an activation
    # Axis of the weight that holds the output channels, or the rows of an embedding. Kernels read
    # per-channel scales along it.
    axis: int | None = None
    axes: tuple[str, ...] = ()  # names of the axes of the weight
    summed: tuple[int, ...] = ()  # axes of the weight that one output value sums over
    # dtypes of weights that the kernels compute with float activations
    dynamic: tuple[str, ...] = ()
    # dtypes of activations with which the kernels apply a zero point of an int8 weight that has one
    # scale. Kernels of uint8 apply all, of a weight that has one scale.
    zero_point: tuple[str, ...] = ()
    same: tuple[int, ...] = ()  # operands that share scale and zero point with the outputs
    # dtypes of which the kernels bring such operands to the output's scale
    rescaling: tuple[str, ...] = ()
    refused: bool = False  # whether some kernels refuse any other scale; the others compute wrongly
    # Scale and zero point that the kernels write, by the output's dtype. Kernels of TANH write any
    # scale of 8 bits.
    outputs: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    exact: float = 0.0  # greatest relative difference of the output's scale from that
    # Whether CPU kernels compute 8 bits with another zero point of the output
    moves_zero_point: bool = False
    symmetric: bool = False  # whether int16 needs zero points of 0
    # Operands of which the kernels read only the first of several scales
    one_scale: tuple[int, ...] = ()
    # Output dtypes that kernels support besides the input's, by the input's
    to: Mapping[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()  # quantized dtypes that kernels compute as plain integers
    # How many of the first inputs may not be left out (−1); 0 for the least number
    required: int = 0
    # Input whose dtype the kernels write, whichever the output has: `Prepare` neither compares the
    # dtypes nor sets the output's
    dtype_of: int | None = None
    # Other output dtypes that it may have for inputs of 8 bits or less. ai-edge-quantizer 0.10.0
    # writes float32 for a BATCH_MATMUL of two constants: the kernels write fewer bytes than the
    # tensor has, which `localize` reports.
    other_dtypes: tuple[str, ...] = ()
    # The only property that differs between the input and the output
    changes: Literal["", "quantization", "storage", "dtype", "shape", "order"] = ""
    copies: bool = False  # whether quantized kernels copy codes without computing new ones
    ends: tuple[float, float] | None = None  # ends of the interval to which it clamps each element
    # Whether it is an elementwise function that torch calls in a module of its own
    unary: bool = False
    commutative: bool = False  # whether the operands can be exchanged
    # Whether its kernels bring two inputs of codes to one scale first: near ties may go either way
    compares: bool = False
    # Position of the operand by which it chooses labels, boxes or a mask, which a small change of
    # that operand may change as a whole
    scores: int | None = None
    # Whether it passes a choice through: always, or alone, if all other operands are constant
    passes_choice: Literal["", "always", "alone"] = ""
    keeps_error: bool = False  # whether the rounding error of the output is that of the inputs
    # Whether the values of the output can lie in a smaller range than those of the input, because
    # it picks some or averages them
    narrows: Literal["", "picks", "averages"] = ""
    # Which operands can determine the range of the output: all of them, or constants alone
    shares_range: Literal["", "all", "constants"] = ""
    masks: bool = False  # whether it may mask scores, or make the mask
    # Whether the output has a range of its own, though the op has no weights. Others have their
    # input's (pools, reshapes, joins), or one that TFLite fixes.
    own_range: bool = False
    module: str | None = None  # kind of torch module that calls it
    # Whether torch's own convolutions and linear layers never call it, ever or with computed
    # operands
    not_in_layers: Literal["", "ever", "computed"] = ""
    stateful: bool = False  # whether it keeps values from run to run
    random: bool = False  # whether it computes other values in every run
    # Whether PT2E's annotators find it in strictly exported programs alone
    needs_strict: bool = False
    # Runtime whose int8 kernel is wrong, which no device runs and no file can avoid. BUILTIN_REF of
    # ai-edge-litert 2.3.0 reads the input of SUM as uint8. TensorFlow 2.21.0 is off by up to 29 LSB
    # where the second operand of a BATCH_MATMUL has a zero point.
    wrong_on: str = ""
    # Names in torch, Keras and ONNX without separators, the closest first; not those that are spelt
    # alike
    called: tuple[str, ...] = ()


_EVERY = tuple(range(64))
_ALL = 1 << 30
_OHWI = ("output channel", "row", "column", "input channel")
_TABLE = ("row", "column")
_ZERO_TO_ONE = {"int8": (1 / 256, -128), "uint8": (1 / 256, 0), "int16": (1 / 32768, 0)}

# Gates, peepholes, projection, layer normalization.
_LSTM_WEIGHTS = (*range(1, 12), 16, *range(20, 24))
_LSTM_BIASES = (12, 13, 14, 15, 17)

# Rows fill their lines.
# fmt: off
OPS: Mapping[str, OpFacts] = {
    # The same elements, held in another way.
    "CAST": OpFacts((1, 1), changes="dtype"),
    "DENSIFY": OpFacts((1, 1), changes="storage"),
    "DEQUANTIZE": OpFacts((1, 1), changes="quantization"),
    "QUANTIZE": OpFacts((1, 1), changes="quantization", own_range=True),
    "EXPAND_DIMS": OpFacts((2, 1), "expand_dims.cc Prepare", inputs=(0,), same=(0,), refused=True,
        changes="shape", copies=True, called=("unsqueeze",)),
    "RESHAPE": OpFacts((1, 1), "reshape.cc Eval", inputs=(0,), same=(0,), required=_ALL, dtype_of=0,
        changes="shape", copies=True, called=("flatten", "view", "unsqueeze")),
    "SQUEEZE": OpFacts((1, 1), "squeeze.cc Eval", same=(0,), dtype_of=0, changes="shape",
        copies=True),
    "TRANSPOSE": OpFacts((2, 1), "transpose.cc Eval; XNNPACK", inputs=(0,), same=(0,), refused=True,
        changes="order", copies=True, called=("permute",)),
    # Layers with weights.
    "CONV_2D": OpFacts((2, 1), "conv.cc Prepare", inputs=(0,), weights=(1,), biases=(2,), axis=0,
        axes=_OHWI, summed=(1, 2, 3), dynamic=("int8", "int4"), module="conv", called=("conv1d",)),
    "DEPTHWISE_CONV_2D": OpFacts((2, 1), "depthwise_conv.cc Prepare", inputs=(0,), weights=(1,),
        biases=(2,), axis=3, axes=("batch", "row", "column", "channel"), summed=(1, 2),
        dynamic=("int8",), module="conv", called=("conv1d",)),
    "CONV_3D": OpFacts((2, 1), inputs=(0,), weights=(1,), biases=(2,), axis=4,
        axes=("layer", "row", "column", "input channel", "output channel"), summed=(0, 1, 2, 3),
        module="conv"),
    "TRANSPOSE_CONV": OpFacts((3, 1), "transpose_conv.cc Prepare", inputs=(2,), weights=(1,),
        biases=(3,), axis=0, axes=_OHWI, summed=(1, 2, 3), dynamic=("int8",),
        module="conv_transpose", called=("deconv",)),
    "CONV_3D_TRANSPOSE": OpFacts((3, 1), inputs=(2,), weights=(1,), biases=(3,), axis=3,
        axes=("layer", "row", "column", "output channel", "input channel"),
        module="conv_transpose"),
    "FULLY_CONNECTED": OpFacts((2, 1), "fully_connected.cc PrepareImpl", inputs=(0,), weights=(1,),
        biases=(2,), axis=0, axes=("output channel", "input channel"), summed=(1,),
        dynamic=("int8", "int4", "int2"), zero_point=("int8", "int16"), to={"uint8": "int16"},
        module="linear", called=("matmul", "mm", "linear", "dense", "addmm", "gemm")),
    "BATCH_MATMUL": OpFacts((2, 1), "batch_matmul.cc Prepare", inputs=(0,), weights=(1,),
        computed_weight=True, dynamic=("int8",), zero_point=("int8",), dtype_of=0,
        other_dtypes=("float32", "int32"), own_range=True, wrong_on="tensorflow",
        called=("bmm", "matmul", "mm")),
    "EMBEDDING_LOOKUP": OpFacts((2, 1), "embedding_lookup.cc Prepare", inputs=(0,), weights=(1,),
        axis=0, axes=_TABLE, dynamic=("int8", "int4", "int2"), dtype_of=1,
        other_dtypes=("float16", "float32"), copies=True, module="embedding",
        called=("embedding",)),
    "EMBEDDING_LOOKUP_SPARSE": OpFacts((5, 1), inputs=(0, 3), weights=(4,)),
    "PRELU": OpFacts((2, 1), "activations.cc PreluPrepare", inputs=(0,), weights=(1,),
        one_scale=(1,), without=("int16",), module="prelu"),
    "LSTM": OpFacts((5, 1), inputs=(0,), weights=_LSTM_WEIGHTS, biases=_LSTM_BIASES, required=1),
    "RNN": OpFacts((5, 1), inputs=(0,), weights=(1, 2), biases=(3,)),
    "SVDF": OpFacts((5, 1), inputs=(0,), weights=(1, 2), biases=(3,), required=3),
    "UNIDIRECTIONAL_SEQUENCE_LSTM": OpFacts((20, 1), inputs=(0,), weights=_LSTM_WEIGHTS,
        biases=_LSTM_BIASES, required=1),
    "UNIDIRECTIONAL_SEQUENCE_RNN": OpFacts((5, 1), inputs=(0,), weights=(1, 2), biases=(3,)),
    # Functions of each element.
    **dict.fromkeys(("ABS", "LOG", "RSQRT",
        "SQRT"), OpFacts((1, 1), "elementwise.cc GenericPrepare", symmetric=True, unary=True)),
    **dict.fromkeys(("CEIL", "COS", "FLOOR", "GELU", "ROUND", "SIGN", "SIN",
        "SQUARE"), OpFacts((1, 1), unary=True)),
    "ELU": OpFacts((1, 1), "activations.cc EluPrepare", unary=True),
    "EXP": OpFacts((1, 1), "exp.cc Prepare", symmetric=True, unary=True),
    "HARD_SWISH": OpFacts((1, 1), "activations.cc HardSwishPrepare", unary=True),
    "LEAKY_RELU": OpFacts((1, 1), "activations.cc LeakyReluPrepare", symmetric=True, unary=True),
    "LOGICAL_NOT": OpFacts((1, 1), passes_choice="always"),
    "LOGISTIC": OpFacts((1, 1), "activations.cc SigmoidPrepare", refused=True, outputs=_ZERO_TO_ONE,
        moves_zero_point=True, symmetric=True, unary=True, called=("silu", "swish", "sigmoid")),
    "NEG": OpFacts((1, 1), "neg.cc Eval", same=(0,), unary=True),
    "RELU": OpFacts((1, 1), "activations.cc ReluPrepare", symmetric=True, ends=(0.0, math.inf),
        unary=True),
    "RELU6": OpFacts((1, 1), "activations.cc ReluPrepare", symmetric=True, ends=(0.0, 6.0),
        unary=True, called=("clamp", "clip")),
    "RELU_0_TO_1": OpFacts((1, 1), "activations.cc ReluPrepare", symmetric=True, ends=(0.0, 1.0),
        unary=True),
    "RELU_N1_TO_1": OpFacts((1, 1), "activations.cc ReluPrepare", symmetric=True, ends=(-1.0, 1.0),
        unary=True),
    "TANH": OpFacts((1, 1), "activations.cc TanhPrepare", refused=True,
        outputs={"int16": (1 / 32768, 0)}, exact=1e-3, symmetric=True, unary=True),
    # Functions of the elements of several operands.
    "ADD": OpFacts((2, 1), "add.cc Prepare", symmetric=True, commutative=True,
        passes_choice="alone", shares_range="constants", masks=True, own_range=True,
        not_in_layers="computed", needs_strict=True),
    "ADD_N": OpFacts((1, 1), required=_ALL),
    "DIV": OpFacts((2, 1), "div.cc Prepare", passes_choice="alone", own_range=True,
        not_in_layers="ever"),
    "FLOOR_DIV": OpFacts((2, 1), "floor_div.cc Eval", without=("int8", "int16"),
        passes_choice="alone"),
    "FLOOR_MOD": OpFacts((2, 1), passes_choice="alone"),
    "LOGICAL_AND": OpFacts((2, 1), commutative=True, passes_choice="always"),
    "LOGICAL_OR": OpFacts((2, 1), commutative=True, passes_choice="always"),
    "MINIMUM": OpFacts((2, 1), "maximum_minimum.cc Eval", same=(0, 1), copies=True,
        ends=(-math.inf, math.inf), commutative=True, shares_range="all", called=("clamp", "clip")),
    "MAXIMUM": OpFacts((2, 1), "maximum_minimum.cc Eval", same=(0, 1), copies=True,
        ends=(-math.inf, math.inf), commutative=True, shares_range="all", called=("clamp", "clip")),
    "MUL": OpFacts((2, 1), "mul.cc Prepare", symmetric=True, commutative=True,
        passes_choice="alone", masks=True, own_range=True, not_in_layers="computed",
        needs_strict=True, called=("silu", "swish")),
    "POW": OpFacts((2, 1), not_in_layers="ever"),
    "SQUARED_DIFFERENCE": OpFacts((2, 1), "squared_difference.cc Prepare",
        not_in_layers="computed"),
    "SUB": OpFacts((2, 1), "sub.cc Prepare", symmetric=True, passes_choice="alone",
        shares_range="constants", masks=True, own_range=True, not_in_layers="computed"),
    **dict.fromkeys(("EQUAL", "GREATER", "GREATER_EQUAL", "LESS", "LESS_EQUAL",
        "NOT_EQUAL"), OpFacts((2, 1), compares=True, scores=0)),
    "SELECT": OpFacts((3, 1), "select.cc Eval", same=(1, 2), copies=True, narrows="picks",
        shares_range="all", masks=True),
    "SELECT_V2": OpFacts((3, 1), "select.cc Eval", same=(1, 2), copies=True, narrows="picks",
        shares_range="all", masks=True),
    # Reductions, pools and norms.
    "ARG_MAX": OpFacts((2, 1), inputs=(0,), scores=0),
    "ARG_MIN": OpFacts((2, 1), inputs=(0,), scores=0),
    "AVERAGE_POOL_2D": OpFacts((1, 1), "pooling.cc AverageEvalQuantizedInt8", same=(0,),
        narrows="averages",
        called=("adaptiveavgpool2d", "avgpool2d", "globalaveragepool", "globalaveragepooling2d")),
    "CUMSUM": OpFacts((2, 1), inputs=(0,), dtype_of=0),
    "L2_NORMALIZATION": OpFacts((1, 1), "l2norm.cc Prepare", refused=True,
        outputs={"int8": (1 / 128, 0), "uint8": (1 / 128, 128)}),
    "LOG_SOFTMAX": OpFacts((1, 1), "activations.cc LogSoftmaxPrepare", refused=True,
        outputs={"int8": (16 / 256, 127), "uint8": (16 / 256, 255)}, not_in_layers="ever"),
    "MAX_POOL_2D": OpFacts((1, 1), "pooling.cc MaxEvalQuantizedInt8; XNNPACK", same=(0,),
        refused=True, copies=True, narrows="picks", not_in_layers="ever"),
    "MEAN": OpFacts((2, 1), "reduce.cc PrepareMeanOrSum", inputs=(0,), symmetric=True, dtype_of=0,
        narrows="averages", not_in_layers="ever",
        called=("globalaveragepool", "globalaveragepooling2d", "adaptiveavgpool2d")),
    **dict.fromkeys(("REDUCE_ALL", "REDUCE_ANY", "SEGMENT_SUM",
        "RFFT2D"), OpFacts((2, 1), inputs=(0,))),
    "REDUCE_MAX": OpFacts((2, 1), "reduce.cc PrepareSimple", inputs=(0,), same=(0,), refused=True,
        symmetric=True, dtype_of=0, copies=True, narrows="picks", called=("amax",)),
    "REDUCE_MIN": OpFacts((2, 1), "reduce.cc PrepareSimple", inputs=(0,), same=(0,), refused=True,
        symmetric=True, dtype_of=0, copies=True, narrows="picks", called=("amin",)),
    "REDUCE_PROD": OpFacts((2, 1), "reduce.cc PrepareProd", inputs=(0,), symmetric=True, dtype_of=0,
        called=("prod",)),
    "SOFTMAX": OpFacts((1, 1), "activations.cc SoftmaxPrepare", refused=True, outputs=_ZERO_TO_ONE,
        exact=1e-3, symmetric=True, to={"int8": "int16"}, dtype_of=0, other_dtypes=("int16",),
        not_in_layers="ever"),
    "SUM": OpFacts((2, 1), "reduce.cc PrepareMeanOrSum", inputs=(0,), symmetric=True, dtype_of=0,
        wrong_on="reference"),
    "TOPK_V2": OpFacts((2, 2), "topk_v2.cc Eval", inputs=(0,), same=(0,), copies=True, scores=0),
    **dict.fromkeys(("UNSORTED_SEGMENT_MAX", "UNSORTED_SEGMENT_MIN", "UNSORTED_SEGMENT_PROD",
        "UNSORTED_SEGMENT_SUM"), OpFacts((3, 1), inputs=(0,))),
    # Parts, joins and places of elements.
    "BATCH_TO_SPACE_ND": OpFacts((3, 1), "batch_to_space_nd.cc Prepare", inputs=(0,), same=(0,),
        refused=True, dtype_of=0, copies=True),
    "BROADCAST_TO": OpFacts((2, 1), "broadcast_to.cc Eval", inputs=(0,), same=(0,), dtype_of=0,
        copies=True, passes_choice="always", called=("expand",)),
    "CONCATENATION": OpFacts((1, 1), "concatenation.cc Prepare", same=_EVERY, rescaling=("uint8",),
        refused=True, symmetric=True, required=_ALL, passes_choice="always", keeps_error=True,
        shares_range="all", needs_strict=True, called=("cat",)),
    "DEPTH_TO_SPACE": OpFacts((1, 1), "depth_to_space.cc Eval; XNNPACK", same=(0,), refused=True,
        copies=True, called=("pixelshuffle",)),
    "DYNAMIC_UPDATE_SLICE": OpFacts((3, 1), "dynamic_update_slice.cc Eval", inputs=(0, 1),
        same=(0, 1), copies=True),
    "GATHER": OpFacts((2, 1), "gather.cc Eval", inputs=(1,), weights=(0,), computed_weight=True,
        axes=_TABLE, same=(0,), one_scale=(0,), copies=True, passes_choice="always",
        keeps_error=True, narrows="picks", module="embedding", called=("indexselect", "embedding")),
    "GATHER_ND": OpFacts((2, 1), "gather_nd.cc Eval", inputs=(0,), same=(0,), copies=True,
        passes_choice="always", narrows="picks"),
    "MIRROR_PAD": OpFacts((2, 1), "mirror_pad.cc Prepare", inputs=(0,), same=(0,), refused=True,
        copies=True),
    "ONE_HOT": OpFacts((4, 1), inputs=(0, 2, 3), passes_choice="always"),
    "PACK": OpFacts((1, 1), "pack.cc Prepare", same=_EVERY, refused=True, required=_ALL,
        copies=True, passes_choice="always", keeps_error=True, shares_range="all",
        called=("stack",)),
    "PAD": OpFacts((2, 1), "pad.cc Eval; XNNPACK", inputs=(0,), same=(0,), refused=True,
        copies=True, keeps_error=True),
    "PADV2": OpFacts((3, 1), "pad.cc Prepare", inputs=(0, 2), same=(0, 2), refused=True,
        copies=True, shares_range="constants"),
    "RESIZE_BILINEAR": OpFacts((2, 1), "resize_bilinear.cc Eval; XNNPACK", inputs=(0,), same=(0,),
        refused=True, called=("interpolate", "resize", "upsample")),
    "RESIZE_NEAREST_NEIGHBOR": OpFacts((2, 1), "resize_nearest_neighbor.cc Eval", inputs=(0,),
        same=(0,), copies=True, called=("interpolate", "resize", "upsample")),
    "REVERSE_SEQUENCE": OpFacts((2, 1), "reverse_sequence.cc Eval", inputs=(0,), same=(0,)),
    "REVERSE_V2": OpFacts((2, 1), "reverse.cc Eval", inputs=(0,), same=(0,), copies=True,
        passes_choice="always", called=("flip",)),
    "SCATTER_ND": OpFacts((3, 1), "scatter_nd.cc Eval", inputs=(1,), same=(1,)),
    "SLICE": OpFacts((3, 1), "slice.cc Eval; XNNPACK", inputs=(0,), same=(0,), refused=True,
        copies=True, passes_choice="always", keeps_error=True, narrows="picks"),
    "SPACE_TO_BATCH_ND": OpFacts((3, 1), "space_to_batch_nd.cc Prepare", inputs=(0,), same=(0,),
        refused=True, copies=True),
    "SPACE_TO_DEPTH": OpFacts((1, 1), "space_to_depth.cc Eval; XNNPACK", same=(0,), refused=True,
        copies=True, called=("pixelunshuffle",)),
    "SPARSE_TO_DENSE": OpFacts((4, 1), inputs=(2, 3)),
    "SPLIT": OpFacts((2, 1), "split.cc Eval; XNNPACK", inputs=(1,), same=(1,), refused=True,
        dtype_of=1, copies=True, passes_choice="always", keeps_error=True, narrows="picks"),
    "SPLIT_V": OpFacts((3, 1), "split_v.cc Eval", inputs=(0,), same=(0,), dtype_of=0, copies=True,
        passes_choice="always", narrows="picks"),
    "STRIDED_SLICE": OpFacts((4, 1), "strided_slice.cc Eval; XNNPACK", inputs=(0,), same=(0,),
        refused=True, copies=True, passes_choice="always", keeps_error=True, narrows="picks"),
    "TILE": OpFacts((2, 1), "tile.cc Eval", inputs=(0,), same=(0,), copies=True,
        passes_choice="always", called=("repeat",)),
    "UNIQUE": OpFacts((1, 2)),
    "UNPACK": OpFacts((1, 1), "unpack.cc Prepare", same=(0,), refused=True, copies=True,
        passes_choice="always", narrows="picks", called=("unbind", "unstack")),
    # State, chance, control and all others.
    "ASSIGN_VARIABLE": OpFacts((2, 0), stateful=True),
    "CALL_ONCE": OpFacts((0, 0), stateful=True),
    "CUSTOM:TFLite_Detection_PostProcess": OpFacts(scores=1),
    "FILL": OpFacts((2, 1), inputs=(1,)),
    "HASHTABLE": OpFacts((0, 1)),
    "HASHTABLE_IMPORT": OpFacts((3, 0)),
    "HASHTABLE_LOOKUP": OpFacts((3, 2)),
    "IF": OpFacts((1, 0), required=_ALL),
    "MULTINOMIAL": OpFacts((2, 1), random=True),
    "NON_MAX_SUPPRESSION_V4": OpFacts((5, 2), scores=1),
    "NON_MAX_SUPPRESSION_V5": OpFacts((6, 3), scores=1),
    "RANDOM_STANDARD_NORMAL": OpFacts((1, 1), random=True),
    "RANDOM_UNIFORM": OpFacts((1, 1), random=True),
    "READ_VARIABLE": OpFacts((1, 1), stateful=True),
    "STABLEHLO_COMPOSITE": OpFacts((0, 0), required=_ALL),
    "VAR_HANDLE": OpFacts((0, 1), stateful=True),
    "WHILE": OpFacts((0, 0), required=_ALL),
    # Ops of which only the numbers of operands are known.
    **dict.fromkeys(("BITCAST", "BUCKETIZE", "COMPLEX_ABS", "FAKE_QUANT", "IMAG", "REAL",
        "ZEROS_LIKE", "L2_POOL_2D", "LOCAL_RESPONSE_NORMALIZATION", "MATRIX_DIAG", "WHERE",
        "HASHTABLE_SIZE", "RANK", "SHAPE", "SKIP_GRAM"), OpFacts((1, 1))),
    **dict.fromkeys(("ATAN2", "BITWISE_XOR", "RIGHT_SHIFT", "BROADCAST_ARGS", "MATRIX_SET_DIAG",
        "LSH_PROJECTION"), OpFacts((2, 1))),
    **dict.fromkeys(("DILATE", "HASHTABLE_FIND", "RANGE"), OpFacts((3, 1))),
}
# fmt: on

_UNKNOWN = OpFacts()


def facts_of(name: str) -> OpFacts:
    """Return the row of an op, or an empty one."""
    return OPS.get(name, _UNKNOWN)


def _where(has: Callable[[OpFacts], object]) -> frozenset[str]:
    return frozenset(name for name, facts in OPS.items() if has(facts))


QDQ = _where(lambda op: op.changes == "quantization")
"""Ops that convert between two quantizations."""

HOLDING = _where(lambda op: op.changes in ("quantization", "storage", "shape"))
"""Ops that keep the elements of their input, and their order."""

MOVING = _where(lambda op: op.changes)
"""Ops that keep the elements of their input, in any order."""

LAYOUT = _where(lambda op: op.changes in ("shape", "order"))
"""Ops that converters insert to change the layout."""

CARRYING = MOVING - {"EXPAND_DIMS", "SQUEEZE"}
"""Ops between a constant of the file and the op that reads it."""

KEEPING_SCALE = _where(lambda op: op.same)
"""Ops whose output must have the scale of their input."""

CLAMPING = _where(lambda op: op.ends)
"""Ops that clamp each element."""

COMMUTATIVE = _where(lambda op: op.commutative)
COMPARING = _where(lambda op: op.compares)

NARROWING = _where(lambda op: op.narrows or op.ends)
"""Ops whose values can all lie in a smaller range than those of their input."""

PICKING = _where(lambda op: op.narrows == "picks" or op.ends)
"""Ops whose output values are some of their input's."""

BOUNDED = _where(lambda op: "int16" in op.outputs)
"""Ops that approximate a function of at most 1, whose range TFLite fixes."""

LAYERS = _where(lambda op: op.dynamic and op.module in ("conv", "linear"))
"""Ops with weights that every flow quantizes where it quantizes one of them."""

INPUT_AT = {name: op.inputs[0] for name, op in OPS.items() if op.biases and len(op.weights) == 1}
"""Position of the input, of ops with one weight and a bias."""

KNOWN_WRONG = {(op.wrong_on, name) for name, op in OPS.items() if op.wrong_on}
"""Runtimes and ops whose int8 kernels are wrong, whatever the file is."""


def nearest_op(name: str, known: Collection[str]) -> str:
    """Suggest known ops for a name, which may be of torch, Keras or ONNX."""
    for part in reversed(name.lower().split(".")):  # `aten.linear.default`
        other_name = re.sub(r"[^a-z0-9]", "", part)
        places = {
            op: facts.called.index(other_name)
            for op, facts in OPS.items()
            if other_name in facts.called and op in known
        }
        found = sorted(places, key=places.__getitem__)
        if found:
            return hint(found)
    return nearest(name, known)
