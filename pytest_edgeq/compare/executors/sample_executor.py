"""Run tasks on an executor, and distribute the data that all tasks of a job share."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import time
import weakref
from concurrent.futures import BrokenExecutor, Executor, Future
from pathlib import Path
from typing import Any, NamedTuple

from pytest_edgeq.compare.executors.worker import Answer, ExecutorError, Task, run_chunk
from pytest_edgeq.runtimes.workers.settings import available_cores

_REFRESH_SECONDS = 5.0  # after so many the number of a cluster's workers is asked for again
_NOBODY_SECONDS = 60.0  # how long a cluster may have no worker


class Shared(NamedTuple):
    """A pickle that many tasks share, and its SHA-256."""

    key: str
    content: bytes


class SampleExecutor:
    """Any executor; workers of this machine read shared pickles from a private directory."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self._places: dict[str, Any] = {}  # a file or dask data by key
        self._folder = Path(tempfile.mkdtemp(prefix="edgeq-executor-"))
        self.close = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)

    @property
    def workers(self) -> int:
        """Number of tasks that can run in parallel; the cores of this machine if unknown."""
        for name in ("num_workers", "_max_workers"):  # mpi4py's; that of the standard library
            number = getattr(self.executor, name, None)
            if isinstance(number, int) and number > 0:
                return number
        return available_cores()

    def share(self, content: bytes) -> Shared:
        """Make a pickle available to the workers, once."""
        key = hashlib.sha256(content).hexdigest()
        if key not in self._places:
            self._places[key] = self._put(key, content)
        return Shared(key, content)

    def _put(self, key: str, content: bytes) -> Any:
        path = self._folder / key
        path.write_bytes(content)
        return str(path)

    def submit(
        self, task: Task, model: Shared, job: Shared, *, with_content: bool
    ) -> Future[Answer]:
        """Run a task; with the pickles themselves for a worker that cannot read the files."""
        shared = [each.content if with_content else self._places[each.key] for each in (model, job)]
        try:
            return self.executor.submit(run_chunk, task, *shared)
        except BrokenExecutor:
            if type(self.executor).__module__ != "loky.reusable_executor":
                raise
            from loky import get_reusable_executor

            self.executor = get_reusable_executor(max_workers=self.workers)
            return self.executor.submit(run_chunk, task, *shared)


class DaskSampleExecutor(SampleExecutor):
    """dask.distributed, which scatters shared pickles; the executor is `Client.get_executor()`."""

    def __init__(self, executor: Any) -> None:
        super().__init__(executor)
        self._dask, self._client = executor, executor._client
        self._workers, self._asked = 0, 0.0
        self._seen = time.monotonic()

    @property
    def workers(self) -> int:
        """How many threads the cluster has, or raise an ExecutorError."""
        now = time.monotonic()
        if not self._workers or now - self._asked > _REFRESH_SECONDS:
            self._workers, self._asked = self._count(), now
        if self._workers:
            self._seen = now
        elif now - self._seen >= _NOBODY_SECONDS:
            raise ExecutorError(
                f"executor: expected workers of {self._client.scheduler.address}, got none for "
                f"{_NOBODY_SECONDS:.0f} s\n"
                "cause: no worker has joined the scheduler, or all have ended: one that lacks "
                "pytest-edgeq ends with its first task\n"
                f"fix: dask worker {self._client.scheduler.address}, where the client's release of "
                "pytest-edgeq is installed"
            )
        return self._workers

    def _count(self) -> int:
        try:
            return sum(self._client.nthreads().values())
        except (OSError, TimeoutError) as error:
            raise ExecutorError(
                f"executor: expected an answer of the scheduler {self._client.scheduler.address}, "
                f"got {type(error).__name__}: {error}\n"
                "cause: it has ended, or the network to it is down"
            ) from error

    def share(self, content: bytes) -> Shared:
        """Scatter a pickle to all workers, once."""
        self._seen = time.monotonic()
        while not self.workers:
            time.sleep(0.2)
        return super().share(content)

    def _put(self, key: str, content: bytes) -> Any:
        return self._client.scatter(content, broadcast=True, hash=False)

    def submit(
        self, task: Task, model: Shared, job: Shared, *, with_content: bool
    ) -> Future[Answer]:
        """Run a task; scatter shared data again if all workers that had them are lost."""
        del with_content
        for each in (model, job):
            if self._places[each.key].status not in ("finished", "pending"):
                self._places[each.key] = self._put(each.key, each.content)
        places = [self._places[each.key] for each in (model, job)]
        # Pure calls that are equal are one call for dask, and a chunk may be sent again.
        future: Future[Answer] = self._dask.submit(run_chunk, task, *places, pure=False)
        return future


def sample_executor_for(executor: Executor) -> SampleExecutor:
    """Return the engine of an executor."""
    is_dask = type(executor).__module__.startswith("distributed.")
    kind = DaskSampleExecutor if is_dask and hasattr(executor, "_client") else SampleExecutor
    return kind(executor)
