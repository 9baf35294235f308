"""Which flow a quantizer belongs to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pytest_edgeq import litert
from pytest_edgeq.flows.pt2e import quantize_pt2e
from pytest_edgeq.flows.recipe import quantize_recipe
from pytest_edgeq.flows.request import Request
from pytest_edgeq.presets import PRESETS, unknown_preset
from pytest_edgeq.quantized import QuantizedModel

__all__ = ["describe", "run_flow"]

# A user's test shows the user's line and the message, not how we came to it.
__tracebackhide__ = True


def describe(quantizer: Any) -> str:
    """
    Name a quantizer in texts, and refuse what is none before anything is converted.

    Raises:
        ValueError: A string that is no preset and no `.json` path.
        TypeError: Something else that is no quantizer.
    """
    if quantizer is None:
        return "None"
    if isinstance(quantizer, (str, os.PathLike)):
        name = os.fspath(quantizer)
        if name not in PRESETS and not name.endswith(".json"):
            raise ValueError(unknown_preset(name))
        return name
    if isinstance(quantizer, list):
        return "recipe"
    if litert.is_pt2e_quantizer(quantizer):
        return type(quantizer).__name__
    hint = "; instantiate it" if isinstance(quantizer, type) else ""
    raise TypeError(
        "quantizer: expected a preset's name, a PT2E Quantizer instance, an ai-edge-quantizer "
        f"recipe (a list of dicts, or a .json path) or None, got {quantizer!r:.80}{hint}"
    )


def run_flow(request: Request, quantizer: Any) -> QuantizedModel:
    """Quantize by the flow that the quantizer belongs to; `describe` has let it through."""
    if quantizer is None:
        return quantize_recipe(request, None)
    if isinstance(quantizer, str) and quantizer.startswith("pt2e_"):
        return quantize_pt2e(request, litert.pt2e_preset(quantizer))
    if isinstance(quantizer, (str, list)):
        return quantize_recipe(request, litert.load_recipe(quantizer))
    if isinstance(quantizer, os.PathLike):
        return quantize_recipe(request, litert.load_recipe(Path(quantizer)))
    return quantize_pt2e(request, quantizer)
