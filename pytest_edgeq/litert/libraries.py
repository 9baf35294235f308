"""Import the converter and the quantizer libraries when they are first needed."""

from __future__ import annotations

import importlib
import importlib.util
import random
import sys
from types import ModuleType
from typing import Any

from pytest_edgeq.litert.chatter import quiet
from pytest_edgeq.runtimes.process_state import paused_collector


def converter_module(name: str = "") -> Any:
    """Import a module of the converter."""
    return _imported(f"litert_torch.{name}" if name else "litert_torch")


def require_converter() -> None:
    """Check that the converter is installed, without importing it."""
    if importlib.util.find_spec("litert_torch") is None:
        raise ModuleNotFoundError("No module named 'litert_torch'", name="litert_torch")


def pt2e_module(name: str) -> Any:
    """Import a module of PT2E quantization."""
    return _imported(f"torchao.quantization.pt2e.{name}")


def recipe_module(name: str) -> Any:
    """Import a module of the recipe library, which is litert-quantizer from 0.11 on."""
    newer = importlib.util.find_spec("litert_quantizer") is not None
    return _imported(f"{'litert_quantizer' if newer else 'ai_edge_quantizer'}.{name}")


def load_exporter() -> None:
    """Import the modules that `torch.export.export` imports at its first call."""
    _imported("torch.export._trace")
    _imported("torch._dynamo")


def _imported(name: str) -> ModuleType:
    if name in sys.modules:
        return importlib.import_module(name)  # which waits for an import in another thread
    drawn = random.getstate()
    try:
        with quiet(), paused_collector():
            return importlib.import_module(name)
    finally:
        # litert-torch 0.10.0 imports rich, which draws random numbers; restore the user's state.
        random.setstate(drawn)


def register_operators(namespace: str) -> None:
    """Import the module that defines the operators of a namespace of torch."""
    if namespace == "quantized_decomposed":
        _imported("torch.ao.quantization.fx._decomposed")
    elif namespace == "litert_torch":
        converter_module("backend.optimization_barrier")
