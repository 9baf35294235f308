"""Files that are open in a worker, on this machine or on a target."""

from __future__ import annotations

import itertools
import re
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from pytest_edgeq.errors import CrashedError, UnrunnableError
from pytest_edgeq.runtimes.engines import (
    Arrays,
    Engine,
    Opening,
    as_dtype,
    described,
)
from pytest_edgeq.runtimes.runner import on_disk, open_here
from pytest_edgeq.runtimes.workers.crash_report import WorkerCrashError, file_fact, size_text
from pytest_edgeq.runtimes.workers.isolated_file import open_file, source_file
from pytest_edgeq.runtimes.workers.link import LinkError
from pytest_edgeq.tflite.boundary import numpy_dtype
from pytest_edgeq.tflite.cut import Cut, cut_ops, first_op_that
from pytest_edgeq.tflite.mapped import Source

if TYPE_CHECKING:
    from pytest_edgeq.runtimes.workers.link import Link
    from pytest_edgeq.runtimes.workers.local_worker import LocalWorker
    from pytest_edgeq.runtimes.workers.remote_worker import Head
    from pytest_edgeq.runtimes.workers.target import Target, Texts

_Result = TypeVar("_Result")

_keys = itertools.count()

_EXPECTED = {"load": "a file ready to run", "run": "outputs", "close": "a file closed"}

_LOST = (
    "lost the .tflite file: the process that held it has ended\n"
    "cause: another file or another process ended it between two steps\n"
    "fix: run the test again by itself"
)

# All that kernels say where an allocation fails.
_NO_REASON = re.compile(r"(Node number \d+ \(\w+\) failed to (prepare|invoke)\.?)?\s*")

_MOST_SECONDS: Final = 30.0
"""Time to search for the op that ends a worker."""

_SECONDS_OF_A_TRIAL: Final = 5.0
"""Seconds after which ops count as hanging."""


class RemoteFile:
    """A file open in a worker, which closes it when this object is collected."""

    source: Source  # what opens it on this machine

    def __init__(self) -> None:
        self.key = next(_keys)  # names it in requests
        self.link: Link | None = None  # to the worker in which it is open; None before it is opened
        self.printed = ""  # by a GPU engine, as it compiled the file
        self.lock = threading.Lock()  # held while it is opened


