"""
A file to open on a runtime, and the protocols of remote openers.

This module is cheap to import.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pytest_edgeq.numerics.target_machine import TargetMachine
    from pytest_edgeq.runtimes.engines import Engine, Source
    from pytest_edgeq.tflite.graph import OpGraph
    from pytest_edgeq.tflite.mapped import Buffer
    from pytest_edgeq.tflite.modules import ModulePaths
    from pytest_edgeq.tflite.runtimes import Runtime
    from pytest_edgeq.tflite.subgraph import Signature


@dataclass(frozen=True, slots=True, eq=False)
class Opening:
    """
    A file to open on a runtime.

    Attributes:
        source: Path or content of the file.
        graph: Its graph.
        signature: The entry point to run.
        runtime: Its name.
        threads: Threads of an interpreter.
        own: The runner of a user's own runtime; None for a built-in one.
        target: The target that runs it; None for this machine.
        kernels: The built-in runtime whose kernels run it; a user's own runtime's name.
        modules: To name ops.
        keep: Whether to keep every intermediate tensor.
        foreign: Whether the file was made elsewhere.
    """

    source: Source
    graph: OpGraph
    signature: Signature
    runtime: str
    threads: int
    own: Runtime | None = None
    target: Remote | None = None
    kernels: str = ""
    modules: ModulePaths | None = None
    keep: bool = False
    foreign: bool = False


class FileOpener(Protocol):
    """A policy that opens files in this process or in a child process."""

    def open(self, opening: Opening, /) -> Engine:
        """
        Open a file, here or in a child process.

        Raises:
            RuntimeError, ValueError: The kernels refuse the file, or ended the child.
        """

    def build(self, content: Buffer, /, *, foreign: bool) -> None:
        """
        Build an interpreter of an unchecked file, here or in a child process.

        Raises:
            RuntimeError, ValueError: The interpreter refuses the file, or ended the child.
        """


class Remote(Protocol):
    """
    A machine or CPU elsewhere, whose kernels run files.

    Attributes:
        name: Its name in runtimes.
        command: The command that starts it.
        seconds: Timeout of its answers.
        machine: Its description of itself; None before the first use.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    machine: TargetMachine | None

    def start(self) -> TargetMachine:
        """
        Start it, unless it runs.

        Raises:
            RuntimeError: It does not start.
        """

    def open(self, opening: Opening, /) -> Engine:
        """
        Open a file there.

        Raises:
            RuntimeError, ValueError: The kernels refuse the file, or the machine does not answer.
        """

    def close(self) -> None:
        """End its process; the next use starts it anew."""
