"""Engines whose files run in the child process."""

from __future__ import annotations

import hashlib
import itertools
import re
import tempfile
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy.typing as npt

from pytest_edgeq.errors import CrashedError
from pytest_edgeq.runtimes.crashing_op import SECONDS_OF_A_TRIAL, Inputs, crashing_op_text
from pytest_edgeq.runtimes.engines import Arrays, Engine
from pytest_edgeq.runtimes.opening import Opening
from pytest_edgeq.runtimes.runner import open_here
from pytest_edgeq.runtimes.workers import child
from pytest_edgeq.runtimes.workers.child import LostError
from pytest_edgeq.runtimes.workers.child_process import Child
from pytest_edgeq.runtimes.workers.death import DeathError, file_fact, size_text
from pytest_edgeq.runtimes.workers.sending import source_file

_Result = TypeVar("_Result")

_keys = itertools.count()

_MOST_OPENINGS = 3
"""Of a file in one run: so often the child may have died of something else."""

_TRIAL = -1
"""Key of the engine that a trial opens."""

_EXPECTED = {"load": "a file ready to run", "run": "outputs", "close": "a file closed"}

_NO_REASON = re.compile(r"(Node number \d+ \(\w+\) failed to (prepare|invoke)\.?)?\s*")
"""All that kernels say where an allocation fails."""


class IsolatedEngine(Engine):
    """
    An engine in the child process.

    Raises:
        CrashedError: The child ended.
        RuntimeError, ValueError: The kernels cannot allocate the file.
    """

    def __init__(
        self, opening: Opening, process: Child, seconds: float, own: bytes | None = None
    ) -> None:
        self._opening = opening
        self._child = process
        self._seconds = seconds
        self._own = own
        self._source = opening.source
        if own is not None and isinstance(opening.source, bytes):
            # Not written by the child, where it would stay when that dies.
            folder = tempfile.TemporaryDirectory(prefix="edgeq-")
            self._source = Path(folder.name) / "model.tflite"
            self._source.write_bytes(opening.source)
            weakref.finalize(self, folder.cleanup)
        self._key = next(_keys)
        self._has_run = False
        self._forget = weakref.finalize(self, process.forget, self._key)
        self._forget.atexit = False
        self._load()

    def run(self, inputs: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        """
        Run one sample.

        Raises:
            CrashedError: The child ended, or others have ended it and a file has lost its state.
            RuntimeError, ValueError, KeyError: The kernels fail.
        """
        arrays = dict(inputs)
        for _ in range(_MOST_OPENINGS):
            try:
                outputs: Arrays = self._step("run", arrays, child.run, self._key, arrays)
            except LostError:
                # The child has died of something else since then.
                if self._has_run and self._opening.graph.is_stateful:
                    break
                self._load()
            else:
                self._has_run = True
                return outputs
        raise CrashedError(
            self._opening.runtime,
            "lost the .tflite file: the child process that held it has ended\n"
            "cause: another file or another process ended it between two steps\n"
            "fix: run the test again by itself",
        )

    def tensor(self, index: int) -> npt.NDArray[Any]:
        """
        Return a tensor as the last run left it.

        Raises:
            CrashedError: The child ended since the run.
        """
        try:
            value: npt.NDArray[Any] = self._step("run", {}, child.tensor, self._key, index)
        except LostError:
            raise CrashedError(
                self._opening.runtime, "lost the tensors of its last run: its process has ended"
            ) from None
        return value

    def close(self) -> None:
        """
        Have the child let go of the file.

        Raises:
            CrashedError: The child ended.
            Exception: What a user's own runtime raises.
        """
        if self._forget.detach() is None:
            return
        if self._own is None:
            self._child.forget(self._key)  # with the next call
        else:
            self._step("close", {}, child.close, self._key)

    def _load(self) -> None:
        opening = self._opening
        self._step(
            "load",
            {},
            child.load,
            self._key,
            self._source,
            opening.signature.key,
            opening.runtime,
            opening.threads,
            opening.keep,
            self._own,
        )

    def _step(
        self,
        name: str,
        inputs: Mapping[str, npt.NDArray[Any]],
        function: Callable[..., Any],
        *arguments: Any,
    ) -> Any:
        try:
            return self._child.call(self._seconds, function, *arguments)
        except DeathError as error:
            raise self._crashed(name, inputs, error) from error.__cause__
        except RuntimeError as error:
            if not _NO_REASON.fullmatch(str(error)):
                raise
            bound = size_text(self._child.memory)
            raise RuntimeError(
                f"{error} No reason is given, as where memory beyond the bound of {bound} is asked "
                "for (--edgeq-isolate-memory)"
            ) from None

    def _ends(self, content: bytes, inputs: Inputs | None) -> bool:
        """Whether ops that were cut out end the child, which is then started again."""
        opening, seconds = self._opening, min(self._seconds, SECONDS_OF_A_TRIAL)
        try:
            self._child.call(
                seconds, child.attempt, _TRIAL, content, opening.runtime, opening.threads, inputs
            )
        except DeathError:
            return True
        return False

    def _crashed(
        self, name: str, inputs: Mapping[str, npt.NDArray[Any]], error: DeathError
    ) -> CrashedError:
        opening, death = self._opening, error.death
        content = opening.graph.buffer
        facts = [file_fact(opening.source, hashlib.sha256(content).hexdigest(), len(content))]
        if opening.own is None and not death.was_killed:
            facts.append(crashing_op_text(opening, name, inputs, self._ends))
        how = "was ended" if death.was_killed or death.kind == "timeout" else "crashed"
        first = f"{how} in the step {name}: expected {_EXPECTED[name]}, got {death.what}"
        lines = death.told(facts, own=None if opening.own is None else source_file(opening.own))
        return CrashedError(opening.runtime, "\n".join([first, *lines]))


class TriedEngine(Engine):
    """
    An engine of this process whose file is loaded and run once in the child, first.

    What the kernels refuse there is not tried here: memory has no bound in this process. A user's
    own runtime is, as it may depend on what only this process has.

    Raises:
        CrashedError: The child ended.
        RuntimeError, ValueError: The kernels cannot allocate the file.
    """

    def __init__(
        self,
        opening: Opening,
        trial: Callable[[], IsolatedEngine],
        survived: Callable[[], None],
    ) -> None:
        self._survived = survived
        self._is_own = opening.own is not None
        self._trial: IsolatedEngine | None = self._tried(trial)
        self._engine = open_here(opening)

    def run(self, inputs: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        """
        Run one sample.

        Raises:
            CrashedError: The child ended.
            RuntimeError, ValueError, KeyError: The kernels fail.
        """
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
        """Let go of what is more than memory."""
        self._end_trial()
        self._engine.close()

    def _end_trial(self) -> None:
        trial, self._trial = self._trial, None
        if trial is not None:
            self._tried(trial.close)

    def _tried(self, call: Callable[[], _Result]) -> _Result | None:
        """Return what a call returns; None where a user's own runtime raises in it."""
        try:
            return call()
        except Exception as error:
            if not self._is_own or isinstance(error, CrashedError):
                raise
            return None
