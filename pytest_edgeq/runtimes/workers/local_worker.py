"""Workers of this machine: processes of this Python that run one function at a time."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from pytest_edgeq.runtimes.workers.crash_report import Memory, WorkerCrashError
from pytest_edgeq.runtimes.workers.link import Link, LinkError
from pytest_edgeq.runtimes.workers.settings import is_abandoned

_Result = TypeVar("_Result")

_START_SECONDS = 60.0  # half of one is enough on a machine that does nothing else
_END_SECONDS = 10.0  # to close the files of a user's own runtimes


class LocalWorker:
    """
    A process that runs one function at a time; a call starts it where it does not run.

    It is spawned, as torch has threads that a fork would cut off, and ends with this process.
    """

    def __init__(self, memory: int | None = None) -> None:
        self.memory = memory  # bytes of private writable memory that it may map; None for no bound
        self._lock = threading.RLock()
        self._link: Link | None = None
        self._is_killed = False
        self._used: Memory | None = None

    @property
    def pid(self) -> int | None:
        """Return the id of the process; None while it is not started."""
        return None if self._link is None else self._link.pid

    def start(self) -> Link:
        """Start the process, unless it runs, or raise a LinkError."""
        with self._lock:
            if not self._is_killed and (self._link is None or not self._link.is_alive):
                path = [each for each in sys.path if isinstance(each, str)]
                bounds = {"parent": os.getpid(), "memory": self.memory}
                self._drop()
                self._link = Link(
                    [sys.executable], _START_SECONDS, local=bounds, path=path, on_tick=self._look
                )
            if self._is_killed:
                self._drop()
            if self._link is None:
                raise LinkError("closed", "the end of the session")
            return self._link

    def call(
        self, seconds: float | None, function: Callable[..., _Result], /, *args: Any, **kwargs: Any
    ) -> _Result:
        """Call a function in the process, or raise a WorkerCrashError."""
        parts = [(function, args, kwargs)]
        result: _Result
        [result] = self.use(lambda link: link.ask({"what": "call"}, parts, seconds), seconds)
        return result

    def use(self, request: Callable[[Link], _Result], seconds: float | None) -> _Result:
        """Ask the process something within a bound on time, or raise a WorkerCrashError."""
        with self._lock:
            try:
                if self.start().forgotten:
                    self._forget()
                link = self.start()
                self._look()
                return request(link)
            except LinkError as error:
                raise self._crash(error, seconds) from error.__cause__
            except Exception as error:
                if self.memory is None:
                    raise
                if not isinstance(error, MemoryError):
                    raise error from None  # of kernels, whose text says all
                printed = "" if self._link is None else self._link.printed
                raise self._crash(LinkError("memory", str(error), printed), seconds) from error
            finally:
                self._forward()

    def _crash(self, error: LinkError, seconds: float | None) -> WorkerCrashError:
        """Report how the process ended, and end it where it has not."""
        crash = WorkerCrashError(error, seconds, self._used, self.memory or 0)
        self._drop()
        return crash

    def _forget(self) -> None:
        """Close unused files; a crash is printed, not raised, as no test caused it."""
        try:
            self.start().ask({"what": "forget"}, (), _END_SECONDS)
        except LinkError as error:
            what = self._crash(error, _END_SECONDS).what
            with contextlib.suppress(OSError, ValueError):  # a closed stderr
                sys.stderr.write(f"edgeq: a worker {what} when its files were closed\n")

    def _look(self) -> None:
        if is_abandoned():
            raise KeyboardInterrupt("the controller of this worker has ended")
        if self._link is not None and self.memory is not None:
            self._used = Memory.of(self._link.pid) or self._used

    def _forward(self) -> None:
        """Forward the output of the process, as it would appear without isolation."""
        printed = b"" if self._link is None else self._link.take_printed()
        if printed:
            with contextlib.suppress(OSError):  # stderr is closed
                os.write(2, printed)

    def kill(self) -> None:
        """Kill the process permanently; its running call fails."""
        self._is_killed = True  # no lock: this may run at any allocation of any thread
        link = self._link
        if link is not None:
            link.kill()

    def _drop(self) -> None:
        link, self._link, self._used = self._link, None, None
        if link is not None:
            link.kill()
            link.close()

    def close(self) -> None:
        """Close the files of the process and end it; the next call starts another one."""
        with self._lock:
            if self._link is not None:
                self._link.close(_END_SECONDS)
                self._forward()
                self._link = None


_workers: dict[int, LocalWorker] = {}


def worker_of(memory: int) -> LocalWorker:
    """Return the worker of this process with a bound on memory; it is shared by all sessions."""
    return _workers.setdefault(memory, LocalWorker(memory))


@atexit.register
def close_workers() -> None:
    """End every worker of this process; the next call of one starts it anew."""
    for each in _workers.values():
        each.close()
