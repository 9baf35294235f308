"""Files that are open on a target."""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.errors import CrashedError, UnrunnableError
from pytest_edgeq.runtimes.crashing_op import Inputs
from pytest_edgeq.runtimes.engines import described
from pytest_edgeq.runtimes.opening import Opening
from pytest_edgeq.runtimes.workers.link import Answer, Link, LinkError
from pytest_edgeq.runtimes.workers.remote_engine import FileHost, Message, RemoteEngine, RemoteFile
from pytest_edgeq.runtimes.workers.target_errors import link_error, raise_error

if TYPE_CHECKING:
    from pytest_edgeq.runtimes.workers.target import Target


_MOST_KEPT = 1 << 28
"""Bytes of files that a worker keeps besides those that are open."""


class TargetFiles(FileHost):
    """
    Opens files on a target; retries a request once after a lost connection.

    Engines of one file share what is open there, unless runs leave something behind.
    """

    is_far = True

    def __init__(self, target: Target) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._sent: dict[str, int] = {}
        """Bytes of files that the worker of this link keeps, by hash, the oldest first."""
        self._shared: weakref.WeakValueDictionary[object, RemoteFile] = (
            weakref.WeakValueDictionary()
        )

    def open(self, opening: Opening) -> RemoteEngine:
        """Open a file on the target, or raise an UnrunnableError."""
        for entry in opening.signature.outputs:
            if entry.tensor.dtype in ("resource", "variant", "string"):
                raise RuntimeError(
                    f"output {entry.name!r} is {entry.tensor.dtype}, which cannot be sent"
                )
        return RemoteEngine(self, opening)

    def file(self, opening: Opening) -> RemoteFile:
        """Return a file to ask about, which may be one that is open."""
        file = RemoteFile(opening)
        if opening.keep or opening.graph.is_stateful:
            return file
        key = (opening.graph, opening.signature, opening.kernels, opening.threads)
        with self._lock:
            return self._shared.setdefault(key, file)

    def inputs(self, opening: Opening, inputs: Inputs) -> list[Any]:
        """Return the inputs in the order of the signature."""
        return [_sendable(inputs[entry.name]) for entry in opening.signature.inputs]

    def send(self, message: Callable[[Link], Message], *, is_trial: bool = False) -> Answer:
        """Send a request, and once more where the connection is lost, or raise a LinkError."""
        try:
            return self._send(message)
        except LinkError as error:
            if is_trial or error.kind != "lost":
                raise
            try:
                return self._send(message)
            except CrashedError as lost:  # of the state, by this request or before
                raise (error if error.was_read else lost) from None

    def _send(self, message: Callable[[Link], Message]) -> Answer:
        link, seconds = self._target.link(), self._target.seconds
        if link.forgotten:
            link.ask({"what": "forget", "keys": link.take_forgotten()}, (), seconds)
        return raise_error(link.ask(*message(link), seconds))

    def open_in(self, link: Link, file: RemoteFile, *, is_trial: bool = False) -> None:
        """Open a file in the worker, unless another thread has. Raises as `send` does."""
        with self._lock:
            if file.link is link:
                return
            opening = file.opening
            head = {
                **described(opening.signature),
                "what": "open",
                "digest": self._sent_content(link, file),
                "key": file.key,
                "kernels": opening.kernels,
                "threads": opening.threads,
                "keep": opening.keep,
            }
            raise_error(link.ask(head, (), self._target.seconds))
            file.opened_in(link)

    def _sent_content(self, link: Link, file: RemoteFile) -> str:
        """Return the hash of a file that the worker has: boards have little memory for more."""
        content = file.source.read_bytes() if isinstance(file.source, Path) else file.source
        digest = hashlib.sha256(content).hexdigest()
        if link is not self._link:
            self._link, self._sent = link, {}
        if digest not in self._sent:
            dropped = []
            while self._sent and sum(self._sent.values()) + len(content) > _MOST_KEPT:
                dropped.append(next(iter(self._sent)))
                del self._sent[dropped[-1]]
            link.ask({"what": "file", "drop": dropped}, [content], self._target.seconds)
            self._sent[digest] = len(content)
        return digest

    def failure(
        self, opening: Opening, step: str, error: LinkError, find_op: Callable[[], str]
    ) -> UnrunnableError:
        """Report that the target is lost, with the op that ends it, or does not answer."""
        target = self._target
        op = find_op() if error.kind == "lost" else ""
        return link_error(opening.runtime, target.command, error, target.seconds, op)


def _sendable(value: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array = np.asarray(value)
    if array.dtype.hasobject or array.dtype.kind in "SU":
        raise RuntimeError(f"an input of {array.dtype} cannot be sent: texts run on this machine")
    return array
