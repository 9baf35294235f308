"""
Rounding errors of TFLite's builtin CPU kernels beyond the arithmetic of their ops.

`rounding` bounds the codes of quantized kernels, `floats` the results of float kernels, `hybrid`
computes the input of kernels that quantize it at run time; `linear`, `functions` and `fixed` have
the rules, `site` an op with its tensors. Read from the sources of LiteRT of
August 2026 (ai-edge-litert 2.3), below `tflite/kernels/`, and measured in
`tests/runtimes/bounds/test_bounds.py`.
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
