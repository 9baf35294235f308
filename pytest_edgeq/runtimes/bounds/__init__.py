"""
What TFLite's builtin CPU kernels may do beside the arithmetic that they stand for.

`rounding` bounds the codes of quantized kernels, `floats` the floats of float kernels, `hybrid`
gives the input of kernels that quantize it on the fly, `xnnpack` adds what XNNPACK rounds in
another way. Read from the sources of LiteRT of August 2026 (ai-edge-litert 2.3), below
`tflite/kernels/`, and measured in `tests/kernels/test_kernels.py`.
"""

from __future__ import annotations

from pytest_edgeq.runtimes.bounds.floats import float_bound, float_conditioning, float_reach
from pytest_edgeq.runtimes.bounds.hybrid import Halves, HybridInput, hybrid_position
from pytest_edgeq.runtimes.bounds.rounding import rounding_bound

__all__ = [
    "Halves",
    "HybridInput",
    "float_bound",
    "float_conditioning",
    "float_reach",
    "hybrid_position",
    "rounding_bound",
]
