"""What kinds of torch nodes a `.tflite` op can stand for."""

from __future__ import annotations

from typing import Any

__all__ = [
    "ACTIVATIONS",
    "CLAMPS",
    "HEAVY",
    "HEAVY_OPS",
    "IDENTITIES",
    "TWINS",
    "VIEWS",
    "base_name",
    "fits",
    "is_dequantize",
    "is_quantize",
    "kin",
]

# Matrix products, and how many of TFLite's each makes.
HEAVY = {
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution"), 1),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), 1),
    **dict.fromkeys(("linear", "addmm", "mm", "bmm", "baddbmm", "matmul", "einsum", "dot"), 1),
    "scaled_dot_product_attention": 2,
}

# The same of TFLite.
HEAVY_OPS = {
    *("CONV_2D", "DEPTHWISE_CONV_2D", "CONV_3D", "TRANSPOSE_CONV", "CONV_3D_TRANSPOSE"),
    *("FULLY_CONNECTED", "BATCH_MATMUL"),
}

# Nodes that clamp, which TFLite may hold in the op in front or in the range of its output.
CLAMPS = {"relu", "relu6", "hardtanh", "clamp", "clamp_min", "clamp_max", "relu_", "hardtanh_"}

# Ops that can stand for one of them.
ACTIVATIONS = {
    *("RELU", "RELU6", "RELU_N1_TO_1", "RELU_0_TO_1", "MAXIMUM", "MINIMUM"),
}

# Ops that change how values are held, not what they are.
IDENTITIES = {
    *("QUANTIZE", "DEQUANTIZE", "TRANSPOSE", "RESHAPE", "SQUEEZE", "EXPAND_DIMS", "CAST"),
}

# Ops that do what one function does and nothing else.
TWINS = {
    "ADD": ("add", "add_"),
    "SUB": ("sub", "sub_"),
    "MUL": ("mul", "mul_"),
    "DIV": ("div", "div_"),
    "MEAN": ("mean", "adaptive_avg_pool2d"),
    "LOGISTIC": ("sigmoid", "sigmoid_"),
    "TANH": ("tanh", "tanh_"),
    "EXP": ("exp",),
    "RSQRT": ("rsqrt",),
    "SQRT": ("sqrt",),
    "HARD_SWISH": ("hardswish", "hardswish_"),
    "LEAKY_RELU": ("leaky_relu", "leaky_relu_"),
    "PRELU": ("prelu", "_prelu_kernel"),
    "GELU": ("gelu",),
    "ELU": ("elu", "elu_"),
    "RELU": ("relu", "relu_"),
    "RELU6": ("relu6", "hardtanh", "hardtanh_", "clamp"),
    "GATHER": ("index_select", "embedding", "index", "gather"),
    "GATHER_ND": ("index_select", "index", "gather"),
}

# Ops that might be taken for one another, and functions that might be meant.
_FAMILIES = (
    (
        {"ADD", "SUB", "MUL", "DIV", "MAXIMUM", "MINIMUM", "SQUARED_DIFFERENCE"},
        {
            *("add", "add_", "sub", "sub_", "rsub", "mul", "mul_", "div", "div_"),
            *("maximum", "minimum"),
        },
    ),
    (
        {
            *("LOGISTIC", "TANH", "RELU", "RELU6", "ELU", "GELU", "HARD_SWISH", "LEAKY_RELU"),
            *("EXP", "SQRT", "RSQRT", "ABS", "NEG", "SIN", "COS", "SQUARE"),
        },
        {
            *("sigmoid", "sigmoid_", "tanh", "tanh_", "relu", "relu_", "relu6", "elu", "gelu"),
            *("hardtanh", "leaky_relu", "exp", "sqrt", "rsqrt", "abs", "neg", "sin", "cos"),
        },
    ),
    (
        {"MEAN", "SUM", "REDUCE_MAX", "REDUCE_MIN", "REDUCE_PROD"},
        {"mean", "sum", "amax", "amin", "prod", "adaptive_avg_pool2d"},
    ),
)

# Nodes that only hold or lay out anew what they take, in eval mode.
VIEWS = {
    *("view", "reshape", "permute", "transpose", "flatten", "unflatten", "unsqueeze", "squeeze"),
    *("contiguous", "clone", "alias", "detach", "dropout", "to", "_to_copy", "t", "expand", "mT"),
    *("numpy_T", "unsqueeze_", "squeeze_", "_unsafe_view", "lift_fresh_copy", "view_as", "type_as"),
    *("movedim", "swapaxes", "dropout_", "feature_dropout", "alpha_dropout", "identity"),
}

_QUANTIZE = ("quantize_per_tensor", "quantize_per_channel", "quantize_per_token")
_DEQUANTIZE = ("dequantize_per_tensor", "dequantize_per_channel", "dequantize_per_token")

