"""What goes to a worker and comes back: tasks, answers, and the kinds of jobs."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import pickle
import platform
import sys
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pytest_edgeq.executors.parcel import Label
from pytest_edgeq.numerics.machine import Machine
from pytest_edgeq.versions import version_of

if TYPE_CHECKING:
    from pytest_edgeq.quantized import QuantizedModel
    from pytest_edgeq.sample_source import SampleSource


_PACKAGE = str(Path(__file__).parent.parent)


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
        where: The user's lines that raised it, as in a traceback; empty where none did.
        is_reading: Whether reading the sample raised it, and not measuring it.
    """

    index: int
    error: bytes | None
    text: str
    where: str
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
            return _class_named, (obj.__module__, obj.__qualname__)
        return NotImplemented


def _class_named(module: str, name: str) -> Any:
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))


def unpacked(failure: Failure) -> BaseException:
    """
    Return the exception, with a note of where it was raised.

    Returns:
        A RuntimeError of the same text where this process cannot make it: of a class that is local
        to a function, for instance.
    """
    error: BaseException = RuntimeError(failure.text)
    if failure.error is not None:
        with contextlib.suppress(Exception):
            error = pickle.loads(failure.error)
    if failure.where and sys.version_info >= (3, 11):
        error.add_note(f"raised on a worker, of sample {failure.index}:\n{failure.where}")
    return error
