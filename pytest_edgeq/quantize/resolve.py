"""Choose the flow of a quantizer."""

from __future__ import annotations

import os
from typing import Any

from pytest_edgeq import litert
from pytest_edgeq.compare.quantized import QuantizedModel
from pytest_edgeq.names import PRESETS, unknown_preset
from pytest_edgeq.quantize.pt2e import quantize_pt2e
from pytest_edgeq.quantize.recipe import quantize_recipe
from pytest_edgeq.quantize.request import Request
from pytest_edgeq.quantize.torchao import quantize_torchao


def describe(quantizer: Any) -> str:
    """Return the name of a quantizer in texts, or refuse an invalid one."""
    if quantizer is None:
        return "None"
    if isinstance(quantizer, (str, os.PathLike)):
        name = os.fspath(quantizer)
        if name not in PRESETS and not name.endswith(".json"):
            raise ValueError(unknown_preset(name))
        return name
    if isinstance(quantizer, list):
        return "recipe"
    if litert.is_pt2e_quantizer(quantizer) or litert.is_ao_config(quantizer):
        return type(quantizer).__name__
    hint = "; instantiate it" if isinstance(quantizer, type) else ""
    if hasattr(quantizer, "get_quantization_recipe"):
        # ai-edge-quantizer's Quantizer and RecipeManager contain a recipe; they are none.
        hint = "; pass the result of its get_quantization_recipe()"
    raise TypeError(
        "quantizer: expected a preset's name, a PT2E Quantizer instance, a torchao AOBaseConfig, "
        "an ai-edge-quantizer recipe (a list of dicts, or a .json path) or None, got "
        f"{quantizer!r:.80}{hint}"
    )


def run_flow(request: Request, quantizer: Any) -> QuantizedModel:
    """Quantize a model by the flow of its quantizer, which `describe` has accepted."""
    quantized = _run_flow(request, quantizer)
    quantized.made_by = (request, quantizer)
    return quantized


def _run_flow(request: Request, quantizer: Any) -> QuantizedModel:
    # It is imported only for a conversion: results in the cache need none.
    litert.require_converter()
    if any(entry.graph is not None for entry in request.entries):
        _check_own_graphs(request, quantizer)
        return quantize_pt2e(request, quantizer)
    _check_train(request, quantizer)
    if quantizer is None:
        return quantize_recipe(request, None)
    if _is_pt2e_preset(quantizer):
        return quantize_pt2e(request, quantizer)
    if isinstance(quantizer, (str, list, os.PathLike)):
        return quantize_recipe(request, litert.load_recipe(quantizer))
    if litert.is_ao_config(quantizer):
        return quantize_torchao(request, quantizer)
    return quantize_pt2e(request, quantizer)


def _is_pt2e_preset(quantizer: Any) -> bool:
    # The file of a recipe may be named pt2e_….json.
    return isinstance(quantizer, str) and quantizer in PRESETS and quantizer.startswith("pt2e_")


def _check_own_graphs(request: Request, quantizer: Any) -> None:
    names_pt2e = (
        quantizer is None or _is_pt2e_preset(quantizer) or litert.is_pt2e_quantizer(quantizer)
    )
    if not names_pt2e or any(entry.graph is None for entry in request.entries):
        raise ValueError(
            f"{request.name} is a graph that PT2E has prepared or converted, which is converted as "
            f"it is: {request.quantizer} quantizes float models. Leave quantizer= out, or pass the "
            "float model; of several signatures pass such a graph for each"
        )


def _check_train(request: Request, quantizer: Any) -> None:
    preset = isinstance(quantizer, str) and quantizer in PRESETS
    if preset and "_qat_" in quantizer and request.train is None:
        raise ValueError(
            f"{request.name}: quantizer {quantizer} needs train=, a function that trains the "
            "prepared graph in place: train=lambda prepared: fit(prepared, data). Without training "
            "use 'pt2e_static_int8'"
        )
    if request.train is not None and litert.is_ao_config(quantizer):
        raise ValueError(
            f"{request.name}: train= is for PT2E quantizers. With torchao train first: "
            "quantize_(model, QATConfig(base_config, step='prepare')), train the model, and pass "
            "it with quantizer=QATConfig(base_config, step='convert')"
        )
    trains = "_qat_" in quantizer if preset else litert.is_pt2e_quantizer(quantizer)
    if request.train is not None and not trains:
        raise ValueError(
            f"{request.name}: train= is for quantization-aware training, which {request.quantizer} "
            "is not: use 'pt2e_qat_int8' or a PT2E quantizer with a QAT config, or leave train= out"
        )
