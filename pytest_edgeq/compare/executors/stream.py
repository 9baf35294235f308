"""Run a job on all samples: two chunks per worker in flight, merged in order."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Future, wait
from dataclasses import dataclass, field
from typing import Any

from pytest_edgeq.compare.executors.engines import SampleExecutor
from pytest_edgeq.compare.executors.local_pool import WorkerDiedError
from pytest_edgeq.compare.executors.pickled import packed, pickled
from pytest_edgeq.compare.executors.worker import (
    Answer,
    ExecutorError,
    Job,
    Task,
    release,
    unpacked,
)
from pytest_edgeq.compare.sample_source import SampleSource
from pytest_edgeq.progress import Step

_SECONDS = 0.5  # how long a chunk should take; to send and to merge it takes 1 % of that

_MOST_BYTES = 1 << 22  # of the samples of a chunk, which the client keeps until it is merged
_MOST_SAMPLES = 512  # of a chunk, whatever they cost


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

    start: int
    stop: int
    samples: tuple[bytes, ...] | None
    extra: Any = None
    future: Future[Answer] | None = None
    answer: Answer | None = None
    was_sent_again: bool = False

    @property
    def named(self) -> str:
        """Which samples, for texts."""
        last = self.stop - 1
        return f"sample {self.start}" if last == self.start else f"samples {self.start}…{last}"

    def read(self, source: SampleSource | None) -> Iterator[Any]:
        """Read the samples in this process."""
        if source is not None:
            yield from source.read(range(self.start, self.stop))
        for content in self.samples or ():
            yield pickle.loads(content)


class SampleError(Exception):
    """Reading or measuring a sample failed; all chunks before its own are merged."""

    def __init__(self, error: BaseException, index: int, chunk: Chunk | None) -> None:
        super().__init__(str(error))
        self.error, self.index, self.chunk = error, index, chunk


@dataclass(slots=True)
class Chunks:
    """Chunks of the samples, read when they are asked for."""

    inputs: Iterator[Any] | SampleSource
    on_read: Callable[[Any], None] = lambda sample: None
    next_index: int = 0
    error: Exception | None = None
    _is_over: bool = field(default=False, init=False)

    @property
    def total(self) -> int | None:
        """How many samples there are; None where that is not known."""
        return len(self.inputs) if isinstance(self.inputs, SampleSource) else None

    def take(self, size: int) -> Chunk | None:
        """Return the next chunk, of so many samples at the most; None where there are no more."""
        start = self.next_index
        if isinstance(self.inputs, SampleSource):
            stop = min(start + size, len(self.inputs))
            self.next_index = stop
            return Chunk(start, stop, None) if stop > start else None
        if self._is_over:
            return None
        samples: list[bytes] = []
        n_bytes = 0
        while len(samples) < size and n_bytes < _MOST_BYTES:
            try:
                sample = next(self.inputs)
            except StopIteration:
                self._is_over = True
                break
            except Exception as error:  # raised once the samples before have been measured
                self._is_over, self.error = True, error
                break
            self.on_read(sample)
            samples.append(packed(sample, start + len(samples)))
            n_bytes += len(samples[-1])
            del sample  # before the next one is made
        self.next_index = start + len(samples)
        return Chunk(start, self.next_index, tuple(samples)) if samples else None


_IN_FLIGHT = 2  # chunks a worker: one that it measures, and one that waits there
_UNMERGED = 4  # chunks a worker that are in flight, or done before an earlier one


class Stream:
    """One job on all samples."""

    def __init__(self, engine: SampleExecutor, model: bytes, job: Job, step: Step) -> None:
        fix = "let it open files when it is called, and hold paths, not handles or generators"
        content = pickled(job, job.what, fix)
        self._engine, self._step = engine, step
        self._model, self._job = engine.share(model), engine.share(content)
        self._seconds: float | None = None
        self.machines: set[str] = set()

    def run(
        self,
        chunks: Chunks,
        merge: Callable[[Chunk, Any], None],
        extra: Callable[[], Any] = lambda: None,
    ) -> None:
        """Merge the results of all samples in order, or raise a SampleError or an ExecutorError."""
        sent: deque[Chunk] = deque()
        try:
            while True:
                self._fill(sent, chunks, extra)
                if not sent:
                    break
                self._wait(sent)
                while sent and sent[0].answer is not None:
                    self._merge(sent.popleft(), merge)
        finally:
            for chunk in sent:
                if chunk.future is not None:
                    chunk.future.cancel()
            self._step.in_flight = 0
        if chunks.error is not None:
            raise SampleError(chunks.error, chunks.next_index, None)

    def _fill(self, sent: deque[Chunk], chunks: Chunks, extra: Callable[[], Any]) -> None:
        workers = max(self._engine.workers, 1)
        in_flight = sum(each.answer is None for each in sent)
        while in_flight < _IN_FLIGHT * workers and len(sent) < _UNMERGED * workers:
            left = None if chunks.total is None else chunks.total - chunks.next_index
            chunk = chunks.take(chunk_size(self._seconds, left, workers))
            if chunk is None:
                break
            chunk.extra = extra()
            sent.append(chunk)
            self._submit(chunk)
            in_flight += 1
        self._step.in_flight = in_flight

    def _submit(self, chunk: Chunk, *, with_content: bool = False) -> None:
        model, job = self._model, self._job
        place = chunk.start, chunk.stop, chunk.samples, chunk.extra
        task = Task(release(), model.key, job.key, *place)
        try:
            chunk.future = self._engine.submit(task, model, job, with_content=with_content)
        except BrokenExecutor as error:
            raise ExecutorError(
                f"executor: {chunk.named}: expected what a worker measured, but the pool broke "
                f"while these and others were measured: {type(error).__name__}: {error}\n"
                "cause: a worker died, and this kind of executor does not go on then\n"
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
                f"executor: {chunk.named}: expected an executor that takes tasks, got "
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
            count = chunk.stop - chunk.start
            seconds = answer.seconds / count
            # The first chunk of a process opens the model and is slow; the latest counts most.
            self._seconds = seconds if self._seconds is None else (self._seconds + seconds) / 2
            self._step.advance(count)

    def _merge(self, chunk: Chunk, merge: Callable[[Chunk, Any], None]) -> None:
        answer = chunk.answer
        assert answer is not None, "unreachable because the chunk is done"
        failure = answer.failure
        if failure is None:
            merge(chunk, pickle.loads(answer.content))
            return
        where = None if failure.is_reading else chunk
        raise SampleError(unpacked(failure), failure.index, where)

    def _send_again(self, chunk: Chunk, error: Exception) -> None:
        """Send a chunk once more whose worker died."""
        if lacking := _lacking(error):
            raise ExecutorError(
                f"executor: {chunk.named}: expected a worker that reads its task, got "
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
                f"executor: {chunk.named}: expected what a worker measured, got {said}"
            ) from error
        if chunk.was_sent_again or is_given_up:
            raise ExecutorError(_all_died(chunk, error, said)) from error
        chunk.was_sent_again = True
        self._submit(chunk)


def _all_died(chunk: Chunk, error: Exception, said: str) -> str:
    worker = getattr(error, "last_worker", "")
    if isinstance(error, WorkerDiedError):
        worker = f"process {error.pid}, exit code {error.exitcode}"
    where = f" (the last one: {worker})" if worker else ""
    others = ", or on others in flight" if isinstance(error, BrokenExecutor) else ""
    return (
        f"executor: {chunk.named}: expected what a worker measured, but each worker that ran them "
        f"died{where}: {said}\n"
        f"cause: the file, a runtime or the reference ends the process on these samples{others}, "
        "or the machine has too little memory\n"
        f"fix: measure {chunk.named} in this process, without an executor, to see it"
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
