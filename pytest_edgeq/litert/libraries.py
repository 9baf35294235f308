"""Import the installed libraries under either of their names."""

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

# torch before 2.10 has the modules of `torchao.quantization.pt2e` in
# `torch.ao.quantization.pt2e`, except these.
_ELSEWHERE_IN_TORCH = {
    "fake_quantize": "fake_quantize",
    "learnable_fake_quantize": "_learnable_fake_quantize",
    "observer": "observer",
    "quantize_pt2e": "quantize_pt2e",
    "quantizer": "quantizer",
}


def converter_module(name: str = "") -> Any:
    """
    Import a module of the converter, under the installed one of its two names.

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
    Import a module of PT2E quantization, from the package of the converter's quantizer.

    Raises:
        ImportError: As `converter_module`.
    """
    own = converter_module("quantize.pt2e_quantizer").Quantizer.__module__
    path = f"torchao.quantization.pt2e.{name}"
    if not own.startswith("torchao."):
        path = f"torch.ao.quantization.{_ELSEWHERE_IN_TORCH.get(name, f'pt2e.{name}')}"
    return _imported(path)


def recipe_module(name: str) -> Any:
    """
    Import a module of the recipe library, under the installed one of its names.

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
