"""
A file to open on a runtime, and the protocols of a target and of an isolation.

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
    A file that is to be opened on a runtime.

    Attributes:
        source: Path or content of the file.
        graph: Its graph.
        signature: The entry point to run.
        runtime: Its name.
        threads: Of an interpreter.
        own: The runner of a user's own runtime; None for a built-in one.
        target: Where it runs; None for this machine.
        kernels: The built-in runtime whose kernels run it; a user's own runtime's name.
        modules: To name ops.
        keep: Keep every intermediate tensor.
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


class Isolation(Protocol):
    """Decides in which process a file runs."""

    def open(self, opening: Opening, /) -> Engine:
        """
        Open a file, here or in a child process.

        Raises:
            RuntimeError, ValueError: The kernels refuse the file, or ended the child.
        """

    def build(self, content: Buffer, /, *, foreign: bool) -> None:
        """
        Build an interpreter of a file that nothing has looked at, here or in a child process.

        Raises:
            RuntimeError, ValueError: The interpreter refuses the file, or ended the child.
        """


class Remote(Protocol):
    """
    A machine or CPU elsewhere, whose kernels run files.

    Attributes:
        name: By which runtimes name it.
        command: Starts it.
        seconds: Without an answer, after which it has failed.
        machine: What it says of itself; None before the first use.
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
        """End what was started for it; the next use starts it anew."""
