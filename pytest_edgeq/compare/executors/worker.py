"""Measure chunks of samples in another process, which opens a model once."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import pkgutil
import platform
import sys
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_edgeq.versions import import_torch, version_of

if TYPE_CHECKING:
    from pytest_edgeq.compare.quantized import QuantizedModel
    from pytest_edgeq.compare.samples import SampleSource


_PACKAGE = str(Path(__file__).parents[2])


class ExecutorError(RuntimeError):
    """An executor does not measure samples, through no fault of the model's."""


# Measures samples, each with its index, and returns the merged result; not thread-safe.
JobRunner = Callable[[Iterable[tuple[int, Any]], Any], Any]


@dataclass(frozen=True, slots=True)
class Job:
    """A kind of measurement; it is pickled."""

    source: SampleSource | None  # where workers read samples; None where the tasks bring them
    # return an item of the user's factory as runners need it
    bind: Callable[[QuantizedModel, Any, int], Any]
    make_runner: Callable[[QuantizedModel], JobRunner]  # with interpreters of its own


@dataclass(frozen=True, slots=True)
class Task:
    """Samples to measure: their pickles, or their indices alone where the worker reads them."""

    version: str
    model: str  # SHA-256 of its pickle
    job: str  # likewise
    start: int
    stop: int
    samples: tuple[bytes, ...] | None
    extra: Any

    @property
    def named(self) -> str:
        """Which samples, for texts."""
        last = self.stop - 1
        return f"sample {self.start}" if last == self.start else f"samples {self.start}…{last}"


@dataclass(frozen=True, slots=True)
class Failure:
    """The exception of a sample: its pickle or None, its text, and the user's frames."""

    index: int
    error: bytes | None
    text: str
    where: str
    is_reading: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a worker: a pickle of the result, or the first sample that failed."""

    machine: str
    seconds: float = 0.0
    content: bytes = b""
    failure: Failure | None = None
    lacks_shared: bool = False  # whether it cannot read the files of the client's machine


def release() -> str:
    """Return the releases of pytest-edgeq and of Python, whose functions others cannot read."""
    python = ".".join(platform.python_version_tuple()[:2])
    return f"pytest-edgeq {version_of('pytest-edgeq')} on Python {python}"


def packed_failure(index: int, error: BaseException, *, is_reading: bool = False) -> Failure:
    """Pack an exception, as far as it can be pickled, and where the user's code raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [place for place, each in enumerate(frames) if each.filename.startswith(_PACKAGE)]
    where = "".join(traceback.format_list(frames[ours[-1] + 1 :] if ours else frames)).rstrip()
    stream = io.BytesIO()
    try:
        _ErrorPickler(stream).dump(error)
        content: bytes | None = stream.getvalue()
    except Exception:  # of what an exception of the user's own holds
        content = None
    return Failure(index, content, f"{type(error).__name__}: {error}", where, is_reading)


