"""The Python code that a call of a model runs, and in what order."""

from __future__ import annotations

import contextlib
import dis
import gc
import hashlib
import os
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from pytest_edgeq.cache.code_objects import (
    code_digest,
    is_function,
    methods_of,
    qualified_name,
    writes_globals,
)
from pytest_edgeq.cache.digest import TORCH_FILES, UnknownError, feed
from pytest_edgeq.cache.model_state import ModelState

_Result = TypeVar("_Result")


def code_and_result(model: torch.nn.Module, call: Callable[[], _Result]) -> tuple[str, _Result]:
    """
    Run something that calls a model, and return a hash of the model's code, with the result.

    Strict export reads Python code, which a graph does not tell in full: `x + y` and
    `torch.add(x, y)` are one operator and two patterns for an annotator, and a `print` makes strict
    export refuse the model. So each function that a call of the model ran counts by its bytecode
    and constants, and each call by its place in the bytecode, in order, functions in C by their
    names: all code that is not installed, and of installed packages what the classes of the
    model's modules define and what that calls. What torch calls by itself does not: its caches
    make it depend on what ran before.

    Raises:
        UnknownError: Strict export may see what this does not: another profiler is active, the
            model was not called as modules are, or its code does what the calls do not tell.
    """
    if sys.getprofile() is not None:
        raise UnknownError(_PROFILED)
    record = _Record(ModelState(model))
    try:
        with _recorded(model, record):
            result = call()
    finally:
        record.state.restore()
    if not record.called:
        raise UnknownError("the code of the model, whose class has a __call__ of its own")
    found = record.own() | record.reached(methods_of(model))
    record.check(found)
    hasher = hashlib.sha256()
    for call_made in record.calls:
        if call_made.caller in found or call_made.callee in found:
            feed(hasher, call_made.told(found))
    for digest in sorted(map(code_digest, found)):
        feed(hasher, digest)
    feed(hasher, sorted(record.state.types))
    feed(hasher, _dynamo_settings())
    return hasher.hexdigest(), result


_PROFILED = "the code of the model, while another profiler is active"


class _Call(NamedTuple):
    """A call: the code that made it, where in its bytecode, and what was called."""

    caller: types.CodeType
    place: int
    callee: types.CodeType | str

    def told(self, found: set[types.CodeType]) -> tuple[Any, ...]:
        """Return what identifies it in another process."""
        caller = (code_digest(self.caller), self.place) if self.caller in found else "library"
        callee = self.callee
        if isinstance(callee, types.CodeType):
            name = f"{Path(callee.co_filename).name} {qualified_name(callee)}"
            callee = code_digest(callee) if callee in found else name
        return caller, callee


class _Record:
    """
    What a call of a model ran. It is what `sys.setprofile` calls.

    Attributes:
        state: As given.
        called: The functions that each function called, functions in C by their names; of a
            library's functions those that are not a library's.
        calls: In order, but for those of one library by another.
    """

    def __init__(self, state: ModelState) -> None:
        self.state = state
        self.called: dict[types.CodeType, set[types.CodeType | str]] = {}
        self.calls: list[_Call] = []
        self._globals: dict[types.CodeType, dict[str, Any]] = {}
        self._libraries: dict[types.CodeType, bool] = {}
        self._in_c: dict[types.FrameType, Any] = {}
        self._hidden: str | None = None

    def __call__(self, frame: types.FrameType, event: str, arg: Any) -> None:
        """Note an event."""
        code = frame.f_code
        if event == "call":
            is_library = self._libraries.get(code)
            if is_library is None:
                is_library = _is_a_librarys(code, frame.f_globals)
                self._libraries[code] = is_library
                self._globals[code] = frame.f_globals
                self.called.setdefault(code, set())
                if not is_library and is_function(code):
                    self.state.enter(frame)
            caller = frame.f_back
            if caller and not (is_library and self._libraries.get(caller.f_code, True)):
                self._note(caller, code)
        elif event == "c_call":
            if not self._libraries.get(code, True):
                # `math.sqrt` and `torch.sqrt` differ in the module alone.
                self._note(frame, f"{arg.__module__} {arg.__qualname__}")
                self._in_c[frame] = arg
        elif event != "return":  # from C
            self._in_c.pop(frame, None)

    def _note(self, frame: types.FrameType, callee: types.CodeType | str) -> None:
        caller = frame.f_code
        self.called.setdefault(caller, set()).add(callee)
        if isinstance(callee, str) or (is_function(callee) and not _is_by_chance(callee)):
            self.calls.append(_Call(caller, frame.f_lasti, callee))

    def see_operator(self, frame: types.FrameType, operator: Any) -> None:
        """
        Note that a frame, or what it calls in C, has made torch run an operator.

        `functools.reduce(f, tensors)` does not tell what `f` is, if that is in C as well.
        """
        is_library = self._libraries.get(frame.f_code, True)
        if is_library or getattr(operator, "__name__", "") == "__get__":
            return
        function = self._in_c.get(frame)
        if function is not None:
            is_plain = function in _PLAIN_BUILTINS or function.__module__ == "_operator"
            is_hidden = not is_plain and not _belongs_to_torch(function)
            name = function.__qualname__
        else:
            name = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            is_hidden = not name.startswith(_OPERATIONS)
        if is_hidden:
            self._hidden = f"{qualified_name(frame.f_code)}, in which {name} runs operators"

    def own(self) -> set[types.CodeType]:
        """Return the code that ran and belongs to no installed package, as a project's own."""
        return {
            code
            for code in self.called
            if is_function(code)
            and not self._libraries.get(code, True)
            and not code.co_filename.startswith(_PACKAGES)
        }

    def reached(self, roots: set[types.CodeType]) -> set[types.CodeType]:
        """Return the code that ran because these called it, without a library between."""
        reached: set[types.CodeType] = set()
        open_calls: list[Any] = [code for code in roots if code in self.called]
        while open_calls:
            code = open_calls.pop()
            # What a function in C calls is not told apart by who called that.
            if is_function(code) and code not in reached and not self._libraries.get(code, True):
                reached.add(code)
                open_calls += self.called[code]
        return reached

    def check(self, found: set[types.CodeType]) -> None:
        """
        Refuse code of which strict export may see more than this record.

        Raises:
            UnknownError: It asks whether TorchDynamo runs, is marked for it, writes globals, or
                hides from Python which operator it runs.
        """
        why = self._hidden
        for code in found:
            name = qualified_name(code)
            for callee in self.called[code]:
                if _is_of_dynamo(callee):
                    why = f"{name}, which asks or tells TorchDynamo something"
            if writes_globals(code):
                why = f"{name}, which writes a global variable"
            holder = self._globals.get(code, {}).get(code.co_name)
            if getattr(holder, "__code__", None) is code and _is_marked(holder):
                why = f"{name}, which is marked for TorchDynamo"
        if why is not None:
            raise UnknownError(f"the code of {why}")


