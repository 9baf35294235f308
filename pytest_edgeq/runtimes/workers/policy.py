"""Which files run in the child process, and which have survived there."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pytest_edgeq.errors import CrashedConversionError, CrashedError, UnrunnableError
from pytest_edgeq.names import DEFAULT_RUNTIME, ISOLATE_MODES
from pytest_edgeq.runtimes.engines import Opening
from pytest_edgeq.runtimes.process_state import cpu_model
from pytest_edgeq.runtimes.runner import open_here
from pytest_edgeq.runtimes.workers.isolated_file import sent, source_file
from pytest_edgeq.tflite.mapped import Buffer, source_of
from pytest_edgeq.tflite.source import build_interpreter
from pytest_edgeq.versions import version_of

if TYPE_CHECKING:
    from pytest_edgeq.runtimes.engines import Engine
    from pytest_edgeq.runtimes.workers.local_worker import LocalWorker


_Result = TypeVar("_Result")

_KIND: Final = "isolate"  # of the entries of the cache directory that say what has survived

_survived: set[str] = set()  # of this process, whatever the session


class Isolation:
    """Opens files in this process or in a child process."""

    def __init__(
        self,
        mode: str = "auto",
        *,
        seconds: float,
        memory: int,
        store: Any = None,
        refresh: bool = False,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        assert mode in ISOLATE_MODES, "callers have looked"
        if os.name != "posix":
            if mode == "on":
                raise ValueError("isolate: 'on' needs Linux or macOS; expected auto or off here")
            mode = "off"
        self._mode, self._seconds, self._memory, self._note = mode, seconds, memory, note
        # Keeps entries for other sessions: a `quantize.cache.directory.Store`.
        self._store, self._refresh = store, refresh

    @property
    def is_on(self) -> bool:
        """Whether everything runs in the child, conversions included."""
        return self._mode == "on"

    @property
    def child(self) -> LocalWorker:
        """The child process; it is started by its first call."""
        from pytest_edgeq.runtimes.workers.local_worker import worker_of

        return worker_of(self._memory)

    def native(self, name: str) -> IsolatedConversion | None:
        """Return the isolation for native steps of a conversion; None for this process."""
        if not self.is_on:
            return None
        return IsolatedConversion(name, self.child, self._seconds, self._note)

    def open(self, opening: Opening) -> Engine:
        """Open a file, or raise a CrashedError."""
        is_part = opening.is_part and opening.own is None
        is_known = is_part or (not opening.foreign and opening.runtime == DEFAULT_RUNTIME)
        if self._mode == "off" or opening.target is not None or (is_known and not self.is_on):
            return open_here(opening)
        try:
            own = None if opening.own is None else sent(opening.own)
        except Exception as error:  # whatever the objects do that the runner holds
            return self._unsent(opening, error)
        key = "" if self.is_on else _opening_key(opening, own or b"")
        if key and self._has_survived(key):
            return open_here(opening)
        # Only now, as this module is imported by every session.
        from pytest_edgeq.runtimes.workers.remote_engine import IsolatedEngine, TriedEngine

        isolated = functools.partial(
            IsolatedEngine, worker=self.child, seconds=self._seconds, own=own
        )
        if self.is_on:
            return isolated(opening)
        # The tensors of a trial are not read: without them it takes less memory.
        trial = functools.partial(isolated, replace(opening, keep=False))
        return TriedEngine(opening, trial, lambda: self._remember(key))

    def build(self, content: Buffer, *, foreign: bool) -> None:
        """Build an interpreter of a file that nothing has looked at, or raise a CrashedError."""
        source = source_of(content)
        if self._mode == "off" or not (self.is_on or foreign):
            build_interpreter(source)
            return
        digest = hashlib.sha256(content).hexdigest()
        key = "" if self.is_on else _key(digest, _versions(DEFAULT_RUNTIME))
        if key and self._has_survived(key):
            return
        from pytest_edgeq.runtimes.workers.crash_report import WorkerCrashError, file_fact

        try:
            self.child.call(self._seconds, build_interpreter, source)
        except WorkerCrashError as error:
            facts = [file_fact(content, digest)]
            first = f"crashed in the step open: expected a model, got {error.what}"
            raise CrashedError("reference", error.text(first, facts)) from error.__cause__
        if key:
            self._remember(key)

    def _unsent(self, opening: Opening, error: Exception) -> Engine:
        why = f"{type(error).__name__}: {error}".splitlines()[0][:120]
        if self.is_on:
            raise UnrunnableError(
                opening.runtime,
                "cannot run in a child process: expected a runner that can be sent there\n"
                f"cause: it holds what cannot be copied ({why})\n"
                "fix: make the runner a function or a class of an importable module, which opens "
                "files and devices when it is called; or --edgeq-isolate=auto",
            ) from error
        self._note(f"runtime {opening.runtime!r} was not tried in a child process first: {why}")
        return open_here(opening)

    def _has_survived(self, key: str) -> bool:
        store = None if self._refresh else self._store
        if key not in _survived and store is not None and store.read(_KIND, key) is not None:
            _survived.add(key)
        return key in _survived

    def _remember(self, key: str) -> None:
        if key not in _survived:
            _survived.add(key)
            if self._store is not None:
                self._store.write(_KIND, key, {})


@dataclass(frozen=True, slots=True)
class IsolatedConversion:
    """Runs native steps of a conversion in the child."""

    name: str
    child: LocalWorker
    seconds: float
    note: Callable[[str], None]

    def call(self, step: str, function: Callable[..., _Result], /, *arguments: Any) -> _Result:
        """Call a function in the child, or raise a CrashedConversionError."""
        from pytest_edgeq.runtimes.workers.crash_report import WorkerCrashError

        try:
            return self.child.call(self.seconds, function, *arguments)
        except WorkerCrashError as error:
            first = f"{self.name}: expected a result of the step {step}, got {error.what}"
            raise CrashedConversionError(error.text(first)) from error.__cause__

    def runs_here(self, step: str, why: str, /) -> None:
        """Note that a step runs in this process, and why."""
        self.note(f"{self.name}: the step {step} ran in this process, not in a child: {why}")


def _key(*facts: str | None) -> str:
    return hashlib.sha256(json.dumps([*facts, cpu_model()]).encode()).hexdigest()


def _opening_key(opening: Opening, own: bytes) -> str:
    graph, runtime = opening.graph, opening.runtime
    with contextlib.suppress(OSError):  # of a runner that was typed at a prompt
        own += b"" if opening.own is None else Path(source_file(opening.own)).read_bytes()
    digests = graph.sha256, hashlib.sha256(own).hexdigest()
    return _key(*digests, opening.signature.key, runtime, _versions(runtime))


def _versions(runtime: str) -> str | None:
    """Return the version of what runs files on a built-in runtime."""
    if runtime == "tensorflow":
        return version_of("tensorflow") or version_of("tensorflow-cpu")
    return version_of("ai-edge-litert")
