"""The side of the workers: open parcels once, and measure chunks of samples."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import platform
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pytest_edgeq.executors.machines import this_machine
from pytest_edgeq.executors.parcel import Label, Parcel
from pytest_edgeq.executors.tasks import Answer, Job, Station, Task, packed_failure, release

if TYPE_CHECKING:
    from pytest_edgeq.quantized import QuantizedModel

_MOST_KEPT = 4
"""Parcels of one kind that a worker keeps open, each with the weights of a model."""


class _Model:
    """A model that is open in this process."""

    def __init__(self, content: bytes) -> None:
        from pytest_edgeq.executors.travel import opened_model

        self.quantized, self.runtime, self.settings = opened_model(content)
        self.state = _state(self.quantized)
        self._lock = threading.Lock()
        self._free: dict[str, list[Station]] = defaultdict(list)

    @contextlib.contextmanager
    def station(self, key: str, job: Job) -> Iterator[Station]:
        """Lend a station of a job that no other thread uses."""
        with self._lock:
            free = self._free[key]
            found = free.pop() if free else None
        if found is None:
            found = job.station(self.quantized, self.runtime)
        yield found
        with self._lock:
            self._free[key].append(found)

    def close(self) -> None:
        """Close the sessions of a runtime of the user's own."""
        self.quantized.edge.runtimes.close()


def _state(quantized: QuantizedModel) -> object:
    """Return what tells whether a reference has changed."""
    from pytest_edgeq.parallel import state_of
    from pytest_edgeq.reference import torch_module

    if torch_module(quantized.float_model) is not None:
        return state_of(quantized)
    from pytest_edgeq.executors.pickled import pickled

    return pickled(quantized.float_model, "the reference", "measure in one process")


class _Opened:
    """Parcels that are open in this process, the last used ones."""

    def __init__(self, open_content: Callable[[bytes], Any]) -> None:
        self._open = open_content
        self._lock = threading.Lock()
        self._known: OrderedDict[str, Any] = OrderedDict()

    def get(self, label: Label, content: bytes | None) -> Any:
        """
        Return the content of a parcel, opened; None where this process has no way to it.

        Raises:
            ValueError: The content is not the parcel's.
        """
        with self._lock:  # so that threads of one process open it once
            if label.key not in self._known:
                content = label.content if content is None else content
                content = _on_the_shelf(label) if content is None else content
                if content is None:
                    return None
                if Parcel.of(content).key != label.key:
                    raise ValueError(f"the parcel {label.key[:12]} has another content")
                self._known[label.key] = self._open(content)
            self._known.move_to_end(label.key)
            while len(self._known) > _MOST_KEPT:
                _, old = self._known.popitem(last=False)
                if isinstance(old, _Model):
                    old.close()
            return self._known[label.key]

    def clear(self) -> None:
        """Forget all of them."""
        with self._lock:
            for each in self._known.values():
                if isinstance(each, _Model):
                    each.close()
            self._known.clear()


def _on_the_shelf(label: Label) -> bytes | None:
    try:
        with open(label.path, "rb") as file:  # noqa: PTH123 # an empty path is none
            return file.read()
    except OSError:  # of another machine
        return None


_MODELS = _Opened(_Model)
_JOBS = _Opened(pickle.loads)


def forget() -> None:
    """Close all parcels of this process, which may be the client's own."""
    _MODELS.clear()
    _JOBS.clear()


def run_chunk(task: Task, of_model: bytes | None = None, of_job: bytes | None = None) -> Answer:
    """
    Measure a chunk of samples.

    Raises:
        RuntimeError: The worker has another release of pytest-edgeq or of Python.
    """
    from pytest_edgeq.executors.torch_settings import applied
    from pytest_edgeq.parallel import on_one_thread

    worker, machine = f"{platform.node()}, process {os.getpid()}", this_machine()
    if task.version != release():
        raise RuntimeError(
            f"the worker {worker} has {release()}, expected {task.version} as on the client: "
            "install the same releases there"
        )
    model, job = _MODELS.get(task.model, of_model), _JOBS.get(task.job, of_job)
    missing = {label.key for label, got in ((task.model, model), (task.job, job)) if got is None}
    if missing:
        return Answer(worker, machine, missing=frozenset(missing))
    reached, is_reading = task.start, False

    def numbered() -> Iterator[tuple[int, Any]]:
        nonlocal reached, is_reading
        if job.source is None:
            for index, sample in task.bound():
                reached = index
                yield index, sample
            return
        given = iter(job.source.read(range(task.start, task.stop)))
        for index in range(task.start, task.stop):
            reached, is_reading = index, True
            sample = job.bound(model.quantized, next(given), index)
            is_reading = False
            yield index, sample
        is_reading = True
        next(given, None)  # raises, if the factory gives more

    started = time.perf_counter()
    try:
        with on_one_thread(), applied(model.settings), model.station(task.job.key, job) as station:
            found = station.run(numbered(), task.extra)
    except KeyboardInterrupt:
        raise
    # Of the sample, the file or the reference: the client raises it. pytest.fail is no Exception.
    except BaseException as error:
        failure = packed_failure(reached, error, is_reading=is_reading)
        return Answer(worker, machine, failure=failure)
    seconds = time.perf_counter() - started
    return Answer(
        worker,
        machine,
        seconds,
        content=pickle.dumps(found),
        changed=_state(model.quantized) != model.state,
    )


def run_on_dask(name: str, task: Task, of_model: bytes | None, of_job: bytes | None) -> Answer:
    """Do as `run_chunk` does, on a worker of dask, which has an address."""
    from distributed import get_worker

    del name
    return dataclasses.replace(run_chunk(task, of_model, of_job), place=get_worker().address)
