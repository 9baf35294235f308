"""The embedded pool: workers of this machine behind `concurrent.futures`."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

from pytest_edgeq.runtimes.workers.crash_report import WorkerCrashError
from pytest_edgeq.runtimes.workers.link import LinkError
from pytest_edgeq.runtimes.workers.local_worker import LocalWorker


class WorkerDiedError(RuntimeError):
    """A process ended while it ran a task."""

    def __init__(self, pid: int | None, exitcode: int) -> None:
        super().__init__(f"process {pid} ended with exit code {exitcode}")
        self.pid, self.exitcode = pid, exitcode


class LocalPool(Executor):
    """
    Processes that run one task each at a time, each started with a task.

    A process that dies fails its own task alone. They share nothing, as one that is killed may hold
    a lock or have written half of a message.
    """

    def __init__(self, processes: int) -> None:
        self._max_workers = processes
        self._lock = threading.Lock()
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._workers = [LocalWorker() for _ in range(processes)]
        self._started = 0
        # Also at exit, and where nobody holds the pool any more.
        self._end = weakref.finalize(self, _end, self._tasks, self._workers)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a function in one of the processes."""
        task: _Task = (Future(), partial(fn, *args, **kwargs))
        with self._lock:
            if not self._end.alive:
                raise RuntimeError("cannot run a task: the pool is shut down")
            for worker in self._workers[self._started : self._started + 1]:
                try:
                    worker.start()
                except LinkError as error:
                    raise error.__cause__ or error from None
                name, arguments = "edgeq-pool", (self._tasks, worker)
                threading.Thread(target=_serve, args=arguments, name=name, daemon=True).start()
                self._started += 1
            self._tasks.put(task)
        return task[0]

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the processes; pending tasks are dropped."""
        del wait, cancel_futures
        with self._lock:
            self._end()


_Task = tuple[Future[Any], Callable[[], Any]]


def _end(tasks: queue.SimpleQueue[_Task | None], workers: list[LocalWorker]) -> None:
    with contextlib.suppress(queue.Empty):  # until no task waits
        while True:
            task = tasks.get_nowait()
            if task is not None:
                task[0].cancel()
    for worker in workers:
        tasks.put(None)
        worker.kill()


def _serve(tasks: queue.SimpleQueue[_Task | None], worker: LocalWorker) -> None:
    while (task := tasks.get()) is not None:
        _run(worker, *task)
        del task  # the result is the caller's alone
    worker.close()


def _run(worker: LocalWorker, future: Future[Any], function: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = worker.call(None, function)
    except WorkerCrashError as error:
        if error.__cause__ is not None:  # it cannot be started
            future.set_exception(error.__cause__)
            return
        future.set_exception(WorkerDiedError(error.pid, error.code or 0))
        with contextlib.suppress(OSError, ValueError):  # a closed stderr
            sys.stderr.write(error.printed)
    except BaseException as error:  # as executors do
        future.set_exception(error)
    else:
        future.set_result(result)