_PLAIN_BUILTINS = frozenset({abs, divmod, len, pow, round, sum})
"""Functions in C that run no operators but those of their name."""

_OPERATIONS = (
    *("BINARY_", "COMPARE_", "CONTAINS_", "DELETE_SUBSCR", "INPLACE_", "JUMP_IF_", "LOAD_ATTR"),
    *("LOAD_METHOD", "POP_JUMP_", "STORE_ATTR", "STORE_SLICE", "STORE_SUBSCR", "TO_BOOL", "UNARY_"),
)
"""Beginnings of the names of bytecodes that tell which operator they run."""


def _belongs_to_torch(function: Any) -> bool:
    """Whether a function in C is torch's, or a method of a tensor or a module of torch's."""
    owner = getattr(function, "__self__", None)
    kind = owner if isinstance(owner, (type, types.ModuleType)) else type(owner)
    names = (function.__module__, getattr(kind, "__module__", None), kind.__name__)
    return any(str(name).partition(".")[0] == "torch" for name in names)


def _is_by_chance(callee: types.CodeType) -> bool:
    """Whether it depends on other things than the code when a function is called."""
    name = callee.co_filename
    is_import = name.startswith("<frozen")  # of a module, which happens once a process
    is_destructor = callee.co_name == "__del__" or name.endswith(("/weakref.py", "/weak.py"))
    return is_import or is_destructor


def _is_of_dynamo(callee: types.CodeType | str) -> bool:
    """Whether a function answers, or does, something else while TorchDynamo traces."""
    if isinstance(callee, str):
        return callee.startswith("torch._C._dynamo")
    asks = callee.co_filename == torch.compiler.__file__ and callee.co_name not in _SAME_IN_EXPORTS
    return asks or callee.co_filename.startswith(_DYNAMO)


_SAME_IN_EXPORTS = ("is_compiling", "is_exporting")
"""Functions of `torch.compiler` that return one value in strict and non-strict export."""

_DYNAMO = tuple(TORCH_FILES + name + os.sep for name in ("_dynamo", "_higher_order_ops"))
"""Folders of torch: TorchDynamo, and operators such as `torch.cond` that call it."""


def _is_marked(function: Any) -> bool:
    """Whether TorchDynamo has been told to put calls of a function into graphs as they are."""
    rules = sys.modules.get("torch._dynamo.trace_rules")
    names = ("_allowed_callable_ids", "_nonstrict_trace_callable_ids", "_leaf_function_ids")
    return rules is not None and any(id(function) in getattr(rules, name, ()) for name in names)


def _dynamo_settings() -> list[tuple[str, Any]]:
    """Return the settings of TorchDynamo that are not its defaults, with their names."""
    from torch._dynamo import config as dynamo_config

    config: Any = dynamo_config
    settings = config.get_config_copy()
    defaults = config._config
    return sorted((n, each) for n, each in settings.items() if each != defaults[n].default)


@contextlib.contextmanager
def _recorded(model: torch.nn.Module, record: _Record) -> Iterator[None]:
    """Record what each call of a model runs, its hooks included, and nothing around it."""
    compiled = vars(model).get("_compiled_call_impl")
    called: Callable[..., Any] = compiled or model._call_impl
    is_running = False

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

    def __init__(self, record: _Record) -> None:
        super().__init__()
        self._record = record

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():  # a branch of `torch.cond`, with this mode
            return func(*args, **kwargs)
        is_recording = sys.getprofile() is self._record
        if is_recording:
            self._record.see_operator(sys._getframe(1), func)
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


_STANDARD = sysconfig.get_path("stdlib") + os.sep
_PACKAGES = tuple({sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib")})
_KNOWN = (TORCH_FILES, str(Path(__file__).parent.parent) + os.sep)
"""Where code lies whose version or content is in every key: torch's, and ours."""

_GENERATED = ("torch", "torchao", "pytest_edgeq", *sys.stdlib_module_names)
"""Packages whose functions without a file, as those of data classes, are no code of a model."""


def _is_a_librarys(code: types.CodeType, names: Mapping[str, Any]) -> bool:
    """Whether a function belongs to torch, to this package or to Python's own library."""
    file = code.co_filename
    if file.startswith("<eval_with_key"):  # of torch.fx
        return True
    if file.startswith("<"):
        module = str(names.get("__name__"))
        return module.partition(".")[0] in _GENERATED or module.startswith("namedtuple_")
    if file.startswith(_PACKAGES):
        # Installed packages lie below Python's own library.
        return file.startswith(_KNOWN)
    return file.startswith((_STANDARD, *_KNOWN))
