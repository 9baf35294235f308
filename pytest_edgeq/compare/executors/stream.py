"""Run a job on all samples: two chunks per worker in flight, merged in order."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Future, wait
from dataclasses import dataclass
from typing import Any

from pytest_edgeq.compare.executors.local_pool import WorkerDiedError
from pytest_edgeq.compare.executors.pickled import pickled
from pytest_edgeq.compare.executors.sample_executor import SampleExecutor
from pytest_edgeq.compare.executors.worker import (
    Answer,
    ExecutorError,
    Job,
    Task,
    release,
    unpacked,
)
from pytest_edgeq.progress import Step

_SECONDS = 0.5  # how long a chunk should take; to send and to merge it takes 1 % of that

_MOST_BYTES = 1 << 22  # of the samples of a chunk, which the client keeps until it is merged
_MOST_SAMPLES = 512  # of a chunk, whatever they cost
_FIX = "give tensors, arrays, numbers, or objects that can be pickled"


def chunk_size(seconds: float | None, left: int | None, workers: int) -> int:
    """Return the number of samples of the next chunk."""
    if seconds is None:
        return 1
    size = _MOST_SAMPLES if not seconds else min(_MOST_SAMPLES, int(_SECONDS / seconds))
    if left is not None:
        size = min(size, -(-left // (2 * workers)))
    return max(size, 1)


@dataclass(slots=True, eq=False)
class Chunk:
    """Samples that are measured together; their pickles, unless the workers read them."""

    task: Task
    future: Future[Answer] | None = None
    answer: Answer | None = None
    was_sent_again: bool = False


class SampleError(Exception):
    """Reading or measuring a sample failed; all chunks before its own are merged."""

    def __init__(self, error: BaseException, index: int, task: Task | None) -> None:
        super().__init__(str(error))
        self.error, self.index, self.task = error, index, task


_IN_FLIGHT = 2  # chunks a worker: one that it measures, and one that waits there
_UNMERGED = 4  # chunks a worker that are in flight, or done before an earlier one


class Stream:
    """One job on all samples, or on those from the next index on."""

    def __init__(
        self,
        engine: SampleExecutor,
        model: bytes,
        job: Job,
        items: Iterator[Any],  # read only if the job has no source
        step: Step,
        *,
        what: str,
        on_read: Callable[[Any], None],
        next_index: int,
    ) -> None:
        fix = "let it open files when it is called, and hold paths, not handles or generators"
        content = pickled(job, what, fix)
        self._engine, self._step, self._source = engine, step, job.source
        self._model, self._job = engine.share(model), engine.share(content)
        self._items: Iterator[Any] | None = items
        self._on_read, self._next_index = on_read, next_index
        self._error: Exception | None = None  # of reading, raised after the samples before
        self._seconds: float | None = None
        self.machines: set[str] = set()

    def run(self, merge: Callable[[Any], None], extra: Callable[[], Any]) -> None:
        """Merge the results of all samples in order, or raise a SampleError or an ExecutorError."""
        sent: deque[Chunk] = deque()
        try:
            while True:
                self._fill(sent, extra)
                if not sent:
                    break
                self._wait(sent)
                while sent and (answer := sent[0].answer) is not None:
                    task, failure = sent.popleft().task, answer.failure
                    if failure is not None:
                        where = None if failure.is_reading else task
                        raise SampleError(unpacked(failure), failure.index, where)
                    merge(pickle.loads(answer.content))
        finally:
            for chunk in sent:
                if chunk.future is not None:
                    chunk.future.cancel()
            self._step.in_flight = 0
        if self._error is not None:
            raise SampleError(self._error, self._next_index, None)

    def _fill(self, sent: deque[Chunk], extra: Callable[[], Any]) -> None:
        workers = max(self._engine.workers, 1)
        in_flight = sum(each.answer is None for each in sent)
        while in_flight < _IN_FLIGHT * workers and len(sent) < _UNMERGED * workers:
            left = None if self._source is None else len(self._source) - self._next_index
            start, size = self._next_index, chunk_size(self._seconds, left, workers)
            samples = self._read(size) if left is None else None
            stop = start + (len(samples) if samples is not None else min(size, left or 0))
            if start == stop:
                break
            self._next_index = stop
            keys = self._model.key, self._job.key
            chunk = Chunk(Task(release(), *keys, start, stop, samples, extra()))
            sent.append(chunk)
            self._submit(chunk)
            in_flight += 1
        self._step.in_flight = in_flight

    def _read(self, size: int) -> tuple[bytes, ...]:
        """Return the pickles of the next samples; none at the end."""
        samples: list[bytes] = []
        n_bytes = 0
        while self._items is not None and len(samples) < size and n_bytes < _MOST_BYTES:
            try:
                sample = next(self._items)
            except StopIteration:
                self._items = None
                break
            except Exception as error:  # raised once the samples before have been measured
                self._items, self._error = None, error
                break
            self._on_read(sample)
            what = f"sample {self._next_index + len(samples)}, or its label,"
            samples.append(pickled(sample, what, _FIX, clones_views=True))
            n_bytes += len(samples[-1])
            del sample  # before the next one is made
        return tuple(samples)

    def _submit(self, chunk: Chunk, *, with_content: bool = False) -> None:
        task, shared = chunk.task, (self._model, self._job)
        try:
            chunk.future = self._engine.submit(task, *shared, with_content=with_content)
        except BrokenExecutor as error:
            raise ExecutorError(
                f"executor: {task.named}: expected a worker's result, but the pool broke while "
                f"measuring these and others: {type(error).__name__}: {error}\n"
                "cause: a worker died, and this kind of executor does not recover\n"
                "fix: --edgeq-executor=processes:N, loky and dask start another worker, and "
                "run its samples there"
            ) from error
        except Exception as error:  # of whatever the executor is
            way_out = (
                "use fewer processes, or a machine that can start more"
                if isinstance(error, OSError)
                else "pass one that has not been shut down"
            )
            raise ExecutorError(
                f"executor: {task.named}: expected an executor that accepts tasks, got "
                f"{type(error).__name__}: {error}\n"
                f"fix: {way_out}"
            ) from error

    def _wait(self, sent: deque[Chunk]) -> None:
        """Wait until a chunk is done, or for a second."""
        waiting = {each.future: each for each in sent if each.answer is None and each.future}
        done, _ = wait(waiting, timeout=1.0, return_when=FIRST_COMPLETED)
        for future, chunk in waiting.items():
            if future in done:
                self._receive(chunk)

    def _receive(self, chunk: Chunk) -> None:
        assert chunk.future is not None, "unreachable because the chunk was sent"
        try:
            answer = chunk.future.result()
        except Exception as error:  # of whatever the executor is
            self._send_again(chunk, error)
            return
        if answer.lacks_shared:
            self._submit(chunk, with_content=True)
            return
        chunk.answer = answer
        self.machines.add(answer.machine)
        if answer.failure is None:
            count = chunk.task.stop - chunk.task.start
            seconds = answer.seconds / count
            # The first chunk of a process opens the model and is slow; the latest counts most.
            self._seconds = seconds if self._seconds is None else (self._seconds + seconds) / 2
            self._step.advance(count)

    def _send_again(self, chunk: Chunk, error: Exception) -> None:
        """Send a chunk once more whose worker died."""
        named = chunk.task.named
        if lacking := _lacking(error):
            raise ExecutorError(
                f"executor: {named}: expected a worker that reads its task, got "
                f"{lacking}\n"
                "fix: install there what the client has, in the same releases: pytest-edgeq, "
                "and what the reference, the metric or the factory needs"
            ) from error
        said = f"{type(error).__name__}: {error}"
        is_given_up = type(error).__name__ == "KilledWorker"  # dask has sent it several times
        if not (
            is_given_up or isinstance(error, (WorkerDiedError, BrokenExecutor, CancelledError))
        ):
            raise ExecutorError(
                f"executor: {named}: expected a worker's result, got {said}"
            ) from error
        if chunk.was_sent_again or is_given_up:
            raise ExecutorError(_all_died(named, error, said)) from error
        chunk.was_sent_again = True
        self._submit(chunk)


def _all_died(named: str, error: Exception, said: str) -> str:
    worker = getattr(error, "last_worker", "")
    if isinstance(error, WorkerDiedError):
        worker = f"process {error.pid}, exit code {error.exitcode}"
    where = f" (the last one: {worker})" if worker else ""
    others = ", or on others in flight" if isinstance(error, BrokenExecutor) else ""
    return (
        f"executor: {named}: expected a worker's result, but each worker that ran them "
        f"died{where}: {said}\n"
        f"cause: the file, a runtime or the reference ends the process on these samples{others}, "
        "or the machine has too little memory\n"
        f"fix: measure {named} in this process, without an executor, to see it"
    )


def _lacking(error: BaseException) -> str:
    """Return the ImportError of a worker as text; empty if the error has another cause."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ImportError):
            return f"{type(cause).__name__}: {cause}"
        for line in str(cause).splitlines():  # of a traceback, which loky attaches
            if line.startswith(("ModuleNotFoundError: ", "ImportError: ")):
                return line
        cause = cause.__cause__
    return ""
