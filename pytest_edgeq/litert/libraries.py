"""Which libraries are installed, and under which of their names."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import random
import sys
from types import ModuleType
from typing import Any

from pytest_edgeq.litert.chatter import quiet
from pytest_edgeq.runtimes.process_state import paused_collector

# What torchao keeps in `torchao.quantization.pt2e`, torch before 2.10 keeps in
# `torch.ao.quantization.pt2e`, but for these.
_ELSEWHERE_IN_TORCH = {
    "fake_quantize": "fake_quantize",
    "learnable_fake_quantize": "_learnable_fake_quantize",
    "observer": "observer",
    "quantize_pt2e": "quantize_pt2e",
    "quantizer": "quantizer",
}


def converter_module(name: str = "") -> Any:
    """
    Import a module of the converter, under whichever of its two names it is installed.

    Raises:
        ImportError: There is no converter, or one that cannot be used.
    """
    package = converter_name()
    if package == "ai_edge_torch":
        name = name.replace("backend.", "odml_torch.")
    return _imported(f"{package}.{name}" if name else package)


@functools.cache
def converter_name() -> str:
    """
    Return the name of the converter's package; ai-edge-torch became litert-torch after 0.7.1.

    Raises:
        ImportError: There is no converter, or one that cannot be used.
    """
    if importlib.util.find_spec("litert_torch") is not None:
        return "litert_torch"
    if importlib.util.find_spec("ai_edge_torch") is None:
        raise ImportError(
            "no converter from torch to .tflite is installed: pip install litert-torch, or, where "
            "torch is older than 2.10, ai-edge-torch==0.7.1"
        )
    version = importlib.metadata.version("ai-edge-torch")
    try:
        package = _imported("ai_edge_torch")
    except ImportError as error:
        raise ImportError(
            f"ai-edge-torch {version} cannot be imported beside torch "
            f"{importlib.metadata.version('torch')} ({error}): it needs torch older than 2.10. "
            "For this torch: pip install litert-torch"
        ) from error
    if not hasattr(package, "convert"):
        raise ImportError(
            f"ai-edge-torch {version} is an empty package that points to its new name: it converts "
            "nothing. pip install litert-torch, or, where torch is older than 2.10, "
            "ai-edge-torch==0.7.1"
        )
    return "ai_edge_torch"


def pt2e_module(name: str) -> Any:
    """
    Import a module of PT2E quantization, from where the converter's own quantizer has it.

    Raises:
        ImportError: As `converter_module` says.
    """
    own = converter_module("quantize.pt2e_quantizer").Quantizer.__module__
    path = f"torchao.quantization.pt2e.{name}"
    if not own.startswith("torchao."):
        path = f"torch.ao.quantization.{_ELSEWHERE_IN_TORCH.get(name, f'pt2e.{name}')}"
    return _imported(path)


def recipe_module(name: str) -> Any:
    """
    Import a module of the recipe library, under whichever of its two names it is installed.

    ai-edge-quantizer became litert-quantizer with 0.11; the code is the same.

    Raises:
        ImportError: Neither is installed.
    """
    for package in ("litert_quantizer", "ai_edge_quantizer"):
        if importlib.util.find_spec(package) is not None:
            return _imported(f"{package}.{name}")
    raise ImportError(
        "recipes need ai-edge-quantizer (litert-quantizer from 0.11 on), and neither is installed: "
        "pip install ai-edge-quantizer"
    )


def load_exporter() -> None:
    """Import what `torch.export.export` imports when it is called first."""
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
        # litert-torch 0.10.0 imports rich, which draws numbers that calibration data may want.
        random.setstate(drawn)


def register_operators(namespace: str) -> None:
    """Import what defines the operators of a namespace of torch, and as little else as possible."""
    if namespace == "quantized_decomposed":
        _imported("torch.ao.quantization.fx._decomposed")
    elif namespace == "litert_torch":
        converter_module("backend.optimization_barrier")
