"""What is known of TFLite's ops, by name."""

from __future__ import annotations

import math

CASTS = frozenset({"QUANTIZE", "DEQUANTIZE"})
"""Ops that change how a value is held, and not what it is."""

HOLDING = CASTS | {"RESHAPE", "EXPAND_DIMS", "SQUEEZE", "DENSIFY"}
"""Ops that hold the elements of their input, in their order."""

MOVING = HOLDING | {"TRANSPOSE", "CAST"}
"""Ops that hold the elements of their input, in any order."""

ACTIVATIONS = frozenset({"RELU", "RELU6", "RELU_N1_TO_1", "RELU_0_TO_1", "MAXIMUM", "MINIMUM"})
"""Ops that clamp each element."""

CLAMPS = {
    "RELU": (0.0, math.inf),
    "RELU6": (0.0, 6.0),
    "RELU_N1_TO_1": (-1.0, 1.0),
    "RELU_0_TO_1": (0.0, 1.0),
}
"""Ops that clamp each element to fixed ends."""

COMMUTATIVE = frozenset({"ADD", "MUL", "MAXIMUM", "MINIMUM", "LOGICAL_AND", "LOGICAL_OR"})

COMPARISONS = frozenset({"LESS", "LESS_EQUAL", "GREATER", "GREATER_EQUAL", "EQUAL", "NOT_EQUAL"})
"""Ops whose kernels bring two inputs of codes to one scale first: near ties may go either way."""
