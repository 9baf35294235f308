"""Files that are open on a target."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.errors import UnrunnableError
from pytest_edgeq.runtimes.crashing_op import Inputs
from pytest_edgeq.runtimes.opening import Opening
from pytest_edgeq.runtimes.workers.link import Answer, Link, LinkError
from pytest_edgeq.runtimes.workers.remote_engine import FileHost, Message, RemoteEngine, RemoteFile
from pytest_edgeq.runtimes.workers.target_errors import link_error

if TYPE_CHECKING:
    from pytest_edgeq.runtimes.workers.target import Target


class TargetFiles(FileHost):
    """
    Opens files on a target; where the connection is lost, a request is sent once more.

    Engines of one file share what is open there, unless runs leave something behind.
    """

    is_far = True

    def __init__(self, target: Target) -> None:
        self._target = target

    def file(self, opening: Opening) -> RemoteFile:
        """Return a file to ask about, which may be one that is open."""
        file = RemoteFile(opening)
        if opening.keep or opening.graph.is_stateful:
            return file
        key = (opening.graph, opening.signature, opening.kernels, opening.threads)
        return self._target.share(key, file)

    def inputs(self, opening: Opening, inputs: Inputs) -> list[Any]:
        """
        Return the inputs in the order of the signature.

        Raises:
            RuntimeError: One cannot be sent.
        """
        return [_sendable(inputs[border.name]) for border in opening.signature.inputs]

    def send(self, message: Callable[[Link], Message], *, is_trial: bool = False) -> Answer:
        """Send a message to the target, as `Target.ask` does."""
        return self._target.ask(message, once=is_trial)

    def open_in(self, link: Link, file: RemoteFile, *, is_trial: bool = False) -> None:
        """Open a file there, as `Target.open_in` does."""
        opening, signature = file.opening, file.opening.signature
        head = {
            "kernels": opening.kernels,
            "threads": opening.threads,
            "keep": opening.keep,
            "signature": signature.key,
            "subgraph": signature.subgraph,
            "inputs": [[border.name, border.tensor.index] for border in signature.inputs],
            "outputs": [[border.name, border.tensor.index] for border in signature.outputs],
            "shapes": [list(border.tensor.shape) for border in signature.inputs],
            "has_free_shapes": signature.has_free_shapes,
        }
        self._target.open_in(link, file, head)

    def failure(
        self, opening: Opening, step: str, error: LinkError, find_op: Callable[[], str]
    ) -> UnrunnableError:
        """Report that the target is lost, with the op that ends it, or does not answer."""
        target = self._target
        op = find_op() if error.kind == "lost" else ""
        return link_error(opening.runtime, target.command, error, target.seconds, op)


def open_on(target: Target, opening: Opening) -> RemoteEngine:
    """
    Open a file on a target.

    Raises:
        UnrunnableError: The target does not start, ends, or does not answer.
        RuntimeError, ValueError: The kernels cannot allocate the file, or an output cannot be sent.
    """
    for border in opening.signature.outputs:
        if border.tensor.dtype in ("resource", "variant", "string"):
            raise RuntimeError(
                f"output {border.name!r} is {border.tensor.dtype}, which cannot be sent"
            )
    return RemoteEngine(TargetFiles(target), opening)


def _sendable(value: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array = np.asarray(value)
    if array.dtype.hasobject or array.dtype.kind in "SU":
        raise RuntimeError(f"an input of {array.dtype} cannot be sent: texts run on this machine")
    return array
