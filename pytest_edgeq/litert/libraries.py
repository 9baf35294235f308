"""Import the libraries when needed and without their messages; find rules added to them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import logging
import os
import random
import sys
import threading
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from pytest_edgeq.runtimes.process_state import paused_collector

# Loggers whose messages no user can act on, and which would fill the captured log of every test
# that fails: torch 2.13's structured trace (hundreds of empty DEBUG records an export) and its
# export ("always_classified is unsupported" for each failure); torchao 0.18 on extensions for GPUs
# that it could not load, and torch on torchao's enums.
_CHATTER = (
    "torch.__trace",
    "torch.export._trace",
    "torchao",
    "torchao.kernel.intmm",
    "torch.utils._pytree",
)


_silence, _silence_lock = contextlib.ExitStack(), threading.Lock()
_quieted: list[None] = []  # one for each `quiet` that is open


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """
    Suppress the libraries' own messages, also for suites that turn warnings into errors.

    torch 2.13 and litert-torch 0.10 warn on each conversion (`isinstance(treespec, LeafSpec)` is
    deprecated) and on import (torchao's `KernelPreference`); no user can act on it. The filters of
    warnings are those of all threads: the first one in sets them, the last one out restores them.
    """
    with _silence_lock:
        if not _quieted:
            _silence.enter_context(_silenced())
        _quieted.append(None)
    try:
        yield
    finally:
        with _silence_lock:
            _quieted.pop()
            if not _quieted:
                _silence.close()


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    progress = os.environ.get("LITERT_TORCH_SHOW_PROGRESS")
    os.environ.setdefault("LITERT_TORCH_SHOW_PROGRESS", "n")
    # litert-torch 0.10 warns through logging.warning, which adds a handler to a bare root logger.
    root = logging.getLogger()
    handlers = list(root.handlers)
    loggers = [logging.getLogger(name) for name in _CHATTER]
    disabled = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, before in zip(loggers, disabled, strict=True):
            logger.disabled = before
        for handler in [handler for handler in root.handlers if handler not in handlers]:
            root.removeHandler(handler)
        if progress is None:
            os.environ.pop("LITERT_TORCH_SHOW_PROGRESS", None)


_RECIPES = ("litert_quantizer", "ai_edge_quantizer")  # the recipe library from 0.11 on, and before

_OWN = ("builtins", "torch", "litert_torch", *_RECIPES)


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
    """Import a module of the recipe library."""
    newer, older = _RECIPES
    return _imported(f"{newer if importlib.util.find_spec(newer) else older}.{name}")


def load_exporter() -> None:
    """Import the modules that `torch.export.export` imports at its first call."""
    with contextlib.suppress(ImportError):  # only to be faster
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


def registered_by_others() -> list[str]:
    """Return the names of registered rules that are not the libraries' own."""
    return sorted(f"{_module(each)}.{getattr(each, '__name__', each)}" for each in _foreign())


def _foreign() -> Iterator[Any]:
    for table in _tables():
        for rule in list(table.values()):
            is_partial = isinstance(rule, functools.partial)
            for function in (rule.func, *filter(callable, rule.args)) if is_partial else (rule,):
                if _module(function).partition(".")[0] not in _OWN:
                    yield function


def _tables() -> Iterator[dict[Any, Any]]:
    """Yield the rule tables of loaded modules; those not loaded have no other rules."""
    if lowerings := sys.modules.get("litert_torch.backend.lowerings.registry"):
        yield lowerings.global_registry.registered_ops
    if decompositions := sys.modules.get("litert_torch.fx_infra.decomp"):
        for table in (decompositions._pre_convert_decomp, decompositions._pre_lower_decomp):
            # torch 2.13's table, a dict, keeps its functions in an attribute.
            yield getattr(table, "decomp_table", table)
    managers = [sys.modules.get(f"{library}.algorithm_manager") for library in _RECIPES]
    for manager in filter(None, managers):
        for algorithm in manager._alg_manager_instance._algorithm_registry.values():
            for rules in algorithm.quantized_ops.values():
                yield {each.name: getattr(rules, each.name) for each in dataclasses.fields(rules)}


def _module(function: Any) -> str:
    """Return the module of a function's code, also behind `functools.wraps`."""
    scope = getattr(function, "__globals__", None)
    return str(type(function).__module__ if scope is None else scope["__name__"])
