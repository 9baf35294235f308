"""
Protocols of a user's own runtime.

This module is cheap to import.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np


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
            Every output by the signature's output name, with the dtype and shape in the file: the
            codes of a quantized output. Anything else is an error.
        """


class Runtime(Protocol):
    """
    A user's own runtime: a phone over adb, a simulator, another interpreter.

    It is called when a file is first run on it, in the process that runs the test; before that, for
    the first run only, in a child process.
    """

    def __call__(self, path: Path, signature: str | None, /) -> RuntimeSession:
        """Open a file."""