# By op, which nodes can be the last in what it stands for, activations and views aside. `*`: any.
_LAST = {
    "CONV_2D": {"conv1d", "conv2d", "convolution", "batch_norm"},
    "DEPTHWISE_CONV_2D": {"conv1d", "conv2d", "convolution", "batch_norm"},
    "CONV_3D": {"conv3d", "convolution", "batch_norm"},
    "TRANSPOSE_CONV": {"conv_transpose1d", "conv_transpose2d", "convolution", "batch_norm"},
    "FULLY_CONNECTED": {"linear", "addmm", "mm", "matmul", "bmm", "einsum", "batch_norm", "mul"},
    "BATCH_MATMUL": {
        *("matmul", "bmm", "mm", "linear", "einsum", "scaled_dot_product_attention", "baddbmm"),
    },
    "ADD": {
        *("add", "add_", "rsub", "sub", "layer_norm", "native_layer_norm", "group_norm"),
        *("batch_norm", "linear", "addmm", "conv2d", "instance_norm", "mul"),
    },
    "SUB": {"sub", "sub_", "rsub", "add"},
    "MUL": {
        *("mul", "mul_", "div", "silu", "gelu", "hardswish", "layer_norm", "rms_norm", "neg"),
        *("batch_norm", "group_norm", "hardsigmoid", "instance_norm", "square", "pow"),
    },
    "DIV": {"div", "div_", "mean", "reciprocal"},
    "MEAN": {"mean", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "avg_pool2d"},
    "SUM": {"sum", "mean", "avg_pool2d"},
    "AVERAGE_POOL_2D": {
        *("max_pool1d", "max_pool2d", "max_pool2d_with_indices"),
        *("avg_pool1d", "avg_pool2d", "adaptive_avg_pool2d", "adaptive_avg_pool1d", "mean"),
    },
    "MAX_POOL_2D": {
        *("avg_pool1d", "avg_pool2d", "adaptive_avg_pool2d"),
        *("max_pool1d", "max_pool2d", "max_pool2d_with_indices", "adaptive_max_pool2d", "getitem"),
    },
    # Over another axis than the last one it is a quotient, or a difference.
    "SOFTMAX": {"softmax", "_softmax", "div"},
    "LOG_SOFTMAX": {"log_softmax", "_log_softmax", "sub"},
    "LOGISTIC": {"sigmoid", "sigmoid_", "hardsigmoid"},
    "TANH": {"tanh", "tanh_"},
    "GELU": {"gelu"},
    "ELU": {"elu", "elu_"},
    "HARD_SWISH": {"hardswish", "hardswish_"},
    "LEAKY_RELU": {"leaky_relu", "leaky_relu_"},
    "PRELU": {"prelu", "_prelu_kernel"},
    "CONCATENATION": {"cat", "stack"},
    "PACK": {"cat", "stack"},
    "PAD": {"pad", "constant_pad_nd", "zero_pad2d"},
    "PADV2": {"pad", "constant_pad_nd"},
    "MIRROR_PAD": {"pad", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d"},
    "GATHER": {"embedding", "index_select", "gather", "index", "select"},
    "GATHER_ND": {"index_select", "gather", "index", "embedding"},
    "EMBEDDING_LOOKUP": {"embedding"},
    "RESIZE_BILINEAR": {"upsample_bilinear2d", "upsample_nearest2d"},
    "RESIZE_NEAREST_NEIGHBOR": {"upsample_bilinear2d", "upsample_nearest2d"},
    "SLICE": {"slice", "narrow", "select", "split", "chunk", "getitem", "split_with_sizes"},
    "STRIDED_SLICE": {"slice", "narrow", "select", "split", "chunk", "getitem"},
    "SPLIT": {"getitem"},
    "SPLIT_V": {"getitem"},
    "UNPACK": {"getitem", "select"},
    "EXP": {"exp", "exp_"},
    "LOG": {"log"},
    "SQRT": {"sqrt"},
    "RSQRT": {"rsqrt"},
    "ABS": {"abs"},
    "NEG": {"neg"},
    "POW": {"pow"},
    "SQUARE": {"pow", "square"},
    "SIN": {"sin"},
    "COS": {"cos"},
    "MAXIMUM": {"maximum", *CLAMPS},
    "MINIMUM": {"minimum", *CLAMPS},
    "REDUCE_MAX": {"amax", "max"},
    "CUMSUM": {"cumsum"},
    **{name: CLAMPS for name in ("RELU", "RELU6", "RELU_N1_TO_1", "RELU_0_TO_1")},
}


def base_name(node: Any) -> str:
    """Name of the function that a node calls, without namespace and overload; empty of others."""
    if node.op != "call_function":
        return ""  # its target is a name of the model's own, which may be any
    target = node.target
    packet = getattr(target, "overloadpacket", None)
    return str(getattr(packet or target, "__name__", target))


def is_quantize(node: Any) -> bool:
    """Whether a node turns floats to codes."""
    return base_name(node) in _QUANTIZE


def is_dequantize(node: Any) -> bool:
    """Whether a node turns codes to floats."""
    return base_name(node) in _DEQUANTIZE


def kin(op: str) -> set[str]:
    """Functions that an op might wrongly stand for: of as many operands, and of their shape."""
    return set().union(*(functions for ops, functions in _FAMILIES if op in ops))


def fits(op: str, last: str) -> bool:
    """Whether an op can be the last of those that make what this node gives."""
    return last in _LAST.get(op, ())
