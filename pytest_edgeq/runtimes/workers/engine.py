"""Files that are open in a worker of this machine."""

from __future__ import annotations

import hashlib
import re
import tempfile
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy.typing as npt

from pytest_edgeq.errors import CrashedError
from pytest_edgeq.runtimes.crashing_op import SECONDS_OF_A_TRIAL, Inputs
from pytest_edgeq.runtimes.engines import Arrays, Engine
from pytest_edgeq.runtimes.opening import Opening
from pytest_edgeq.runtimes.runner import open_here
from pytest_edgeq.runtimes.workers.child import OpenFile
from pytest_edgeq.runtimes.workers.crash_report import WorkerCrashError, file_fact, size_text
from pytest_edgeq.runtimes.workers.link import Answer, Link, LinkError
from pytest_edgeq.runtimes.workers.local_worker import LocalWorker
from pytest_edgeq.runtimes.workers.remote_engine import FileHost, Message, RemoteEngine, RemoteFile
from pytest_edgeq.runtimes.workers.sending import source_file

_Result = TypeVar("_Result")

_EXPECTED = {"load": "a file ready to run", "run": "outputs", "close": "a file closed"}

_NO_REASON = re.compile(r"(Node number \d+ \(\w+\) failed to (prepare|invoke)\.?)?\s*")
"""All that kernels say where an allocation fails."""


class IsolatedFiles(FileHost):
    """Opens files in a worker of this machine; crashed steps are not retried."""

    def __init__(self, worker: LocalWorker, seconds: float, own: bytes | None) -> None:
        self._worker, self._seconds, self._own = worker, seconds, own

    def file(self, opening: Opening) -> RemoteFile:
        """Return a file; a user's own runtime reads it by a path."""
        if self._own is None or isinstance(opening.source, Path):
            return RemoteFile(opening)
        # Not written by the worker, where it would stay when that dies.
        folder = tempfile.TemporaryDirectory(prefix="edgeq-")
        path = Path(folder.name) / "model.tflite"
        path.write_bytes(opening.source)
        file = RemoteFile(opening, path)
        weakref.finalize(file, folder.cleanup)
        return file

    def inputs(self, opening: Opening, inputs: Inputs) -> list[Any]:
        """Return the inputs by name."""
        return [dict(inputs)]

    def send(self, message: Callable[[Link], Message], *, is_trial: bool = False) -> Answer:
        """Send a message to the worker, or raise a WorkerCrashError."""
        try:
            return self._worker.ask(message, self._bound(is_trial=is_trial))
        except RuntimeError as error:
            if not _NO_REASON.fullmatch(str(error)):
                raise
            assert self._worker.memory is not None, "an isolated worker has a bound"
            bound = size_text(self._worker.memory)
            raise RuntimeError(
                f"{error} No reason is given, as where memory beyond the bound of {bound} is asked "
                "for (--edgeq-isolate-memory)"
            ) from None

    def _bound(self, *, is_trial: bool) -> float:
        return min(self._seconds, SECONDS_OF_A_TRIAL) if is_trial else self._seconds

    def open_in(self, link: Link, file: RemoteFile, *, is_trial: bool = False) -> None:
        """Open a file in the worker. Raises as `send` does."""
        opening = file.opening
        key, runtime, own = opening.signature.key, opening.runtime, self._own
        arguments = (file.source, key, runtime, opening.threads, opening.keep, own)
        head = {"what": "call", "key": file.key}
        parts: list[Any] = [(OpenFile, arguments, {})]
        self._worker.check(link.ask(head, parts, self._bound(is_trial=is_trial)))
        file.opened_in(link)

    def failure(
        self, opening: Opening, step: str, error: LinkError, find_op: Callable[[], str]
    ) -> CrashedError:
        """Report a crash: the step, the file, the op, and how the worker ended."""
        assert isinstance(error, WorkerCrashError), "a local worker raises nothing else"
        report = error.report
        content = opening.graph.buffer
        facts = [file_fact(opening.source, hashlib.sha256(content).hexdigest(), len(content))]
        if opening.own is None and not report.was_killed:
            facts.append(find_op())
        how = "was ended" if report.was_killed or report.kind == "timeout" else "crashed"
        first = f"{how} in the step {step}: expected {_EXPECTED[step]}, got {report.what}"
        own = None if opening.own is None else source_file(opening.own)
        return CrashedError(opening.runtime, report.text(first, facts, own=own))


class TriedEngine(Engine):
    """
    An engine of this process whose file is loaded and run once in the child, first.

    What the kernels refuse there is not tried here. A user's own runtime is: it may depend on this
    process.
    """

    def __init__(
        self, opening: Opening, trial: Callable[[], RemoteEngine], survived: Callable[[], None]
    ) -> None:
        self._survived = survived
        self._is_own = opening.own is not None
        self._trial: RemoteEngine | None = self._tried(trial)
        self._engine = open_here(opening)

    def run(self, inputs: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        """Run one sample, or raise a CrashedError."""
        trial = self._trial
        if trial is not None:
            self._tried(lambda: trial.run(inputs))
            self._end_trial()
            self._survived()
        return self._engine.run(inputs)

    def tensor(self, index: int) -> npt.NDArray[Any]:
        """Return a tensor as the last run left it."""
        return self._engine.tensor(index)

    def close(self) -> None:
        """Release resources other than memory."""
        self._end_trial()
        self._engine.close()

    def _end_trial(self) -> None:
        trial, self._trial = self._trial, None
        if trial is not None:
            self._tried(trial.close)

    def _tried(self, call: Callable[[], _Result]) -> _Result | None:
        """Call a function; return None if a user's own runtime raises in it."""
        try:
            return call()
        except Exception as error:
            if not self._is_own or isinstance(error, CrashedError):
                raise
            return None
