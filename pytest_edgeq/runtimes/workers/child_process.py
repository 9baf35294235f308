"""
The child process of a session: a pool of one, started when it is first needed.

pebble starts and ends the process, gives it tasks, and tells of its death. It is spawned, as torch
has threads that a fork would cut off.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import os
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeout  # Python 3.10 has two
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any, TypeVar

from pebble import ProcessExpired, ProcessPool

from pytest_edgeq.runtimes.workers import child
from pytest_edgeq.runtimes.workers.death import Death, DeathError, Memory
from pytest_edgeq.runtimes.workers.sessions import is_abandoned

_Result = TypeVar("_Result")

_TICK = 0.05
"""Seconds between two looks at the child's memory and output."""

_GRACE = 1.0
"""Seconds that pebble has to tell of the death of a process that is gone."""

_LATE = 5.0
"""
Seconds beyond the bound after which pebble will tell of no time-out.

It counts from the moment that the child has taken a task, which one that was stopped never does; it
ends a child within 3 s.
"""

_START_SECONDS = 60.0
"""That a child has to start; a quarter of one is enough on a machine that does nothing else."""

_END_SECONDS = 10.0
"""That a child has to close the files of a user's own runtimes."""

_KEPT_BYTES = 1 << 16
"""Of what the child printed last."""

_OUT_OF_MEMORY = ("bad_alloc", "Cannot allocate memory", "ut of memory", "emory allocation")
"""What libraries print when an allocation fails, before they end the process."""

_NEAR = 0.9
"""Share of the bound at which a death is one for want of memory."""


_MAIN = threading.Lock()
"""Held while the main module is hidden."""


@contextlib.contextmanager
def _no_main_module() -> Iterator[None]:
    """
    Keep multiprocessing from importing the main module in the child.

    It would run a user's script a second time, and import all of pytest.
    """
    with _MAIN:  # a pool that ends may start a child while the next pool does
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


