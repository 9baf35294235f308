"""Files that are open in a worker, on this machine or on a target."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from pytest_edgeq.errors import CrashedError, UnrunnableError
from pytest_edgeq.runtimes.crashing_op import Inputs, crashing_op_text
from pytest_edgeq.runtimes.engines import Arrays, Engine, Source
from pytest_edgeq.runtimes.workers.link import LinkError
from pytest_edgeq.tflite.boundary import numpy_dtype
from pytest_edgeq.tflite.graph import OpGraph

if TYPE_CHECKING:
    from pytest_edgeq.runtimes.opening import Opening
    from pytest_edgeq.runtimes.workers.link import Answer, Link
    from pytest_edgeq.runtimes.workers.remote_worker import Head
    from pytest_edgeq.tflite.subgraph import Tensor

Message = tuple["Head", Iterable[Any]]

_keys = itertools.count()


class RemoteFile:
    """A file open in a worker, which closes it when this object is collected."""

    def __init__(self, opening: Opening, source: Source | None = None) -> None:
        self.opening = opening  # what is to be opened, from this source
        self.source: Source = opening.source if source is None else source
        self.key = next(_keys)  # names it in requests
        self.link: Link | None = None  # to the worker in which it is open; None before it is opened

    def opened_in(self, link: Link) -> None:
        """Note where it is open."""
        self.link = link
        weakref.finalize(self, link.forgotten.append, self.key).atexit = False


class FileHost:
    """
    Interface to one kind of worker: opens files, and again after a restart.

    A file whose runs leave a state behind is not opened anew: its outputs would be others.
    """

    is_far = False  # whether a message takes so long that all tensors are read at once

    def file(self, opening: Opening) -> RemoteFile:
        """Return a file to ask about."""
        return RemoteFile(opening)

    def inputs(self, opening: Opening, inputs: Inputs) -> list[Any]:
        """Return the inputs of a sample in the form of the worker."""
        raise NotImplementedError

    def send(self, message: Callable[[Link], Message], *, is_trial: bool = False) -> Answer:
        """Send a message to a worker; retry once on a new worker if possible."""
        raise NotImplementedError

    def open_in(self, link: Link, file: RemoteFile, *, is_trial: bool = False) -> None:
        """Open a file in a worker. Raises as `send` does."""
        raise NotImplementedError

    def failure(
        self, opening: Opening, step: str, error: LinkError, find_op: Callable[[], str]
    ) -> UnrunnableError:
        """Return the error of a step at which the worker ended or did not answer."""
        raise NotImplementedError

    def ask(
        self,
        file: RemoteFile,
        step: str,
        head: Head,
        parts: Sequence[Any] = (),
        *,
        inputs: Inputs | None = None,
        needs_state: bool = False,
    ) -> Answer:
        """Ask about a file, which is opened where it is not, or raise an UnrunnableError."""
        now = step

        def message(link: Link) -> Message:
            nonlocal now
            if file.link is not link:
                if needs_state:
                    raise CrashedError(file.opening.runtime, _LOST)
                now = "load"
                self.open_in(link, file)
                now = step
            return {**head, "key": file.key}, parts

        def find_op() -> str:
            given = None if now == "load" else inputs
            return crashing_op_text(file.opening, now, given or {}, self._ends_on(file.opening))

        try:
            return self.send(message)
        except LinkError as error:
            raise self.failure(file.opening, now, error, find_op) from error.__cause__

    def _ends_on(self, opening: Opening) -> Callable[[bytes, Inputs | None], bool]:
        """Return a test whether ops that were cut out end the worker."""

        def ends(content: bytes, inputs: Inputs | None) -> bool:
            graph = OpGraph.read(content)
            [signature] = graph.signatures
            cut = replace(opening, source=content, graph=graph, signature=signature, keep=False)
            file = RemoteFile(cut)

            def message(link: Link) -> Message:
                self.open_in(link, file, is_trial=True)
                if inputs is None:
                    return {"what": "close", "key": file.key}, ()
                return {"what": "run", "key": file.key}, self.inputs(cut, inputs)

            try:
                self.send(message, is_trial=True)
            except LinkError:
                return True
            return False

        return ends


_LOST = (
    "lost the .tflite file: the process that held it has ended\n"
    "cause: another file or another process ended it between two steps\n"
    "fix: run the test again by itself"
)


class RemoteEngine(Engine):
    """A file that is open in a worker."""

    def __init__(self, host: FileHost, opening: Opening) -> None:
        self._host, self._opening = host, opening
        self._file: RemoteFile | None = host.file(opening)
        self._has_run = False
        self._read: dict[int, npt.NDArray[Any]] = {}
        self._ask("load", {"what": "forget", "keys": []})  # nothing, once the file is open

    def run(self, inputs: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        """Run one sample, or raise an UnrunnableError."""
        constant = {key: self._read[key] for key in self._read if self._tensors[key].is_constant}
        self._read = constant
        made = self._ask(
            "run",
            {"what": "run"},
            self._host.inputs(self._opening, inputs),
            inputs=inputs,
            needs_state=self._has_run and self._opening.graph.is_stateful,
        )[1]
        self._has_run = True
        return [
            _as_dtype(array, entry.tensor.dtype)
            for array, entry in zip(made, self._opening.signature.outputs, strict=True)
        ]

    def tensor(self, index: int) -> npt.NDArray[Any]:
        """Return a tensor as the last run left it, or raise an UnrunnableError."""
        tensors = self._tensors
        if not self._host.is_far:
            [value] = self._tensor_values([tensors[index]]).values()
            return value
        if index not in self._read:
            # A resource must not be asked for: the process dies.
            computed = [
                each
                for each in tensors
                if not each.is_constant and numpy_dtype(each.dtype) is not None
            ]
            is_constant = tensors[index].is_constant
            self._read |= self._tensor_values([tensors[index]] if is_constant else computed)
        if index not in self._read:
            raise ValueError(f"tensor {index} cannot be read")
        return self._read[index].copy()

    @property
    def _tensors(self) -> Sequence[Tensor]:
        return self._opening.graph.subgraphs[self._opening.signature.subgraph].tensors

    def _tensor_values(self, tensors: Sequence[Tensor]) -> dict[int, npt.NDArray[Any]]:
        dtypes = {tensor.index: tensor.dtype for tensor in tensors}
        head = {"what": "tensors", "indices": list(dtypes)}
        answer, made = self._ask("run", head, needs_state=True)
        return {
            index: _as_dtype(array, dtypes[index])
            for index, array in zip(answer["indices"], made, strict=True)
        }

    def close(self) -> None:
        """Have the worker close the file: a user's own runtime at once, others later."""
        file = self._file
        if file is None:
            return
        if self._opening.own is not None and file.link is not None and file.link.is_alive:
            self._ask("close", {"what": "close"})
        self._file = None

    def _ask(self, step: str, head: Head, parts: Sequence[Any] = (), **options: Any) -> Answer:
        assert self._file is not None, "a closed file is not run"
        return self._host.ask(self._file, step, head, parts, **options)


def _as_dtype(array: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """Return an array of a file's dtype; `.npy` knows no bfloat16, whose bytes are right."""
    wanted = numpy_dtype(dtype)
    if array.dtype.kind == "V" and wanted is not None:
        return array.view(wanted)
    return array