class _ErrorPickler(pickle.Pickler):
    """Names classes of exceptions, also those that came here by value."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type) and issubclass(obj, BaseException):
            return pkgutil.resolve_name, (f"{obj.__module__}:{obj.__qualname__}",)
        return NotImplemented


def unpacked(failure: Failure) -> BaseException:
    """Return the exception, with a note of where it was raised."""
    error: BaseException = RuntimeError(failure.text)
    if failure.error is not None:
        with contextlib.suppress(Exception):
            error = pickle.loads(failure.error)
    if failure.where and sys.version_info >= (3, 11):
        error.add_note(f"raised on a worker, of sample {failure.index}:\n{failure.where}")
    return error


_MOST_OPEN = 4  # models, and jobs, that a worker keeps open, each with the weights of a model


class _Kept:
    """The last few opened objects of this process; threads open one of them once."""

    def __init__(self, close: Callable[[Any], object]) -> None:
        self._close, self._lock = close, threading.Lock()
        self._known: OrderedDict[str, Any] = OrderedDict()

    def get(self, key: str, make: Callable[[], Any]) -> Any:
        """Return an object, made if it is not known."""
        with self._lock:
            if key not in self._known:
                self._known[key] = make()
            self._known.move_to_end(key)
            self.close(_MOST_OPEN)
            return self._known[key]

    def close(self, n_left: int = 0) -> None:
        """Close all but the last few."""
        while len(self._known) > n_left:
            self._close(self._known.popitem(last=False)[1])


# Models, whose runtimes of the user's own have sessions, and jobs on them.
_MODELS, _JOBS = _Kept(lambda model: model.edge.runtimes.close()), _Kept(lambda job: None)


class _OpenJob:
    """A job on an open model; each of its runners serves one thread at a time."""

    def __init__(self, job: Job, model: QuantizedModel) -> None:
        self.job, self.model = job, model
        self._free: list[JobRunner] = []

    def run(self, items: Iterable[tuple[int, Any]], extra: Any) -> Any:
        """Measure samples by a runner that no other thread uses."""
        try:
            runner = self._free.pop()
        except IndexError:
            runner = self.job.make_runner(self.model)
        found = runner(items, extra)
        self._free.append(runner)
        return found


def _opened(task: Task, model: bytes | str, job: bytes | str) -> _OpenJob:
    """Return the open job of a task."""
    opened = _MODELS.get(task.model, lambda: pickle.loads(_read(model))())
    key = f"{task.model} {task.job}"
    found: _OpenJob = _JOBS.get(key, lambda: _OpenJob(pickle.loads(_read(job)), opened))
    return found


def _read(shared: bytes | str) -> bytes:
    if isinstance(shared, bytes):
        return shared
    try:
        return Path(shared).read_bytes()
    except OSError as error:  # it is of another machine, or of another user
        raise _LackingError from error


def _machine() -> str:
    # torch is imported before a model is opened, so that its number of threads can be set.
    if not import_torch():
        return f"{platform.node()}: {platform.machine()}"
    import torch

    kernels = torch.backends.cpu.get_cpu_capability()
    return f"{platform.node()}: {platform.machine()}, {kernels}, torch {torch.__version__}"


class _LackingError(Exception):
    """A file that the client has written cannot be read by this process."""


def run_chunk(task: Task, model: bytes | str, job: bytes | str) -> Answer:
    """Measure a chunk of samples by the pickles of model and job, or files with them."""
    from pytest_edgeq.compare.parallel import on_one_thread

    machine = _machine()
    if task.version != release():
        raise RuntimeError(
            f"the worker {platform.node()}, process {os.getpid()} has {release()}, expected "
            f"{task.version} as on the client: install the same releases there"
        )
    reached, is_reading = task.start, False
    try:
        opened = _opened(task, model, job)
    except _LackingError:
        return Answer(machine, lacks_shared=True)

    def numbered() -> Iterator[tuple[int, Any]]:
        nonlocal reached, is_reading
        source = opened.job.source
        if source is None:
            for index, content in enumerate(task.samples or (), task.start):
                reached = index
                yield index, pickle.loads(content)
            return
        items = iter(source.read(range(task.start, task.stop)))
        for index in range(task.start, task.stop):
            reached, is_reading = index, True
            item = opened.job.bind(opened.model, next(items), index)
            is_reading = False
            yield index, item
        is_reading = True
        next(items, None)  # raises, if the factory makes more

    started = time.perf_counter()
    try:
        with on_one_thread():
            found = opened.run(numbered(), task.extra)
    except KeyboardInterrupt:
        raise
    # Of the sample, the file or the reference: the client raises it. pytest.fail is no Exception.
    except BaseException as error:
        failure = packed_failure(reached, error, is_reading=is_reading)
        return Answer(machine, failure=failure)
    return Answer(machine, time.perf_counter() - started, pickle.dumps(found))
