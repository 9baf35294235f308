"""
Run a job on all samples by an engine, and hand on what was measured.

Chunks in flight are bounded, two a worker, so that the client's memory does not grow with the
number of samples. A chunk whose worker died is run again elsewhere; what takes much longer than it
should is run a second time, and the first answer counts.
"""

from __future__ import annotations

import dataclasses
import pickle
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from dataclasses import dataclass, field
from typing import Any

from pytest_edgeq.executors.carriers import Engine
from pytest_edgeq.executors.chunks import Chunk, Chunks, SampleError, chunk_size
from pytest_edgeq.executors.machines import gathered
from pytest_edgeq.executors.parcel import Label, Parcel
from pytest_edgeq.executors.tasks import (
    Answer,
    ExecutorError,
    Failure,
    Task,
    release,
    unpacked,
)
from pytest_edgeq.numerics.machine import Machine
from pytest_edgeq.progress import Step

_IN_FLIGHT = 2
"""Chunks a worker: one that it measures, and one that waits there."""

_AHEAD = 8
"""Chunks a worker that may be done before an earlier one, where they are folded in order."""

_AGAIN = 2
"""How often a chunk is run again when its worker dies."""

_MOST_LOSSES = 10
"""How often a chunk is begun anew because the workers that had the model died before it ran."""

_LATE = 4.0
"""How many times as long as expected a chunk takes before it is run a second time, too."""

_LATE_SECONDS = 5.0
"""Seconds that it has in any case: a worker that has just started loads torch and the model."""

_FIRST_SECONDS = 60.0
"""Seconds that it has while no chunk is done, and nothing is known of what a sample takes."""

_DEATHS = frozenset({"WorkerDiedError", "BrokenExecutor", "KilledWorker"})
"""Classes of exceptions by which engines say that a worker died."""


