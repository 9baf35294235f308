"""
The engines that run tasks: any executor, and what is known of some of them.

An engine says how many tasks can run at a time, and brings parcels to the workers.
"""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import Executor, Future
from typing import Any

from pytest_edgeq.executors.parcel import Label, Parcel, Shelf
from pytest_edgeq.executors.tasks import Answer, Task
from pytest_edgeq.executors.worker import run_chunk
from pytest_edgeq.parallel import available_cores

__all__ = ["DaskEngine", "Engine", "engine_for"]

_REFRESH_SECONDS = 5.0
"""After so many the number of a cluster's workers is asked for again."""


class Engine:
    """
    Any `concurrent.futures.Executor`.

    Workers of this machine read parcels from a directory; others say that they lack them, and are
    sent them with a task.

    Args:
        executor: Runs the tasks.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self._shelf = Shelf()

    @property
    def workers(self) -> int:
        """How many tasks can run at a time; the cores of this machine where nobody knows."""
        for name in ("num_workers", "_max_workers"):  # mpi4py's; that of the standard library
            number = getattr(self.executor, name, None)
            if isinstance(number, int) and number > 0:
                return number
        return available_cores()

    def label(self, parcel: Parcel) -> Label:
        """Make a parcel known to the workers."""
        return self._shelf.label(parcel)

    def submit(self, task: Task) -> Future[Answer]:
        """Run a task."""
        return self.executor.submit(run_chunk, task)

    def renew(self) -> bool:
        """Return whether the executor runs tasks again behind one that broke it."""
        renew = getattr(self.executor, "renew", None)
        if renew is not None:
            renew()
            return True
        if type(self.executor).__module__ == "loky.reusable_executor":
            from loky import get_reusable_executor

            self.executor = get_reusable_executor(max_workers=self.workers)
            return True
        return False

    def close(self) -> None:
        """Let go of the parcels; the executor is the user's."""
        self._shelf.close()


class DaskEngine(Engine):
    """
    dask.distributed: parcels are scattered to all workers, and later ones get them from these.

    Args:
        executor: Of `Client.get_executor()`.
    """

    def __init__(self, executor: Any) -> None:
        super().__init__(executor)
        self._client = executor._client
        self._scattered: dict[str, Any] = {}
        self._workers = (0, -_REFRESH_SECONDS)

    @property
    def workers(self) -> int:
        """How many threads the cluster has."""
        count, asked = self._workers
        if time.monotonic() - asked > _REFRESH_SECONDS:
            count = sum(self._client.nthreads().values())
            self._workers = count, time.monotonic()
        return max(count, 1)

    def label(self, parcel: Parcel) -> Label:
        """Scatter a parcel, once."""
        known = self._scattered.get(parcel.key)
        if known is None or known.status not in ("finished", "pending"):
            self._scattered[parcel.key] = self._client.scatter(parcel.content, broadcast=True)
        return Label(parcel.key, "")

    def submit(self, task: Task) -> Future[Answer]:
        """Run a task on a worker, which has the parcels by then."""
        parcels = [self._scattered[each.key] for each in (task.model, task.job)]
        return self.executor.submit(run_chunk, task, *parcels)

    def renew(self) -> bool:
        """Scatter anew what went with the workers that had it."""
        self._scattered.clear()
        return True

    def close(self) -> None:
        """Let the cluster forget the parcels."""
        super().close()
        with contextlib.suppress(Exception):  # of a cluster that is gone
            self._scattered.clear()


def engine_for(executor: Executor) -> Engine:
    """Return the engine of an executor."""
    is_dask = type(executor).__module__.startswith("distributed.")
    return DaskEngine(executor) if is_dask and hasattr(executor, "_client") else Engine(executor)
