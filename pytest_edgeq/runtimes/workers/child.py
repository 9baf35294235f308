"""
What runs in the child process.

It is imported there before anything else of ours, so it imports heavy modules where they are used.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.util import _exit_function  # type: ignore[attr-defined] # as pebble does
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from pytest_edgeq.runtimes.engines import Engine, Source

    Array = npt.NDArray[np.generic]

_Result = TypeVar("_Result")

_PR_SET_PDEATHSIG = 1
"""Of Linux's `prctl`: the signal that this process gets when the thread that started it ends."""

_DUMPED_AT = 0.95
"""Share of the time limit after which the Python stack is written down."""


class LostError(Exception):
    """The engine was opened in another child, which has ended."""


_engines: dict[int, Engine] = {}


def begin(output: Connection, parent: int, memory: int) -> None:
    """Prepare this process: its output, its end and its bounds."""
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # What stands in a buffer is lost with the process.
            stream.reconfigure(line_buffering=True)
    if sys.platform == "linux":
        # Also while native code holds the interpreter's lock.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # pebble ignores Ctrl-C, which the terminal sends to this process, too; and its own handler of
    # SIGTERM runs between two instructions of Python, so never in a native loop.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.enable(2, all_threads=False)
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # Not RLIMIT_AS: kernels and allocators reserve address space that they never use.
        with contextlib.suppress(ValueError):  # above the limit of this user
            resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None, "unreachable because this process was started by multiprocessing"
    wait([parent.sentinel])
    os._exit(1)


def hello() -> int:
    """Return the id of this process."""
    return os.getpid()


def step(seconds: float, function: Callable[..., _Result], *arguments: Any) -> _Result:
    """
    Call a function; write down the Python stack shortly before the time is up.

    Raises:
        MemoryError: The function ran out of memory, whatever it made of it.
        Exception: What the function raises, or a RuntimeError in place of what cannot be sent.
    """
    faulthandler.dump_traceback_later(seconds * _DUMPED_AT, file=2)
    try:
        return function(*arguments)
    except BaseException as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, MemoryError):
                raise MemoryError(str(cause)) from None  # noqa: TRY004 # no check of a type
            cause = cause.__cause__
        if isinstance(error, Exception) and _can_be_sent(error):
            raise
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
    finally:
        faulthandler.cancel_dump_traceback_later()


def _can_be_sent(error: Exception) -> bool:
    try:
        return str(pickle.loads(pickle.dumps(error))) == str(error)
    except Exception:  # whatever its class does when it is copied
        return False


def load(
    key: int,
    source: Source,
    signature: str | None,
    runtime: str,
    threads: int,
    keep: bool,
    own: bytes | None,
) -> None:
    """Open a file, and keep the engine under a key."""
    from pytest_edgeq.runtimes.opening import Opening
    from pytest_edgeq.runtimes.runner import open_here
    from pytest_edgeq.tflite.graph import OpGraph

    runner = None
    if own is not None:
        import cloudpickle

        runner = cloudpickle.loads(own)
    graph = OpGraph.read(source)
    (chosen,) = (each for each in graph.signatures if each.key == signature)
    opening = Opening(source, graph, chosen, runtime, threads, runner, keep=keep)
    _engines[key] = open_here(opening)


def run(key: int, inputs: Mapping[str, Array]) -> list[Array]:
    """
    Run one sample.

    Raises:
        LostError: The engine is not open here.
    """
    return _engine(key).run(inputs)


def tensor(key: int, index: int) -> Array:
    """
    Return a tensor as the last run left it.

    Raises:
        LostError: The engine is not open here.
    """
    return _engine(key).tensor(index)


def _engine(key: int) -> Engine:
    if key not in _engines:
        raise LostError
    return _engines[key]


def close(key: int) -> None:
    """Close an engine; one that is not open here does not count."""
    engine = _engines.pop(key, None)
    if engine is not None:
        engine.close()


def drop(keys: Iterable[int]) -> None:
    """Close engines that nobody uses any more, and print what a user's own runtime raises."""
    for key in keys:
        try:
            close(key)
        except Exception:  # of the user's own code: the others are closed all the same
            traceback.print_exc()


def end() -> None:
    """Close all engines, and what multiprocessing made here: this process will be ended."""
    drop(list(_engines))
    _exit_function()


def attempt(
    key: int, content: bytes, runtime: str, threads: int, inputs: Mapping[str, Array] | None
) -> None:
    """Open a file under a key, run it once where inputs are given, and close it."""
    load(key, content, "cut", runtime, threads, False, None)
    try:
        if inputs is not None:
            run(key, inputs)
    finally:
        close(key)