@dataclass(slots=True, eq=False)
class Stream:
    """
    One job on all samples.

    Attributes:
        engine: Runs the tasks.
        model: The model's parcel.
        job: The job's parcel.
        step: Told of the progress.
        in_order: Whether chunks are folded in the order of the samples.
        sent: How many parcels were attached to tasks.
    """

    engine: Engine
    model: Parcel
    job: Parcel
    step: Step
    in_order: bool = False
    sent: int = 0
    _machines: dict[str, Machine] = field(default_factory=dict, init=False)
    _in_flight: dict[Future[Answer], Chunk] = field(default_factory=dict, init=False)
    _waiting: deque[Chunk] = field(default_factory=deque, init=False)
    _early: dict[int, tuple[Chunk, Any]] = field(default_factory=dict, init=False)
    _unseeded: set[str] = field(default_factory=set, init=False)
    _seconds: float | None = field(default=None, init=False)
    _failed: SampleError | None = field(default=None, init=False)
    _folded: int = field(default=0, init=False)
    _labels: tuple[Label, Label] | None = field(default=None, init=False)
    _generation: int = field(default=0, init=False)
    _suspects: list[Chunk] = field(default_factory=list, init=False)

    @property
    def machines(self) -> tuple[Machine, ...]:
        """The machines that have measured."""
        return gathered(self._machines.values())

    def note(self, worker: str, machine: Machine) -> None:
        """Note that a process has measured."""
        self._machines[worker] = machine

    def run(
        self,
        chunks: Chunks,
        fold: Callable[[Chunk, Any], None],
        extra: Callable[[], Any] = lambda: None,
    ) -> None:
        """
        Measure all samples.

        Raises:
            SampleError: Of the first sample that failed.
            ExecutorError: A chunk's worker died three times, or the engine fails.
        """
        self._folded = chunks.next_index
        self._labels = self.engine.label(self.model), self.engine.label(self.job)
        try:
            while True:
                self._fill(chunks, extra)
                self.step.in_flight = len(self._in_flight)
                left = [each for each in self._in_flight.values() if not each.is_done]
                if not (left or self._waiting):
                    break  # second runs of late chunks are not waited for
                done, _ = wait(self._in_flight, timeout=1.0, return_when=FIRST_COMPLETED)
                # The oldest first, so that one that broke the engine is told by its own chunk.
                for future in sorted(done, key=lambda each: self._in_flight[each].start):
                    self._take(future, self._in_flight.pop(future), fold)
                if self._is_settled():
                    break
        finally:
            for future in self._in_flight:
                future.cancel()
            self._in_flight.clear()
            self.step.in_flight = 0
        if self._failed is not None:
            raise self._failed
        if chunks.error is not None:
            raise SampleError(chunks.error, chunks.next_index, None)

    def _is_settled(self) -> bool:
        """Whether a sample has failed, and none before it is left to be measured."""
        if self._failed is None:
            return False
        left = [*self._in_flight.values(), *self._waiting]
        return all(each.start > self._failed.index for each in left if not each.is_done)

    def _fill(self, chunks: Chunks, extra: Callable[[], Any]) -> None:
        workers = self.engine.workers
        self._suspects = [each for each in self._suspects if not each.is_done]
        # Of several chunks that a pool broke with, only one alone shows that it is to blame.
        limit = 1 if self._suspects else _IN_FLIGHT * workers
        while True:
            left = list(
                dict.fromkeys(each for each in self._in_flight.values() if not each.is_done)
            )
            late = [each for each in left if self._is_late(each)]
            # Where all of them are late, nothing may be going on any more.
            if len(left) >= limit and len(late) < len(left):
                return
            chunk = self._next(chunks, workers, extra) if len(left) < limit else None
            if chunk is None and late:
                chunk = late[0]
            if chunk is None:
                return
            self._submit(chunk)

    def _next(self, chunks: Chunks, workers: int, extra: Callable[[], Any]) -> Chunk | None:
        """Return the next chunk to run: one to be run again, or a new one."""
        for _ in range(len(self._waiting)):
            chunk = self._waiting.popleft()
            if chunk.is_done:
                continue
            if self._may_go(chunk):
                return chunk
            self._waiting.append(chunk)
        ahead = len(self._early) if self.in_order else 0
        if self._failed is None and ahead < _AHEAD * workers:
            total = chunks.total
            left = None if total is None else total - chunks.next_index
            fresh = chunks.take(chunk_size(self._seconds, left, workers))
            if fresh is not None:
                fresh.extra = extra()
                return fresh
        return None

    def _may_go(self, chunk: Chunk) -> bool:
        """Whether a chunk may be sent: with parcels attached only as many as workers lack them."""
        if not chunk.attached:
            return True
        attached = sum(bool(each.attached) for each in self._in_flight.values())
        if attached < len(self._unseeded):
            return True
        if not self._unseeded:
            chunk.attached = frozenset()
            return True
        return False

    def _is_late(self, chunk: Chunk) -> bool:
        """
        Whether a chunk in flight takes far longer than it should.

        For each run of it longer than for the one before: the engine may have sent it to the same
        worker again.
        """
        allowed = _FIRST_SECONDS
        if self._seconds is not None:
            expected = self._seconds * (chunk.stop - chunk.start) * _IN_FLIGHT
            allowed = max(_LATE * expected, _LATE_SECONDS)
        allowed *= 2.0 ** (chunk.copies - 1)
        return time.monotonic() - chunk.since > allowed

    def _submit(self, chunk: Chunk) -> None:
        assert self._labels is not None, "unreachable because run has made them"
        model, job = self._labels
        if chunk.copies and chunk.attached:
            self.engine.resend()
        task = Task(
            release(),
            self._attached(model, self.model, chunk),
            self._attached(job, self.job, chunk),
            chunk.start,
            chunk.stop,
            chunk.samples,
            chunk.extra,
        )
        chunk.since, chunk.generation = time.monotonic(), self._generation
        try:
            future = self.engine.submit(task)
        except Exception as error:  # of a pool that has broken by now
            if not _is_death(error):
                way_out = (
                    "use fewer processes, or a machine that can start more"
                    if isinstance(error, OSError)
                    else "pass one that has not been shut down"
                )
                raise ExecutorError(
                    f"executor: {chunk.told}: expected an executor that takes tasks, got "
                    f"{type(error).__name__}: {error}\n"
                    f"fix: {way_out}"
                ) from error
            self._bury(chunk, error)
            return
        chunk.copies += 1
        self._in_flight[future] = chunk

    def _attached(self, label: Label, parcel: Parcel, chunk: Chunk) -> Label:
        """Return the label as a task of this chunk carries it."""
        if label.key not in chunk.attached:
            return label
        self.sent += 1
        return dataclasses.replace(label, content=parcel.content)

    def _take(
        self, future: Future[Answer], chunk: Chunk, fold: Callable[[Chunk, Any], None]
    ) -> None:
        chunk.copies -= 1
        try:
            answer = future.result()
        except (Exception, CancelledError) as error:
            if chunk.is_done:
                return
            if lacking := _lacking(error):
                raise ExecutorError(
                    f"executor: {chunk.told}: expected a worker that reads its task, got "
                    f"{lacking}\n"
                    "fix: install there what the client has, in the same releases: pytest-edgeq, "
                    "and what the reference, the metric or the factory needs"
                ) from error
            if not _is_death(error):
                raise ExecutorError(
                    f"executor: {chunk.told}: expected what a worker measured, got "
                    f"{type(error).__name__}: {error}"
                ) from error
            self._bury(chunk, error)
            return
        self.engine.heard(answer)
        if answer.missing:
            self._unseeded.add(answer.worker)
            chunk.attached = answer.missing
            self._waiting.append(chunk)
            return
        self._unseeded.discard(answer.worker)
        chunk.attached = frozenset()
        if chunk.is_done:
            return
        chunk.is_done = True
        if not self.in_order:
            chunk.samples = None if chunk.samples is None else ()
        self.note(answer.worker, answer.machine)
        if answer.failure is not None:
            self._fail(answer.failure, chunk)
            return
        if answer.changed:
            raise ExecutorError(
                f"executor: the reference changed on the worker {answer.worker} while it measured "
                f"{chunk.told}: what a sample gives depends on those before it\n"
                "fix: measure it in one process, in order: leave executor= out, or pass a "
                "reference that keeps nothing from call to call"
            )
        count = chunk.stop - chunk.start
        seconds = answer.seconds / count
        # The first chunk of a process opens the model and is slow; the latest one counts most.
        self._seconds = seconds if self._seconds is None else (self._seconds + seconds) / 2
        self.step.advance(count)
        self._early[chunk.start] = chunk, pickle.loads(answer.content)
        self._fold(fold)

    def _fold(self, fold: Callable[[Chunk, Any], None]) -> None:
        if not self.in_order:
            for chunk, found in self._early.values():
                fold(chunk, found)
            self._early.clear()
            return
        while self._folded in self._early:
            chunk, found = self._early.pop(self._folded)
            fold(chunk, found)
            self._folded = chunk.stop

    def _fail(self, failure: Failure, chunk: Chunk) -> None:
        if self._failed is None or failure.index < self._failed.index:
            where = None if failure.is_reading else chunk
            self._failed = SampleError(unpacked(failure), failure.index, where)

    def _bury(self, chunk: Chunk, error: BaseException) -> None:
        """Run a chunk again whose worker died."""
        said = f"{type(error).__name__}: {error}"
        if isinstance(error, CancelledError):
            chunk.losses += 1
        else:
            # dask has run it on several workers by then, but also counts those that it waited on.
            chunk.deaths += _AGAIN if type(error).__name__ == "KilledWorker" else 1
        if chunk.deaths > _AGAIN or chunk.losses > _MOST_LOSSES:
            pid, code = getattr(error, "pid", None), getattr(error, "exitcode", None)
            worker = getattr(error, "last_worker", "")
            worker = worker if pid is None else f"process {pid}, exit code {code}"
            raise ExecutorError(_told(chunk, worker, said)) from error
        if _breaks(error) and chunk.generation == self._generation:
            if not self.engine.renew():
                raise ExecutorError(
                    f"executor: {chunk.told}: expected what a worker measured, but the pool broke "
                    f"while these and others were measured: {said}\n"
                    "cause: a worker died, and this kind of executor does not go on then\n"
                    "fix: --edgeq-executor=processes:N, loky and dask start another worker, and "
                    "run its samples there"
                ) from error
            self._generation += 1
            self._labels = self.engine.label(self.model), self.engine.label(self.job)
        if "BrokenExecutor" in _names(error):
            self._suspects.append(chunk)
        self._waiting.append(chunk)


