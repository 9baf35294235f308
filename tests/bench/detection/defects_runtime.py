"""
Defects of the runtime: the file is sound, what runs it is not.

Each is a runtime of one's own (`pytest_edgeq.tflite.runtimes.Runtime`), as a bridge to a board is:
it runs the file on LiteRT's kernels and spoils what comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from ai_edge_litert.interpreter import Interpreter

Arrays = dict[str, npt.NDArray[Any]]


class Bridge:
    """A session that spoils outputs."""

    def __init__(
        self, path: Path, signature: str | None, spoil: Callable[[Arrays, Arrays | None], Arrays]
    ) -> None:
        self._interpreter = Interpreter(model_path=str(path), num_threads=1)
        self._run = self._interpreter.get_signature_runner(signature)
        self._spoil = spoil
        self._last: Arrays | None = None

    def __call__(self, inputs: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        """Run one sample."""
        outputs = {name: np.array(value) for name, value in self._run(**inputs).items()}
        given = self._spoil({name: value.copy() for name, value in outputs.items()}, self._last)
        self._last = outputs
        return given


def honest(outputs: Arrays, _: Arrays | None) -> Arrays:
    """What the kernels gave."""
    return outputs


def _stale(outputs: Arrays, last: Arrays | None) -> Arrays:
    """The outputs of the sample before, as of a buffer that is read too early."""
    return {name: np.zeros_like(v) for name, v in outputs.items()} if last is None else last


def _zero(outputs: Arrays, _: Arrays | None) -> Arrays:
    return {name: np.zeros_like(value) for name, value in outputs.items()}


def _nan(outputs: Arrays, _: Arrays | None) -> Arrays:
    """One value of each float output."""
    for value in outputs.values():
        if np.issubdtype(value.dtype, np.floating):
            value.reshape(-1)[-1] = np.nan
    return outputs


def _off_by_one(outputs: Arrays, _: Arrays | None) -> Arrays:
    """Every code one too high, unless it is at the limit; floats by 1/128 of their range."""
    for value in outputs.values():
        if np.issubdtype(value.dtype, np.floating):
            value += np.float32(np.ptp(value) / 128)
        else:
            value[...] = np.minimum(value, np.iinfo(value.dtype).max - 1) + 1
    return outputs


SPOILT: dict[str, Callable[[Arrays, Arrays | None], Arrays]] = {
    "stale": _stale,
    "zero": _zero,
    "nan": _nan,
    "off-by-one": _off_by_one,
}

BOARD = "board"  # what the runner is called


class Switch:
    """A runtime of one's own: a runner that is as bad as `spoil` says when a file is opened."""

    def __init__(self) -> None:
        self.spoil: Callable[[Arrays, Arrays | None], Arrays] = honest

    def __call__(self, path: Path, signature: str | None) -> Bridge:
        """Open a file."""
        return Bridge(path, signature, self.spoil)


HONEST: tuple[str, ...] = ("builtin", "reference")
"""Another kernel set is no defect by itself: the gate must stay silent on these."""