class RemoteEngine(Engine):
    """
    A file that is open in a worker, and opened again in another one where that has ended.

    A file whose runs leave a state behind is not opened again: its outputs would be others.
    """

    def __init__(self, opening: Opening, seconds: float) -> None:
        self._opening, self._seconds = opening, seconds
        self._file: RemoteFile | None = self._make_file()
        self._has_run = False
        self._ask("load")

    def run(self, arrays: Arrays) -> Arrays:
        """Run one sample, or raise an UnrunnableError."""
        needs_state = self._has_run and self._opening.graph.is_stateful
        made = self._ask("run", {"what": "run"}, arrays, needs_state=needs_state)
        self._has_run = True
        return [
            as_dtype(array, entry.tensor.dtype)
            for array, entry in zip(made, self._opening.signature.outputs, strict=True)
        ]

    def tensor(self, index: int) -> npt.NDArray[Any]:
        """Return a tensor as the last run left it, or raise an UnrunnableError."""
        [value] = self._ask("run", {"what": "tensor", "index": index}, needs_state=True)
        subgraph = self._opening.graph.subgraphs[self._opening.signature.subgraph]
        return as_dtype(value, subgraph.tensors[index].dtype)

    def close(self) -> None:
        """Have the worker close the file: a user's own runtime at once, others later."""
        file = self._file
        if file is None:
            return
        if self._opening.own is not None and file.link is not None and file.link.is_alive:
            self._ask("close", {"what": "close"})
        self._file = None

    def _make_file(self) -> RemoteFile:
        return RemoteFile()

    def _use(self, request: Callable[[Link], _Result]) -> _Result:
        """Send requests to the worker, or raise a LinkError."""
        raise NotImplementedError

    def _open_in(self, link: Link, file: RemoteFile) -> None:
        raise NotImplementedError

    def _open_also(self, opening: Opening) -> Engine:
        """Open another file in the same kind of worker."""
        raise NotImplementedError

    def _failure(self, step: str, error: LinkError, given: Sequence[Any]) -> UnrunnableError:
        """Return the error of a step on these inputs in which the worker did not answer."""
        raise NotImplementedError

    def _ask(
        self,
        step: str,
        head: Head | None = None,
        parts: Sequence[Any] = (),
        *,
        needs_state: bool = False,
    ) -> list[Any]:
        """Ask about the file, which is opened where it is not, or raise an UnrunnableError."""
        file, now = self._file, step
        assert file is not None, "a closed file is not run"

        def request(link: Link) -> list[Any]:
            nonlocal now
            with file.lock:
                if file.link is not link:
                    if needs_state:
                        raise CrashedError(self._opening.runtime, _LOST)
                    now = "load"
                    self._open_in(link, file)
                    file.link = link
                    weakref.finalize(file, link.forgotten.append, file.key).atexit = False
                    now = step
            return [] if head is None else link.ask({**head, "key": file.key}, parts, self._seconds)

        try:
            return self._use(request)
        except LinkError as error:
            given = () if now == "load" else parts
            raise self._failure(now, error, given) from error.__cause__

    def _crashing_op(self, step: str, given: Sequence[Any]) -> str:
        """Describe the op that ended the worker in a step on these inputs, in one line or two."""
        if self._opening.is_trial:
            return ""
        opening, begun = self._opening, time.monotonic()
        graph, subgraph = opening.graph, opening.signature.subgraph
        tensors = graph.subgraphs[subgraph].tensors
        read = [each.tensor.index for each in opening.signature.inputs]
        known: dict[int, npt.NDArray[Any]] = dict(zip(read, given, strict=True)) if given else {}

        def shape_of(index: int) -> tuple[int, ...]:
            return known[index].shape if index in known else tensors[index].shape

        def value(index: int) -> npt.NDArray[Any]:
            if index in known:
                return known[index]
            return np.zeros(tensors[index].shape, numpy_dtype(tensors[index].dtype))

        def crashes(cut: Cut) -> bool:
            if time.monotonic() - begun > _MOST_SECONDS:
                raise TimeoutError
            feed = [value(index) for _, index in cut.inputs.values()]
            try:
                trial = self._open_also(opening.of_copy(cut.content, is_trial=True))
                if step == "run":
                    trial.run(feed)
            except CrashedError:
                return True
            except Exception:  # the kernels refuse them, which ends no process
                return False
            return False

        try:
            op = first_op_that(graph, subgraph, crashes, shape_of)
            if op is not None:
                return f"op: {opening.where(op)}"
            left_out = cut_ops(graph, subgraph, shape_of).left_out
        except TimeoutError:
            return f"op: not found in {_MOST_SECONDS:.0f} s"
        except Exception as error:  # of a damaged file the graph need not make sense
            why = f"{type(error).__name__}: {error}"
            return f"op: not found: its ops cannot be cut out ({why})"[:150]
        text = "op: not found: its ops, cut out and run on zeros, end no process"
        if left_out:
            first, why = left_out[0]
            more = f" and {len(left_out) - 1} more" if len(left_out) > 1 else ""
            text += f"\n  not cut out: {opening.where(first)}{more}: {why}"
        return text


class TargetEngine(RemoteEngine):
    """
    A file that is open on a target; a request is sent once more after a lost connection.

    If the request of another thread loses the connection, that does not count. Engines of one file
    share what is open there, unless runs leave something behind.
    """

    _texts: Texts = MappingProxyType({})

    def __init__(self, opening: Opening, target: Target) -> None:
        for entry in (*opening.signature.inputs, *opening.signature.outputs):
            if entry.tensor.dtype in ("resource", "variant", "string"):
                kind = "input" if entry in opening.signature.inputs else "output"
                raise RuntimeError(
                    f"{kind} {entry.name!r} is {entry.tensor.dtype}, which cannot be sent"
                )
        self._target = target
        super().__init__(opening, target.seconds)

    def _make_file(self) -> RemoteFile:
        file, opening = super()._make_file(), self._opening
        if opening.keep or opening.graph.is_stateful:
            return file
        key = (opening.graph, opening.signature, opening.kernels, opening.threads)
        return self._target.files.setdefault(key, file)

    def _use(self, request: Callable[[Link], _Result]) -> _Result:
        lost: LinkError | None = None
        while True:
            try:
                return request(self._target.link())
            except CrashedError as error:  # of the state, which is lost
                raise lost or error from None
            except LinkError as error:
                if error.kind == "other":
                    continue
                if lost or self._opening.is_trial or error.kind != "lost":
                    raise
                lost = error

    def _open_in(self, link: Link, file: RemoteFile, **more: Any) -> None:
        opening = self._opening
        head = {
            **described(opening.signature),
            "what": "open",
            "digest": opening.graph.sha256,
            "key": file.key,
            "kernels": opening.kernels,
            "threads": opening.threads,
            "keep": opening.keep,
            **more,
        }
        try:
            printed = link.ask(head, (), self._seconds)
        except KeyError:  # it does not have the file
            printed = link.ask(head, [opening.graph.buffer[:]], self._seconds)
        file.printed = "".join(printed)

    def _open_also(self, opening: Opening) -> Engine:
        return self._target.open(opening)

    def _failure(self, step: str, error: LinkError, given: Sequence[Any]) -> UnrunnableError:
        op = self._crashing_op(step, given) if error.kind == "lost" else ""
        return self._target.failure(self._opening.runtime, error, op, self._texts)


