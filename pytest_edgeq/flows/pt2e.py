"""
The `pt2e` flow: export, prepare, calibrate, convert, lower to `.tflite`.

Each step is torchao's or the converter's own; see `litert/` for what must be met on the way.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from pytest_edgeq import litert
from pytest_edgeq.flows.request import Request
from pytest_edgeq.quantized import QuantizedModel
from pytest_edgeq.reference import call_reference

__all__ = ["quantize_pt2e", "refusal"]

# A user's test shows the user's line and the message, not how we came to it.
__tracebackhide__ = True

_Result = TypeVar("_Result")


def quantize_pt2e(request: Request, quantizer: Any) -> QuantizedModel:
    """
    Quantize a model with a PT2E quantizer.

    Args:
        request: The model and its data.
        quantizer: A torchao PT2E `Quantizer`.

    Raises:
        ValueError: No or bad calibration data for a static quantizer, observers that saw none of
            it, or nothing quantized.
        RuntimeError: torch.export or the converter refuses the model.
    """
    exported = _export(request)
    with litert.quiet():
        # The exported graph shares its parameters with the user's model; calibration runs it.
        graph = copy.deepcopy(exported.module())
    prepared = _refuse_clearly(
        request, "the quantizer", lambda: litert.prepare_pt2e(graph, quantizer)
    )
    static = litert.needs_calibration(prepared)
    with torch.no_grad():
        if static:
            for index, sample in enumerate(request.calibration_samples()):
                call = functools.partial(call_reference, prepared, sample)
                _refuse_clearly(request, f"calibration sample {index}", call)
        else:
            # Observers of weights look at them when the graph runs.
            call_reference(prepared, request.sample)
    blind = litert.uncalibrated(prepared)
    if blind:
        raise ValueError(
            f"{request.name}: {len(blind)} activation(s) were never calibrated: "
            f"{', '.join(blind[:5])}. Converted so, their scale would be meaningless; calibrate "
            "with samples that reach these parts of the model"
        )
    simulated = litert.finish_pt2e(prepared)
    tflite = _refuse_clearly(
        request,
        "the converter",
        lambda: litert.convert_graph(
            simulated,
            request.args,
            request.kwargs,
            static=static,
            dynamic_shapes=request.dynamic_shapes,
        ),
    )
    return request.finish("pt2e", request.edge(tflite), simulated=simulated)


def _export(request: Request) -> torch.export.ExportedProgram:
    def export(*, strict: bool) -> torch.export.ExportedProgram:
        with litert.quiet():
            return torch.export.export(
                request.model,
                request.args,
                request.kwargs,
                dynamic_shapes=request.dynamic_shapes,
                strict=strict,
            )

    if not request.strict_export:
        return _refuse_clearly(request, "torch.export", lambda: export(strict=False))
    try:
        return export(strict=True)
    except Exception as error:
        # torch.export raises whatever the model's own code met while it was traced.
        strict_error = error
    exported = _refuse_clearly(request, "torch.export", lambda: export(strict=False))
    first = str(strict_error).strip().splitlines()
    warnings.warn(
        f"{request.name}: torch.export(strict=True) refuses the model "
        f"({type(strict_error).__name__}: {first[0] if first else ''}), so it was exported with "
        "strict=False. The PT2E annotators match no ADD, MUL and CONCATENATION in such a graph and "
        "leave them in float: check with assert_no_float_ops. Make the model strictly exportable, "
        "or pass strict_export=False to say that you know",
        stacklevel=5,
    )
    return exported


def _refuse_clearly(request: Request, who: str, step: Callable[[], _Result]) -> _Result:
    try:
        return step()
    except Exception as error:
        # Whatever it was, the user gets it whole, with the hint first.
        raise RuntimeError(refusal(request.name, who, error)) from error


def refusal(name: str, who: str, error: Exception) -> str:
    """Our hint, then the library's own message."""
    hints = {
        "torch.export": (
            "the model's forward must be traceable: no Python branch on a tensor's values "
            "(torch.where or torch.cond instead), no data-dependent shapes"
        ),
        "the quantizer": (
            "its annotations do not fit the exported graph; a part of the model that it does not "
            "know can be left in float by a subclass that overrides annotate, or quantized by a "
            "recipe instead"
        ),
        "calibration": (
            "the observers or the model cannot take this sample: look for NaN in the weights, and "
            "for indices out of range"
        ),
        "the converter": (
            "an op or a dtype that litert-torch cannot lower; the last lines name it. Replace it "
            "in the model, or keep that part out of the file"
        ),
    }
    hint = hints[who.split(" sample")[0]]
    words = f"{type(error).__name__}: {error}"
    if "contained a None item" in str(error):
        # litert-torch 0.10.0 lowers no output that is None.
        hint = "its forward gives None among its outputs; wrap it in a module that gives tensors"
    elif "'type' object is not iterable" in words:
        # litert-torch 0.10.0 cannot name the outputs of a namedtuple.
        hint = (
            "its forward gives a namedtuple; wrap it in a module that gives a plain tuple or a dict"
        )
    verb = "stops" if who.startswith("calibration") else "refuses"
    return f"{who} {verb} {name}: {hint}\n{words}"
