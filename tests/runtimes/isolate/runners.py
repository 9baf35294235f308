"""Runtimes that end their process, in one way or another, and files whose kernels do."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fixtures.tflite.writer import FileWriter, chain, constant, one_op

Arrays = Mapping[str, npt.NDArray[Any]]


def _hang() -> None:
    """Wait in native code, with the interpreter's lock held."""
    ctypes.PyDLL(None).pause()


def _allocate() -> None:
    kept = []
    while True:
        kept.append(np.empty(1 << 26, np.uint8))


def _loop() -> None:
    while True:
        pass


WAYS: dict[str, Callable[[], object]] = {
    "abort": os.abort,
    "segfault": lambda: ctypes.string_at(0),
    "loop": _loop,
    "hang": _hang,
    "allocate": _allocate,
    "leave": lambda: os._exit(0),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "nothing": lambda: None,
}


@dataclass(frozen=True)
class Ending:
    """A runtime that negates, and ends its process before."""

    way: str  # a key of `WAYS`
    step: str = "run"  # or `load`, or `close`

    def __call__(self, path: Path, signature: str | None) -> EndingSession:
        """Open a file of `negation`."""
        self.end_at("load")
        return EndingSession(self)

    def end_at(self, step: str) -> None:
        """End the process if this is the step."""
        if step == self.step:
            WAYS[self.way]()


@dataclass(frozen=True)
class EndingSession:
    """A file of `negation`, open on an `Ending`."""

    runtime: Ending

    def __call__(self, inputs: Arrays) -> Arrays:
        """Negate."""
        print(f"negating {len(inputs)} input", flush=True)
        self.runtime.end_at("run")
        return {"y": -inputs["x"]}

    def close(self) -> None:
        """Let go of the file."""
        self.runtime.end_at("close")


_BORDERS = {"inputs": "x", "outputs": "y", "key": "serving_default"}


def negation(width: int = 4) -> bytes:
    """Write a sound file of one op."""
    row = {"shape": (1, width)}
    return chain(("NEG", "x", "y"), **_BORDERS, x=row, y=row)


def segfault_at_run() -> bytes:
    """
    Write a whole file at which the builtin kernels die when they run it, behind a sound op.

    They sum squares of `radius` channels to either side, and read before the tensor where it is
    negative (LOCAL_RESPONSE_NORMALIZATION, ai-edge-litert 2.3.0).
    """
    fields = {"radius": -5, "bias": 1.0, "alpha": 1.0, "beta": 0.5}
    options = "LocalResponseNormalizationOptions", fields
    ops = ("NEG", "x", "a"), ("LOCAL_RESPONSE_NORMALIZATION", "a", "y", *options)
    image = {"shape": (1, 4, 4, 4)}
    return chain(*ops, **_BORDERS, x=image, a=image, y=image)


def equal_scores(width: int = 512) -> bytes:
    """Write a sound file at which the reference kernels abort: a SOFTMAX of 512 equal scores."""
    codes = {"dtype": "int8", "shape": (1, width)}
    return one_op(
        "SOFTMAX",
        [{**codes, "scales": [0.1]}],
        [{**codes, "scales": [1 / 256], "zero_points": [-128]}],
        "SoftmaxOptions",
        beta=1.0,
    )


def endless() -> bytes:
    """Write a whole file whose only op repeats for ever: WHILE x == x."""
    file, one = FileWriter(), {"dtype": "int32", "shape": (1,)}
    parts = {"condSubgraphIndex": 1, "bodySubgraphIndex": 2}
    file.graph().fill(("WHILE", "x", "y", "WhileOptions", parts), **_BORDERS, x=one, y=one)
    equal, add = ("EQUAL", "x x", "y", "EqualOptions"), ("ADD", "x x", "y", "AddOptions")
    truth = one | {"dtype": "bool"}
    file.graph("condition").fill(equal, inputs="x", outputs="y", x=one, y=truth)
    file.graph("body").fill(add, inputs="x", outputs="y", x=one, y=one)
    return file.content()


def unbounded() -> bytes:
    """Write a whole file whose output is as large as its input says."""
    x, y = {"dtype": "int32", "shape": (2,)}, {"shape": (1, 1), "signature": (-1, -1)}
    return chain(("FILL", "x one", "y", "FillOptions"), **_BORDERS, x=x, y=y, one=constant(1))
