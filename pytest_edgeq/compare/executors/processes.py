"""
The embedded pool: processes of this machine, each with a pipe of its own.

Nothing is shared between the processes. One that is killed, by the OOM killer for instance, may
hold a lock or have written half of a message; with queues or locks in common the others would wait
for it for ever.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import queue
import signal
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import Any

# Not forked: torch has threads.
_SPAWN = multiprocessing.get_context("spawn")

_BEFORE_JOINING = 10
"""Priority of a finalizer that runs at exit before multiprocessing waits for its processes."""


class WorkerDiedError(RuntimeError):
    """
    A process ended while it ran a task.

    Attributes:
        pid: Its id.
        exitcode: As `Process.exitcode`: minus the signal's number where one ended it.
    """

    def __init__(self, pid: int | None, exitcode: int | None) -> None:
        super().__init__(f"process {pid} ended with exit code {exitcode}")
        self.pid, self.exitcode = pid, exitcode


class WorkerTracebackError(Exception):
    """The cause of an error that a task raised: its traceback in the process, as text."""


class SpawnedPool(Executor):
    """
    Processes that run one task each at a time, started with the first task.

    A process that dies fails its own task alone, and another one takes its place. Processes end
    with this one, however it ends.
    """

    def __init__(self, processes: int) -> None:
        self._max_workers = processes
        self._lock = threading.Lock()
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._workers = [_Worker() for _ in range(processes)]
        self._started = 0
        # Also at exit, and where nobody holds the pool any more.
        self._end = Finalize(self, _end, (self._tasks, self._workers), exitpriority=_BEFORE_JOINING)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """
        Run a function in one of the processes.

        Raises:
            RuntimeError: The pool is shut down.
        """
        task = _Task(Future(), fn, args, kwargs)
        with self._lock:
            if not self._end.still_active():
                raise RuntimeError("cannot run a task: the pool is shut down")
            for worker in self._workers[self._started :]:
                worker.start(self._tasks)
                self._started += 1
            self._tasks.put(task)
        return task.future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the processes; what has not been done by then is not done."""
        del wait, cancel_futures
        with self._lock:
            self._end()


def _end(tasks: queue.SimpleQueue[_Task | None], workers: list[_Worker]) -> None:
    with contextlib.suppress(queue.Empty):  # until no task waits
        while True:
            task = tasks.get_nowait()
            if task is not None:
                task.future.cancel()
    for _ in workers:
        tasks.put(None)
    for worker in workers:
        worker.end()


@dataclass(slots=True)
class _Task:
    future: Future[Any]
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run_in(self, worker: _Worker) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = worker.run((self.function, self.args, self.kwargs))
        except BaseException as error:  # as executors do
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class _Worker:
    """A process and the thread of this one that waits for it."""

    def __init__(self) -> None:
        # A pool may be collected, and so ended, at any allocation.
        self._lock = threading.RLock()
        self._is_ended = False
        self._process: Any = None
        self._pipe: Connection | None = None

    def start(self, tasks: queue.SimpleQueue[_Task | None]) -> None:
        """Start the process, and the thread that gives it tasks."""
        self._start_process()
        name = "edgeq-worker"
        threading.Thread(target=self._serve, args=(tasks,), name=name, daemon=True).start()

    def _start_process(self) -> None:
        with self._lock:
            if self._is_ended:
                raise RuntimeError("the pool is shut down")
            ours, theirs = _SPAWN.Pipe()
            process = _SPAWN.Process(target=_serve_parent, args=(theirs,))
            with theirs:  # closed, so that the end of the process is the end of the pipe
                process.start()
            # Only now: one that could not be started can neither be killed nor waited for.
            self._process, self._pipe = process, ours

    def _serve(self, tasks: queue.SimpleQueue[_Task | None]) -> None:
        while (task := tasks.get()) is not None:
            task.run_in(self)
            del task  # the result is the caller's alone

    def run(self, call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]) -> Any:
        """
        Call a function in the process.

        Raises:
            WorkerDiedError: The process ended meanwhile; the next call starts another one.
            Exception: What the function raised, or what cannot be pickled.
        """
        content = pickle.dumps(call)
        if self._pipe is None:
            self._start_process()
        assert self._pipe is not None, "unreachable because the process is started"
        try:
            self._pipe.send_bytes(content)
            del content
            answer = self._pipe.recv_bytes()
        except (EOFError, OSError):
            raise self._died() from None
        result, told = pickle.loads(answer)
        if told is None:
            return result
        raise result from WorkerTracebackError(f"\n{told}")

    def _died(self) -> WorkerDiedError:
        with self._lock:
            assert self._pipe is not None, "unreachable because a task was running"
            self._process.kill()  # it may have closed its side and live
            self._process.join()
            self._pipe.close()
            self._pipe = None
            return WorkerDiedError(self._process.pid, self._process.exitcode)

    def end(self) -> None:
        """End the process; what it runs fails."""
        with self._lock:
            self._is_ended = True
            if self._process is not None:
                self._process.kill()
                self._process.join()


def _serve_parent(pipe: Connection) -> None:
    """Run what comes by the pipe until the other side has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group
    parent = multiprocessing.parent_process()
    assert parent is not None, "unreachable because the pool starts processes"

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, name="edgeq-parent", daemon=True).start()
    with contextlib.suppress(EOFError, OSError):  # the other side has closed the pipe
        while True:
            pipe.send_bytes(_answer(pipe.recv_bytes()))


def _answer(content: bytes) -> bytes:
    """Return the pickled pair of a result and None, or of an error and its traceback."""
    try:
        function, args, kwargs = pickle.loads(content)
        del content
        return pickle.dumps((function(*args, **kwargs), None))
    except Exception as error:
        told = traceback.format_exc()
        try:
            answer = pickle.dumps((error, told))
            pickle.loads(answer)
        except Exception:  # whatever its class does when it is copied
            error = RuntimeError(f"{type(error).__name__}: {error}")
            answer = pickle.dumps((error, told))
        return answer
