"""
The converter and the quantizer libraries behind one face.

Nothing outside this folder imports litert_torch, torchao or ai_edge_quantizer, so that a release of
theirs is answered in one place: `converter.py` for the way to `.tflite`, a module for each kind of
quantizer. Each shim names the versions and the symptom, and has a test in `tests/litert/` that
fails when it is no longer needed.
"""

from pytest_edgeq.litert.chatter import quiet
from pytest_edgeq.litert.converter import SIGNATURE, convert_graph, convert_model
from pytest_edgeq.litert.pt2e import (
    finish_pt2e,
    holds_observers,
    holds_quantization,
    is_pt2e_quantizer,
    needs_calibration,
    prepare_pt2e,
    pt2e_preset,
    uncalibrated,
)
from pytest_edgeq.litert.recipes import calibrate_recipe, load_recipe, quantize_recipe

__all__ = [
    "SIGNATURE",
    "calibrate_recipe",
    "convert_graph",
    "convert_model",
    "finish_pt2e",
    "holds_observers",
    "holds_quantization",
    "is_pt2e_quantizer",
    "load_recipe",
    "needs_calibration",
    "prepare_pt2e",
    "pt2e_preset",
    "quantize_recipe",
    "quiet",
    "uncalibrated",
]
