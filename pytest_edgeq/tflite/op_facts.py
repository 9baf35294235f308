"""What is known of TFLite's ops, by name."""

from __future__ import annotations

__all__ = [
    "ACTIVATIONS",
    "CASTS",
    "COMMUTATIVE",
    "COMPARISONS",
    "FIXED_SCALES",
    "HANDS_ON",
    "HOLDING",
    "KEEPS_SCALE",
    "MOVING",
]

CASTS = frozenset({"QUANTIZE", "DEQUANTIZE"})
"""Ops that change how a value is held, and not what it is."""

HOLDING = CASTS | {"RESHAPE", "EXPAND_DIMS", "SQUEEZE", "DENSIFY"}
"""Ops that hold the elements of their input, in their order."""

MOVING = HOLDING | {"TRANSPOSE", "CAST"}
"""Ops that hold the elements of their input, in any order."""

ACTIVATIONS = frozenset({"RELU", "RELU6", "RELU_N1_TO_1", "RELU_0_TO_1", "MAXIMUM", "MINIMUM"})
"""Ops that clamp each element."""

COMMUTATIVE = frozenset({"ADD", "MUL", "MAXIMUM", "MINIMUM", "LOGICAL_AND", "LOGICAL_OR"})

COMPARISONS = frozenset({"LESS", "LESS_EQUAL", "GREATER", "GREATER_EQUAL", "EQUAL", "NOT_EQUAL"})
"""Ops whose kernels bring two inputs of codes to one scale first: near ties may go either way."""

HANDS_ON = frozenset(
    {
        *("TRANSPOSE", "RESHAPE", "PAD", "MAX_POOL_2D", "SQUEEZE", "EXPAND_DIMS", "SLICE"),
        *("STRIDED_SLICE", "AVERAGE_POOL_2D", "SPLIT"),
    }
)
"""Ops whose output must have their input's scale."""

KEEPS_SCALE = HANDS_ON | {
    *("RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR", "CONCATENATION", "PACK", "GATHER"),
    *("MIRROR_PAD", "REVERSE_V2", "BROADCAST_TO", "TILE", "SELECT", "SELECT_V2", "UNPACK"),
    *("SPLIT_V", "SPACE_TO_DEPTH", "DEPTH_TO_SPACE", "MAXIMUM", "MINIMUM", "REDUCE_MAX"),
}
"""Ops whose output the converter (litert-torch 0.10.0) gives their input's scale."""

FIXED_SCALES = {("LOGISTIC", "int8"): (1 / 256, -128), ("SOFTMAX", "int8"): (1 / 256, -128)}
"""What kernels write whatever the file says (tensorflow/lite/kernels/activations.cc)."""
