"""
What is opened on a runtime, and what a user's own runtime, a target and an isolation must be.

This module is cheap to import.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np

    from pytest_edgeq.numerics.target_machine import TargetMachine
    from pytest_edgeq.tflite.engines import Engine, Source
    from pytest_edgeq.tflite.graph import OpGraph
    from pytest_edgeq.tflite.mapped import Buffer
    from pytest_edgeq.tflite.modules import ModulePaths
    from pytest_edgeq.tflite.subgraph import Signature


class RuntimeSession(Protocol):
    """
    One opened file of a user's own runtime.

    It may also have a method `close()`, called once when the file is no longer needed, and before
    the file is opened anew because it keeps state from run to run.
    """

    def __call__(
        self, inputs: dict[str, np.ndarray[Any, Any]], /
    ) -> Mapping[str, np.ndarray[Any, Any]]:
        """
        Run one sample.

        Returns:
            Every output by the signature's output name, of the dtype and shape that the file gives:
            the codes of a quantized output. Anything else is an error.
        """


class Runtime(Protocol):
    """
    A user's own runtime: a phone over adb, a simulator, another interpreter.

    It is called when a file is first run on it, not before, in the process that runs the test; and
    before that, for the first run alone, in a child process.
    """

    def __call__(self, path: Path, signature: str | None, /) -> RuntimeSession:
        """Open a file."""


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
