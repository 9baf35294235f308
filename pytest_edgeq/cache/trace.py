"""The exported program of a model, and the code that ran while it was exported."""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import inspect
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from pytest_edgeq import litert
from pytest_edgeq.cache.digest import UnknownError, feed, feed_graph

__all__ = ["code_and_result", "graph_digest", "program_digest"]

_Result = TypeVar("_Result")


def program_digest(program: torch.export.ExportedProgram) -> str:
    """
    Return a hash of an exported program: graph, weights, buffers, constants and signature.

    Raises:
        UnknownError: A part of it cannot be identified.
    """
    hasher = hashlib.sha256()
    feed_graph(hasher, program.graph_module)
    signature = program.graph_signature
    for spec in (*signature.input_specs, *signature.output_specs):
        feed(hasher, str(spec))
    feed(hasher, dict(sorted(program.state_dict.items())))
    feed(hasher, dict(sorted(program.constants.items())))
    feed(
        hasher, sorted(f"{symbol} {bounds}" for symbol, bounds in program.range_constraints.items())
    )
    feed(hasher, (str(program.call_spec.in_spec), str(program.call_spec.out_spec)))
    return hasher.hexdigest()


def graph_digest(module: torch.fx.GraphModule, *, values: bool = True) -> str:
    """
    Return a hash of a graph with observers: nodes, annotations, observers and constants.

    Args:
        module: The graph.
        values: Whether the elements of its constants count, or their shapes alone.

    Raises:
        UnknownError: A part of it cannot be identified.
    """
    hasher = hashlib.sha256()
    feed_graph(hasher, module, litert.NODE_METADATA, values=values)
    info = getattr(module.graph._codegen, "pytree_info", None)
    feed(hasher, str(info))
    return hasher.hexdigest()


def code_and_result(model: torch.nn.Module, call: Callable[[], _Result]) -> tuple[str, _Result]:
    """
    Run something that calls a model, and return a hash of the model's code, with the result.

    Strict export reads Python code, which a graph does not tell in full: `x + y` and
    `torch.add(x, y)` are one operator and two patterns for an annotator, and a `print` makes strict
    export refuse the model. So each function that a call of the model ran counts by its bytecode
    and constants, with the functions in C that it calls: all code that is not installed, and of
    installed packages what the classes of the model's modules define and what that calls. What
    torch calls by itself does not: its caches make it depend on what ran before.

    Raises:
        UnknownError: Another profiler is active, or the model was not called as modules are.
    """
    if sys.getprofile() is not None:
        raise UnknownError(_PROFILED)
    edges: _Edges = {}
    with _recorded(model, edges):
        result = call()
    if not edges:
        raise UnknownError("the code of the model, whose class has a __call__ of its own")
    found = set()
    for code in _own(edges) | _reached(_methods(model), edges):
        hasher = hashlib.sha256()
        _feed_code(hasher, code)
        feed(hasher, sorted(each for each in edges[code] if isinstance(each, str)))
        found.add(hasher.hexdigest())
    return hashlib.sha256("".join(sorted(found)).encode()).hexdigest(), result


_PROFILED = "the code of the model, while another profiler is active"


_Edges = dict[types.CodeType, set[types.CodeType | str]]
"""The functions that ran: what each of them called, functions in C by their names."""