class _Process(SpawnProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # the name that multiprocessing calls
        with _no_main_module():
            return SpawnProcess._Popen(process_obj)


class _Context(SpawnContext):
    Process = _Process


class Child:
    """
    A process that runs one function at a time.

    Attributes:
        memory: Bytes of private writable memory that it may map.
        pid: Its id; None while it is not started.
    """

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self.reset()

    def reset(self) -> None:
        """Take the child for one that was never started, as it is in a fork of this process."""
        self._lock = threading.Lock()
        self._pool: Any = None
        self._keeper = threading.Thread()
        self._closing = threading.Event()
        self._failure = ""
        self._output: Connection | None = None
        self._printed: collections.deque[bytes] = collections.deque()
        self.pid: int | None = None
        self._closed: collections.deque[int] = collections.deque()

    def forget(self, key: int) -> None:
        """Have an engine closed before the next call."""
        self._closed.append(key)

    def call(self, seconds: float, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """
        Call a function in the child.

        Raises:
            DeathError: The child ended, or was ended by the bounds of time and memory.
            KeyboardInterrupt: The controller of this worker of pytest-xdist has ended.
            Exception: What the function raises.
        """
        with self._lock:
            if self.pid is None:
                self.pid = self._once(seconds, child.hello)
            self._drop_closed(seconds)
            try:
                return self._once(seconds, function, *arguments)
            finally:
                self._forward()

    def _drop_closed(self, seconds: float) -> None:
        closed = [self._closed.popleft() for _ in range(len(self._closed))]
        if not closed:
            return
        try:
            self._once(seconds, child.drop, closed)
        except DeathError as error:
            # No test can be blamed for it: they went with models that nobody holds any more.
            self._printed.append(f"edgeq: closing a file gave {error.death.what}\n".encode())

    def _once(self, seconds: float, function: Callable[..., _Result], *arguments: Any) -> _Result:
        for _ in range(2):
            # A pool gives up where its child was killed between two calls: nothing of this one ran.
            memory = None if self.pid is None else Memory.of(self.pid)
            pool = self._started()
            try:
                future: Future[_Result] = pool.schedule(
                    child.step, args=(seconds, function, *arguments), timeout=seconds
                )
            except RuntimeError:
                self._drop()
                continue
            try:
                return self._result(future, seconds, memory)
            except BrokenProcessPool:
                self._drop()
        raise DeathError(Death("start", bound=self.memory, printed=self._tail()))

    def _started(self) -> Any:
        if self._pool is None:
            ready = threading.Event()
            # A child ends with the thread that started it, see `child.begin`.
            self._keeper = threading.Thread(target=self._keep, args=(ready,), daemon=True)
            self._keeper.start()
            ready.wait()
        if self._pool is None:
            raise DeathError(Death("start", bound=self.memory, printed=self._failure))
        return self._pool

    def _keep(self, ready: threading.Event) -> None:
        try:
            self._serve(ready)
        except (OSError, RuntimeError) as error:  # no semaphores, no memory, no process
            self._failure = f"{type(error).__name__}: {error}"
        finally:
            ready.set()

    def _serve(self, ready: threading.Event) -> None:
        context = _Context()
        reader, writer = context.Pipe(duplex=False)
        os.set_blocking(reader.fileno(), False)
        closing = self._closing = threading.Event()
        pool: Any = ProcessPool(
            max_workers=1,
            initializer=child.begin,
            initargs=(writer, os.getpid(), self.memory),
            context=context,
        )
        started = pool.active  # asking starts it
        self._output, self._pool = reader, pool
        ready.set()
        if started:
            closing.wait()
        pool.stop()
        pool.join()
        reader.close()
        writer.close()

    def _result(self, future: Future[_Result], seconds: float, memory: Memory | None) -> _Result:
        begun, gone = time.monotonic(), None
        try:
            while not wait([future], timeout=_TICK).done:
                self._drain()
                if is_abandoned():
                    raise KeyboardInterrupt("the controller of this worker has ended")  # noqa: TRY301
                now = time.monotonic()
                if self.pid is None:
                    if now - begun > _START_SECONDS:
                        raise DeathError(self._death("start", memory))  # noqa: TRY301
                    continue
                if now - begun > seconds + _LATE:
                    raise DeathError(self._death("timeout", memory, seconds=seconds))  # noqa: TRY301
                memory = Memory.of(self.pid) or memory
                gone = None if _is_alive(self.pid) else gone or now
                if gone is not None and now - gone > _GRACE:
                    # pebble tells of no process that ends with status 0.
                    raise DeathError(self._death("exit", memory, exit_code=0))  # noqa: TRY301
        except BaseException:
            self._drop()
            raise
        self._drain()
        return self._taken(future, memory, seconds)

    def _taken(self, future: Future[_Result], memory: Memory | None, seconds: float) -> _Result:
        try:
            return future.result()
        except ProcessExpired as error:
            code = error.exitcode
            facts = {"exit_code": code} if code >= 0 else {"signal": -code}
            kind = "exit" if code >= 0 else "signal"
            raise DeathError(self._death(kind, memory, **facts)) from None
        except MemoryError as error:
            raise DeathError(self._death("memory", memory)) from error
        except FutureTimeout as error:
            if hasattr(error, "traceback"):  # the function raised it
                raise
            raise DeathError(self._death("timeout", memory, seconds=seconds)) from None

    def _death(self, kind: str, memory: Memory | None, **facts: Any) -> Death:
        """
        Tell how the child ended, and start another one with the next call.

        Its pipes and locks end with it: a process that is killed may hold a lock for ever, or have
        left half of a message.
        """
        self._drain()
        printed = self._tail()
        self._printed.clear()
        self._drop()
        ran_out = any(word in printed for word in _OUT_OF_MEMORY) or (
            memory is not None and memory.data > _NEAR * self.memory
        )
        death = Death(kind, memory=memory, bound=self.memory, printed=printed, **facts)
        if ran_out and kind in ("signal", "exit") and not death.was_killed:
            return replace(death, kind="memory")
        return death

    def _drain(self) -> None:
        """Read what the child has printed, and keep the last of it."""
        assert self._output is not None, "unreachable because the pool is started"
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._output.fileno(), _KEPT_BYTES):
                self._printed.append(chunk)
                while sum(map(len, self._printed)) - len(self._printed[0]) > _KEPT_BYTES:
                    self._printed.popleft()

    def _tail(self) -> str:
        return b"".join(self._printed).decode(errors="replace")

    def _forward(self) -> None:
        """Print what the child printed: the same would stand here without it."""
        if self._printed:
            text = b"".join(self._printed)
            self._printed.clear()
            with contextlib.suppress(OSError):  # stderr is closed
                os.write(2, text)

    def _drop(self) -> None:
        """End the child; the next call starts another one."""
        self._closing.set()
        self._pool = self.pid = None

    def close(self) -> None:
        """End the child, and wait for its end."""
        with self._lock:
            if self.pid is not None:
                # Whatever the user's own runtimes do in it: the process ends.
                with contextlib.suppress(DeathError, Exception):
                    self._once(_END_SECONDS, child.end)
            self._drop()
            if self._keeper.ident is not None:
                self._keeper.join()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


@functools.cache
def child_of(memory: int) -> Child:
    """Return the child of this process with a bound on memory; it is shared by all sessions."""
    made = Child(memory)
    _children.append(made)
    return made


_children: list[Child] = []


def _reset_children() -> None:
    for each in _children:
        each.reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_children)


# Before pebble's own, which ends processes at once: it was registered when pebble was imported.
@atexit.register
def close_children() -> None:
    """End every child of this process; the next call of one starts it anew."""
    for each in _children:
        each.close()
