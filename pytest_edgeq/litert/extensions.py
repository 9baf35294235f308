"""Find rules that other code has registered with the libraries."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterator
from typing import Any

_OWN = ("builtins", "torch", "litert_torch", "ai_edge_quantizer")


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
    if algorithms := sys.modules.get("ai_edge_quantizer.algorithm_manager"):
        for algorithm in algorithms._alg_manager_instance._algorithm_registry.values():
            for rules in algorithm.quantized_ops.values():
                yield {each.name: getattr(rules, each.name) for each in dataclasses.fields(rules)}


def _module(function: Any) -> str:
    """Return the module of a function's code, also behind `functools.wraps`."""
    scope = getattr(function, "__globals__", None)
    return str(type(function).__module__ if scope is None else scope["__name__"])