@contextlib.contextmanager
def _recorded(model: torch.nn.Module, edges: _Edges) -> Iterator[None]:
    """Record what each call of a model runs, its hooks included, and nothing around it."""
    compiled = vars(model).get("_compiled_call_impl")
    called: Callable[..., Any] = compiled or model._call_impl
    is_running = False

    def record(frame: types.FrameType, event: str, arg: Any) -> None:
        if event == "call":
            edges.setdefault(frame.f_code, set())
            if frame.f_back is not None:
                edges.setdefault(frame.f_back.f_code, set()).add(frame.f_code)
        elif event == "c_call":
            # `math.sqrt` and `torch.sqrt` differ in the module alone.
            name = f"{arg.__module__} {arg.__qualname__}"
            edges.setdefault(frame.f_code, set()).add(name)

    def recorded(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_running
        if is_running:
            return called(*args, **kwargs)
        collects = gc.isenabled()
        gc.disable()  # a destructor is none of the model's code
        is_running = True
        sys.setprofile(record)
        try:
            with _TorchUnrecorded(record):
                result = called(*args, **kwargs)
            if sys.getprofile() is not record:
                raise UnknownError(_PROFILED)
            return result
        finally:
            sys.setprofile(None)
            is_running = False
            if collects:
                gc.enable()

    # What `Module.__call__` looks up, for `Module.compile`.
    vars(model)["_compiled_call_impl"] = recorded
    try:
        yield
    finally:
        del vars(model)["_compiled_call_impl"]
        if compiled is not None:
            vars(model)["_compiled_call_impl"] = compiled


class _TorchUnrecorded(TorchFunctionMode):
    """
    Stops the record inside torch's own functions, where most of the time of an export passes.

    Not where they run code that is not torch's: a callable among the arguments, or a tensor of the
    user's own class.
    """

    def __init__(self, record: Callable[[types.FrameType, str, Any], None]) -> None:
        super().__init__()
        self._record = record

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():  # a branch of `torch.cond`, with this mode
            return func(*args, **kwargs)
        is_recording = sys.getprofile() is self._record
        if not is_recording or types or not _runs_torch_alone(func, args, kwargs):
            return func(*args, **kwargs)
        sys.setprofile(None)
        try:
            return func(*args, **kwargs)
        finally:
            sys.setprofile(self._record)


def _runs_torch_alone(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """
    Whether a function that torch dispatches is torch's own, and is given no callable.

    A custom operator is not looked at: the program digest refuses it.
    """
    if isinstance(func, torch._ops.HigherOrderOperator):
        return False
    code = getattr(func, "__code__", None)
    if code is not None and not code.co_filename.startswith(_KNOWN):
        return False
    return not any(map(callable, args)) and not any(map(callable, kwargs.values()))


_STANDARD = sysconfig.get_path("stdlib")
_PACKAGES = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
_KNOWN = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))
"""Where code lies whose version or content is in every key: torch's, and ours."""


def _own(edges: _Edges) -> set[types.CodeType]:
    """Return the code that ran and belongs to no installed package, such as a project's own."""
    return {
        code
        for code in edges
        if _is_function(code)
        and not code.co_filename.startswith(("<", _STANDARD, *_PACKAGES, *_KNOWN))
    }


def _reached(roots: set[types.CodeType], edges: _Edges) -> set[types.CodeType]:
    """Return the code that ran because these functions called it, without a library between."""
    reached: set[types.CodeType] = set()
    open_calls: list[Any] = [code for code in roots if code in edges]
    while open_calls:
        code = open_calls.pop()
        # What a function in C calls is not told apart by who called that.
        if _is_function(code) and code not in reached and not _is_a_librarys(code):
            reached.add(code)
            open_calls += edges[code]
    return reached


def _is_function(code: Any) -> bool:
    """Whether it is neither in C nor the body of a module or a class, which run once."""
    return isinstance(code, types.CodeType) and bool(code.co_flags & inspect.CO_OPTIMIZED)


def _is_a_librarys(code: types.CodeType) -> bool:
    """Whether it is code of torch, of ours or of Python's own library."""
    name = code.co_filename
    if name.startswith(_PACKAGES):
        # Installed packages lie below Python's own library.
        return name.startswith(_KNOWN)
    return name.startswith((_STANDARD, "<frozen", *_KNOWN))


def _methods(model: torch.nn.Module) -> set[types.CodeType]:
    """Return the code of every function that the classes and instances of the modules hold."""
    found: set[types.CodeType] = set()
    seen: set[int] = set()
    holders: dict[int, Any] = {}
    for module in model.modules():
        for holder in (module, *type(module).__mro__):
            name = holder.__module__ if isinstance(holder, type) else ""
            if not name.startswith("torch.") and holder is not object:
                holders.setdefault(id(holder), holder)
    open_values = [value for holder in holders.values() for value in vars(holder).values()]
    while open_values:
        value = open_values.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, (staticmethod, classmethod)):
            open_values.append(value.__func__)
        elif isinstance(value, property):
            open_values += [value.fget]
        elif isinstance(value, types.MethodType):
            open_values.append(value.__func__)
        elif isinstance(value, functools.partial):
            open_values += [value.func, *value.args]
        elif isinstance(value, types.FunctionType):
            found.add(value.__code__)
            # A decorator holds what it decorates.
            cells = value.__closure__ or ()
            open_values += [cell.cell_contents for cell in cells if _is_filled(cell)]
    return found


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 # an empty one raises
    except ValueError:
        return False
    return True


def _feed_code(hasher: Any, code: types.CodeType) -> None:
    feed(hasher, code.co_qualname if sys.version_info >= (3, 11) else code.co_name)
    feed(hasher, (code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_flags))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            _feed_code(hasher, constant)
        else:
            # Of others, such as Ellipsis, the name.
            known = isinstance(constant, (str, bytes, int, float, complex, tuple, frozenset))
            feed(hasher, constant if known else repr(constant))
