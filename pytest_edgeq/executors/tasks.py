"""What goes to a worker and comes back: tasks, answers, and the kinds of jobs."""

from __future__ import annotations

import pickle
import platform
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from pytest_edgeq.executors.parcel import Label
from pytest_edgeq.numerics.machine import Machine
from pytest_edgeq.versions import version_of

if TYPE_CHECKING:
    from pytest_edgeq.quantized import QuantizedModel
    from pytest_edgeq.sample_source import SampleSource

__all__ = [
    "Answer",
    "ExecutorError",
    "Failure",
    "Job",
    "Station",
    "Task",
    "packed_failure",
    "unpacked",
]


class ExecutorError(RuntimeError):
    """An executor does not measure samples, through no fault of the model's."""


class Station(Protocol):
    """One job on one model, with interpreters of its own; used by one thread at a time."""

    def run(self, items: Iterable[tuple[int, Any]], extra: Any) -> Any:
        """
        Measure samples, and return what is merged.

        Args:
            items: With their indices.
            extra: As the task has it.

        Raises:
            Exception: Of the sample that was read last.
        """


class Job(Protocol):
    """A kind of measurement; it is pickled."""

    @property
    def source(self) -> SampleSource | None:
        """Where workers read samples; None where the tasks bring them."""

    @property
    def what(self) -> str:
        """What of the user's it holds, for texts."""

    def station(self, model: QuantizedModel, runtime: str) -> Station:
        """Return what measures samples of a model."""

    def bound(self, model: QuantizedModel, given: Any, index: int) -> Any:
        """
        Return an item as stations take it, of what the user's factory gave.

        Raises:
            TypeError, ValueError: It does not fit the model.
        """


@dataclass(frozen=True, slots=True)
class Task:
    """
    Some samples to measure.

    Attributes:
        version: As `release` returns it, which must be the worker's.
        model: The label of the model's parcel.
        job: The label of the job's parcel.
        start: Index of the first sample.
        stop: Index behind the last one.
        samples: Pickles of the samples; None where the worker reads them.
        extra: What the job wants to know with each task.
    """

    version: str
    model: Label
    job: Label
    start: int
    stop: int
    samples: tuple[bytes, ...] | None
    extra: Any = None

    def bound(self) -> Iterator[tuple[int, Any]]:
        """Give the samples that the task brings, with their indices."""
        for index, content in enumerate(self.samples or (), self.start):
            yield index, pickle.loads(content)


@dataclass(frozen=True, slots=True)
class Failure:
    """
    What a sample raised.

    Attributes:
        index: Of the sample.
        error: A pickle of the exception; None where it cannot be pickled.
        text: Its class and its text.
        is_reading: Whether reading the sample raised it, and not measuring it.
    """

    index: int
    error: bytes | None
    text: str
    is_reading: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """
    What a worker says to a task.

    Attributes:
        worker: Host and process.
        machine: Its machine.
        seconds: Of measuring.
        missing: Keys of parcels that it lacks; nothing was measured then.
        content: A pickle of what was measured.
        failure: The first sample that failed.
        changed: Whether the reference changed while it was called.
        place: The worker's address, where the engine has one.
    """

    worker: str
    machine: Machine
    seconds: float = 0.0
    missing: frozenset[str] = frozenset()
    content: bytes = b""
    failure: Failure | None = None
    changed: bool = False
    place: str = ""


def release() -> str:
    """Return the releases of pytest-edgeq and of Python, whose functions others cannot read."""
    python = ".".join(platform.python_version_tuple()[:2])
    return f"pytest-edgeq {version_of('pytest-edgeq')} on Python {python}"


def packed_failure(index: int, error: Exception, *, is_reading: bool = False) -> Failure:
    """Pack an exception, as far as it can be pickled."""
    try:
        content: bytes | None = pickle.dumps(error)
        pickle.loads(content or b"")
    except Exception:  # an exception of the user's own
        content = None
    return Failure(index, content, f"{type(error).__name__}: {error}", is_reading)


def unpacked(failure: Failure) -> Exception:
    """Return the exception; a RuntimeError of the same text where it could not be pickled."""
    if failure.error is None:
        return RuntimeError(failure.text)
    error: Exception = pickle.loads(failure.error)
    return error
