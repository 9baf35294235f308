"""
The `recipe` flow: convert the float model, then quantize the file by ai-edge-quantizer's rules.

Without a recipe it is the `float` flow: the conversion alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from pytest_edgeq import litert
from pytest_edgeq.flows.pt2e import refusal
from pytest_edgeq.flows.request import Request
from pytest_edgeq.quantized import QuantizedModel
from pytest_edgeq.tflite.edge import EdgeFile

__all__ = ["quantize_recipe"]

# A user's test shows the user's line and the message, not how we came to it.
__tracebackhide__ = True


def quantize_recipe(request: Request, recipe: list[dict[str, Any]] | None) -> QuantizedModel:
    """
    Convert a model, and quantize the file by a recipe.

    Args:
        request: The model and its data.
        recipe: ai-edge-quantizer's rules; None leaves the file in float.

    Raises:
        ValueError: No or bad calibration data for a static recipe, a recipe that the library
            refuses, or nothing quantized.
        RuntimeError: The converter refuses the model.
    """
    float_edge = request.edge(_convert(request))
    if recipe is None:
        return request.finish("float", float_edge)
    float_tflite = bytes(float_edge.graph.buffer)
    calibration = litert.calibrate_recipe(
        float_tflite, recipe, _by_name(request, float_edge), threads=request.session.threads
    )
    edge = request.edge(litert.quantize_recipe(float_tflite, recipe, calibration))
    return request.finish("recipe", edge, float_edge=float_edge)


def _convert(request: Request) -> bytes:
    try:
        return litert.convert_model(
            request.model, request.args, request.kwargs, dynamic_shapes=request.dynamic_shapes
        )
    except Exception as error:
        # Export and lowering in one call: whatever it was, the user gets it whole.
        exported = type(error).__module__.startswith(("torch._dynamo", "torch.fx", "torch._export"))
        who = "torch.export" if exported else "the converter"
        raise RuntimeError(refusal(request.name, who, error)) from error


def _by_name(
    request: Request, float_edge: EdgeFile
) -> Iterator[Mapping[str, np.ndarray[Any, Any]]]:
    names = [spec.name for spec in request.spec.inputs]
    for sample in request.calibration_samples():
        yield float_edge.encode(names, sample.arrays())
