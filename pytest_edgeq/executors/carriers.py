"""
The engines that run tasks: any executor, and what is known of some of them.

An engine says how many tasks can run at a time, and brings parcels to the workers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import uuid
from concurrent.futures import Executor, Future
from typing import Any

from pytest_edgeq.executors.parcel import Label, Parcel, Shelf
from pytest_edgeq.executors.tasks import Answer, ExecutorError, Task
from pytest_edgeq.executors.worker import run_chunk, run_on_dask
from pytest_edgeq.parallel import available_cores

_REFRESH_SECONDS = 5.0
"""After so many the number of a cluster's workers is asked for again."""

_NOBODY_SECONDS = 60.0
"""How long a cluster may have no worker."""

_MOST_IN_A_TASK = 1 << 16
"""Bytes of a parcel that goes with a task, by the scheduler; a larger one is scattered."""


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

    def heard(self, answer: Answer) -> None:
        """Note that a worker has answered."""

    def resend(self) -> None:
        """Send parcels again, to another worker: the one that was sent them may hang."""

    def renew(self) -> bool:
        """Return whether the executor runs tasks again behind one that broke it."""
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
    dask.distributed: a large parcel is scattered, and workers that lack it get it from each other.

    Tasks do not depend on parcels that their workers have: dask keeps data that nobody waits for on
    one worker alone, which may be slow, or hang.

    Args:
        executor: Of `Client.get_executor()`.
    """

    def __init__(self, executor: Any) -> None:
        super().__init__(executor)
        self._client = executor._client
        self._scattered: dict[str, Any] = {}
        self._workers = (0, -_REFRESH_SECONDS)
        self._seen = time.monotonic()
        self._place = ""

    @property
    def workers(self) -> int:
        """
        How many threads the cluster has; 1 while there is none.

        Raises:
            ExecutorError: There has been none for a minute, or the scheduler is gone.
        """
        count, asked = self._workers
        now = time.monotonic()
        if now - asked > _REFRESH_SECONDS:
            count = self._count()
            if asked < 0 or count:
                self._seen = now
            self._workers = count, now
        if not count and now - self._seen > _NOBODY_SECONDS:
            raise ExecutorError(
                f"executor: expected workers of {self._client.scheduler.address}, got none for "
                f"{_NOBODY_SECONDS:.0f} s\n"
                "cause: no worker has joined the scheduler, or all have ended: one that lacks "
                "pytest-edgeq ends with its first task\n"
                f"fix: dask worker {self._client.scheduler.address}, where the client's release of "
                "pytest-edgeq is installed"
            )
        return max(count, 1)

    def _count(self) -> int:
        try:
            return sum(self._client.nthreads().values())
        except (OSError, TimeoutError) as error:
            raise ExecutorError(
                f"executor: expected an answer of the scheduler {self._client.scheduler.address}, "
                f"got {type(error).__name__}: {error}\n"
                "cause: it has ended, or the network to it is down"
            ) from error

    def label(self, parcel: Parcel) -> Label:
        """Return the label of a parcel, which is sent to workers that say that they lack it."""
        return Label(parcel.key, "")

    def submit(self, task: Task) -> Future[Answer]:
        """Run a task on a worker, which has the parcels that are attached by then."""
        model, scattered_model = self._carried(task.model)
        job, scattered_job = self._carried(task.job)
        task = dataclasses.replace(task, model=model, job=job)
        # dask takes equal calls for one, but a second run of a late chunk has to be one of its own.
        name = uuid.uuid4().hex
        return self.executor.submit(run_on_dask, name, task, scattered_model, scattered_job)

    def _carried(self, label: Label) -> tuple[Label, Any]:
        """Return a label as it goes with a task, and what dask brings to its worker."""
        if label.content is None or len(label.content) <= _MOST_IN_A_TASK:
            return label, None
        known = self._scattered.get(label.key)
        bare = dataclasses.replace(label, content=None)
        if known is None or known.status not in ("finished", "pending"):
            place, self._place = self._place, ""
            if not place:
                return bare, None  # whoever runs the task answers that it lacks it
            try:
                # To one that has just answered. With a name of its own, as what hangs has another.
                known = self._client.scatter(label.content, workers=[place], hash=False)
            except (OSError, KeyError, TimeoutError):  # of a worker that has gone by now
                return bare, None
            self._scattered[label.key] = known
        return bare, known

    def heard(self, answer: Answer) -> None:
        """Note which worker is there to take what is scattered next."""
        self._place = answer.place

    def resend(self) -> None:
        """Scatter anew, to another worker than one that may hang."""
        self._scattered.clear()

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