def _told(chunk: Chunk, worker: object, said: str) -> str:
    where = f" (the last one: {worker})" if worker else ""
    return (
        f"executor: {chunk.told}: expected what a worker measured, but each worker that ran them "
        f"died{where}: {said}\n"
        "cause: the file, a runtime or the reference ends the process on these samples, or the "
        "machine has too little memory\n"
        f"fix: measure {chunk.told} in this process, without an executor, to see it"
    )


def _lacking(error: BaseException) -> str:
    """Return the ImportError of a worker as text; empty if the error has another cause."""
    told: BaseException | None = error
    while told is not None:
        if isinstance(told, ImportError):
            return f"{type(told).__name__}: {told}"
        for line in str(told).splitlines():  # of a traceback, which loky attaches
            if line.startswith(("ModuleNotFoundError: ", "ImportError: ")):
                return line
        told = told.__cause__
    return ""


def _names(error: BaseException) -> set[str]:
    return {each.__name__ for each in type(error).__mro__}


def _is_death(error: BaseException) -> bool:
    return bool(_names(error) & _DEATHS) or isinstance(error, CancelledError)


def _breaks(error: BaseException) -> bool:
    """Whether the engine, too, has to be made ready again."""
    return "BrokenExecutor" in _names(error) or isinstance(error, CancelledError)