class IsolatedEngine(RemoteEngine):
    """A file that is open in a worker of this machine; crashed steps are not retried."""

    def __init__(
        self, opening: Opening, worker: LocalWorker, seconds: float, own: bytes | None
    ) -> None:
        self._worker, self._own = worker, own
        bound = min(seconds, _SECONDS_OF_A_TRIAL) if opening.is_trial else seconds
        super().__init__(opening, bound)

    def _make_file(self) -> RemoteFile:
        """Return a file with a path: a link would copy it, and the worker maps it."""
        file = super()._make_file()
        file.source = self._opening.graph.source
        try:
            # Not written by the worker, where it would stay when that dies.
            file.source, remove = on_disk(file.source)
        except OSError:
            if self._own is not None:  # which needs a path
                raise
            return file
        weakref.finalize(file, remove)
        return file

    def _use(self, request: Callable[[Link], _Result]) -> _Result:
        try:
            return self._worker.use(request, self._seconds)
        except RuntimeError as error:
            if not _NO_REASON.fullmatch(str(error)):
                raise
            assert self._worker.memory is not None, "an isolated worker has a bound"
            raise RuntimeError(
                f"{error} No reason is given, as where memory beyond the bound of "
                f"{size_text(self._worker.memory)} is asked for (--edgeq-isolate-memory)"
            ) from None

    def _open_in(self, link: Link, file: RemoteFile) -> None:
        opening, key = self._opening, self._opening.signature.key
        arguments = (file.source, key, opening.runtime, opening.threads, opening.keep, self._own)
        link.ask({"what": "call", "key": file.key}, [(open_file, arguments, {})], self._seconds)

    def _open_also(self, opening: Opening) -> Engine:
        return IsolatedEngine(opening, self._worker, self._seconds, self._own)

    def _failure(self, step: str, error: LinkError, given: Sequence[Any]) -> CrashedError:
        """Report a crash: the step, the file, the op, and how the worker ended."""
        assert isinstance(error, WorkerCrashError), "a local worker raises nothing else"
        opening, graph = self._opening, self._opening.graph
        facts = [file_fact(graph.buffer, graph.sha256)]
        if opening.own is None and not error.was_killed:
            facts.append(self._crashing_op(step, given))
        how = "was ended" if error.was_killed or error.kind == "timeout" else "crashed"
        first = f"{how} in the step {step}: expected {_EXPECTED[step]}, got {error.what}"
        own = None if opening.own is None else source_file(opening.own)
        return CrashedError(opening.runtime, error.text(first, facts, own=own))


class TriedEngine(Engine):
    """
    An engine of this process whose file is loaded and run once in the child, first.

    A file that kernels refuse there is not run here. One on a user's own runtime is: it may depend
    on this process.
    """

    def __init__(
        self, opening: Opening, trial: Callable[[], RemoteEngine], survived: Callable[[], None]
    ) -> None:
        self._survived = survived
        self._is_own = opening.own is not None
        self._trial: RemoteEngine | None = self._tried(trial)
        self._engine = open_here(opening)

    def run(self, arrays: Arrays) -> Arrays:
        """Run one sample, or raise a CrashedError."""
        trial = self._trial
        if trial is not None:
            self._tried(lambda: trial.run(arrays))
            self._end_trial()
            self._survived()
        return self._engine.run(arrays)

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
