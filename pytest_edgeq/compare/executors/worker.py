"""Measure chunks of samples in another process, which opens a model once."""

from __future__ import annotations

import contextlib
import os
import pickle
import platform
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pytest_edgeq.compare.executors.tasks import (
    Answer,
    Job,
    JobRunner,
    Task,
    packed_failure,
    release,
)

_MOST_OPEN = 4
"""Models, and jobs, that a worker keeps open, each with the weights of a model."""


class _Kept:
    """The last few opened objects of this process; threads open one of them once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[str, Any] = OrderedDict()

    def get(self, key: str, make: Callable[[], Any]) -> Any:
        """Return an object, made if it is not known."""
        with self._lock:
            if key not in self._known:
                self._known[key] = make()
            self._known.move_to_end(key)
            while len(self._known) > _MOST_OPEN:
                self._known.popitem(last=False)[1].close()
            return self._known[key]


_MODELS, _JOBS = _Kept(), _Kept()


class _OpenJob:
    """A job on an open model; each of its runners serves one thread at a time."""

    def __init__(self, job: Job, model: Any) -> None:
        self.job, self.model = job, model
        self._free: list[JobRunner] = []

    @contextlib.contextmanager
    def runner(self) -> Iterator[JobRunner]:
        """Lend a runner that no other thread uses."""
        try:
            found = self._free.pop()
        except IndexError:
            found = self.job.runner(self.model)
        yield found
        self._free.append(found)

    def close(self) -> None:
        """Do nothing: the model is closed by itself."""


def _opened(task: Task, model: bytes | str, job: bytes | str) -> _OpenJob:
    """Return the open job of a task."""
    opened = _MODELS.get(task.model, lambda: pickle.loads(_read(model)).opened())
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


class _LackingError(Exception):
    """A file that the client has written cannot be read by this process."""


def run_chunk(task: Task, model: bytes | str, job: bytes | str) -> Answer:
    """Measure a chunk of samples by the pickles of model and job, or files with them."""
    import torch

    from pytest_edgeq.compare.parallel import on_one_thread

    kernels = torch.backends.cpu.get_cpu_capability()
    machine = f"{platform.node()}: {platform.machine()}, {kernels}, torch {torch.__version__}"
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
            item = opened.job.bound(opened.model, next(items), index)
            is_reading = False
            yield index, item
        is_reading = True
        next(items, None)  # raises, if the factory makes more

    started = time.perf_counter()
    try:
        with on_one_thread(), opened.runner() as runner:
            found = runner.run(numbered(), task.extra)
    except KeyboardInterrupt:
        raise
    # Of the sample, the file or the reference: the client raises it. pytest.fail is no Exception.
    except BaseException as error:
        failure = packed_failure(reached, error, is_reading=is_reading)
        return Answer(machine, failure=failure)
    return Answer(machine, time.perf_counter() - started, pickle.dumps(found))
