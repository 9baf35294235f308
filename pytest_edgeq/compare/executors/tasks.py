"""Messages to and from workers: tasks, answers, and the protocol of jobs."""

from __future__ import annotations

import contextlib
import io
import pickle
import pkgutil
import platform
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pytest_edgeq.versions import version_of

if TYPE_CHECKING:
    from pytest_edgeq.compare.sample_source import SampleSource


_PACKAGE = str(Path(__file__).parent.parent)


class ExecutorError(RuntimeError):
    """An executor does not measure samples, through no fault of the model's."""


class JobRunner(Protocol):
    """Runner of one job on one model, with its own interpreters; not thread-safe."""

    def run(self, items: Iterable[tuple[int, Any]], extra: Any) -> Any:
        """
        Measure samples, each with its index, and return the merged result.

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
        """Which objects of the user it holds, for texts."""

    def runner(self, model: Any) -> JobRunner:
        """Return a runner on an open model."""

    def bound(self, model: Any, item: Any, index: int) -> Any:
        """
        Return an item of the user's factory as runners need it.

        Raises:
            TypeError, ValueError: It does not fit the model.
        """


@dataclass(frozen=True, slots=True)
class Task:
    """
    Samples to measure: their pickles, or their indices alone where the worker reads them.

    `model` and `job` are the SHA-256 of the pickles of both.
    """

    version: str
    model: str
    job: str
    start: int
    stop: int
    samples: tuple[bytes, ...] | None
    extra: Any = None


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
    """
    The answer of a worker: a pickle of the result, or the first sample that failed.

    `lacks_shared` says that it cannot read the files of the client's machine.
    """

    machine: str
    seconds: float = 0.0
    content: bytes = b""
    failure: Failure | None = None
    lacks_shared: bool = False


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
