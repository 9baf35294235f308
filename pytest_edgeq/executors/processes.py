"""The embedded pool: processes of this machine, spawned, that the death of one does not break."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

__all__ = ["SpawnedPool"]

# A user's test shows the user's line and the message, not how we came to it.
__tracebackhide__ = True


class SpawnedPool(Executor):
    """
    Pebble's pool as an executor, started with the first task.

    A process that dies fails its own task alone, and another one takes its place. Processes end
    with this one, however it ends.

    Args:
        processes: How many.
    """

    def __init__(self, processes: int) -> None:
        self._max_workers = processes
        self._pool: Any = None

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a function in one of the processes."""
        if self._pool is None:
            from pebble import ProcessPool

            # Not forked: torch has threads.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPool(
                self._max_workers, initializer=_end_with_parent, context=context
            )
        future: Future[Any] = self._pool.schedule(fn, args, kwargs)
        return future

    def renew(self) -> None:
        """Start anew behind a pool that broke."""
        self._end()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the processes; what has not been done by then is not done."""
        del wait, cancel_futures
        self._end()

    def _end(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.stop()
            pool.join()


def _end_with_parent() -> None:
    """End this process as soon as the one that started it has ended, be it killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "unreachable because the pool starts processes"

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, name="edgeq-parent", daemon=True).start()
