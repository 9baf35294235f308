"""Skip work that torch repeats for every decomposition of an exported program."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def ops_listed_once() -> Iterator[None]:
    """
    Cache the list of decomposable operators during a conversion.

    A conversion by litert-torch 0.10.0 runs `run_decompositions` two to four times. Each time torch
    2.13 lists all operators that are composed of others (`_collect_all_valid_cia_ops`, 0.04 s, most
    of it to look them all up anew for each of 34 namespaces, `_materialize_cpp_cia_ops`) and
    overrides their kernels by 6,000 calls of `OperatorBase.py_impl`. Most of their 0.06 s are spent
    on the annotations of its inner function: `collections.abc.Callable[_P, _T]` is built anew at
    each call. Together 0.25 s of 0.36 s for a lone ReLU.

    The list is made anew once an operator is registered. Nothing else changes.
    """
    import torch._ops
    import torch.export.decomp_utils
    import torch.export.exported_program
    from torch._export import utils

    collect, look_up = utils._collect_all_valid_cia_ops, utils._materialize_cpp_cia_ops
    listed: dict[tuple[str, ...], set[Any]] = {}

    def listed_once() -> set[Any]:
        key = "CompositeImplicitAutograd"
        registered = tuple(torch._C._dispatch_get_registrations_for_dispatch_key(key))
        if registered not in listed:
            look_up()
            with _replaced([(utils, "_materialize_cpp_cia_ops", lambda: None)]):
                listed[registered] = collect()
        return listed[registered]

    DispatchKey, OperatorBase = torch._C.DispatchKey, torch._ops.OperatorBase
    py_impl = OperatorBase.py_impl

    def registered_fast(operator: Any, key: Any) -> Callable[[Any], Any]:
        if type(key) is not DispatchKey or key == DispatchKey.Python:
            return py_impl(operator, key)

        def register(function: Any) -> Any:
            if key in operator.py_kernels:
                return py_impl(operator, key)(function)  # which refuses it
            operator.py_kernels[key] = function
            operator._dispatch_cache.clear()
            return function

        return register

    with _replaced(
        [
            (torch.export.exported_program, "_collect_all_valid_cia_ops", listed_once),
            (torch.export.decomp_utils, "_collect_all_valid_cia_ops", listed_once),
            (OperatorBase, "py_impl", registered_fast),
        ]
    ):
        yield


@contextlib.contextmanager
def _replaced(attributes: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes temporarily."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in attributes]
    for owner, name, value in attributes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def graphs_compiled_on_call() -> contextlib.AbstractContextManager[None]:
    """
    Compile the graphs that torch creates meanwhile only when they are called.

    torch 2.13 generates and compiles Python code for each graph that an export or a converter pass
    creates, about 80 in a conversion, and nearly all are never called: 4 % of a conversion's time.
    """
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    manager: contextlib.AbstractContextManager[None] = _use_lazy_graph_module(True)
    return manager
