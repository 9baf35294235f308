"""
A conftest.py of a user with a runtime of its own; read by type checkers, never run.

A line with `# type: ignore[…]` is a mistake, which a type checker must refuse.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from pytest_edgeq import Edgeq
from pytest_edgeq.tflite.runtimes import Runtime, RuntimeSession

Arrays = dict[str, npt.NDArray[np.generic]]


class Phone:
    """A session on a device."""

    def __init__(self, path: Path, signature: str | None) -> None:
        self.path = path
        self.signature = signature

    def __call__(self, inputs: Arrays) -> Arrays:
        """Run one sample."""
        return inputs

    def close(self) -> None:
        """Disconnect."""


def phone(path: Path, signature: str | None) -> RuntimeSession:
    """Open a file."""
    return Phone(path, signature)


def pytest_edgeq_runtimes(config: pytest.Config) -> Mapping[str, Runtime]:
    """A class and a function are runtimes."""
    return {"phone": phone, "tablet": Phone}


edgeq = Edgeq(runtime="phone", threads=1, seed=1, runtimes={"phone": phone}, cache="off")
Edgeq(isolate="on", isolate_timeout=60, isolate_memory="4G")


def no_runtime(path: Path) -> RuntimeSession:
    """Takes no signature."""
    return Phone(path, None)


def no_session(path: Path, signature: str | None) -> bytes:
    """Returns what cannot be called."""
    return path.read_bytes()


first: Runtime = no_runtime  # type: ignore[assignment]
second: Runtime = no_session  # type: ignore[assignment]
Edgeq(runtimes=[phone])  # type: ignore[arg-type]
Edgeq(threads="2")  # type: ignore[arg-type]
Edgeq(isolate=True)  # type: ignore[arg-type]
