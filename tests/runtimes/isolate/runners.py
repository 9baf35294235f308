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

from fixtures.tflite.writer import FileWriter, one_op

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


def _chain(shape: tuple[int, ...], *ops: tuple[Any, ...], **fields: Any) -> bytes:
    """Write a file of ops of one input; the fields are options of the last."""
    file = FileWriter()
    graph = file.graph()
    x, *made = tensors = [graph.tensor("float32", shape) for _ in range(len(ops) + 1)]
    for (name, *options), taken, result in zip(ops, tensors, made, strict=False):
        graph.op(name, [taken], [result], *options, **(fields if options else {}))
    graph.borders([x], [made[-1]])
    file.signature("serving_default", [("x", x)], [("y", made[-1])])
    return file.content()


def negation(width: int = 4) -> bytes:
    """Write a sound file of one op."""
    return _chain((1, width), ("NEG",))


def segfault_at_run() -> bytes:
    """
    Write a whole file at which the builtin kernels die when they run it, behind a sound op.

    They sum squares of `radius` channels to either side, and read before the tensor where it is
    negative (LOCAL_RESPONSE_NORMALIZATION, ai-edge-litert 2.3.0).
    """
    normalize = ("LOCAL_RESPONSE_NORMALIZATION", "LocalResponseNormalizationOptions")
    fields = {"radius": -5, "bias": 1.0, "alpha": 1.0, "beta": 0.5}
    return _chain((1, 4, 4, 4), ("NEG",), normalize, **fields)


def abort_on_reference() -> bytes:
    """Write a sound file at which the reference kernels abort: a row of 512 equal scores."""
    codes = {"dtype": "int8", "shape": (1, 512)}
    return one_op(
        "SOFTMAX",
        [{**codes, "scales": [0.1]}],
        [{**codes, "scales": [1 / 256], "zero_points": [-128]}],
        "SoftmaxOptions",
        beta=1.0,
    )


def endless() -> bytes:
    """Write a whole file whose only op repeats for ever: WHILE x == x."""
    file = FileWriter()
    graph = file.graph()
    x, y = (graph.tensor("int32", (1,)) for _ in range(2))
    graph.op("WHILE", [x], [y], "WhileOptions", condSubgraphIndex=1, bodySubgraphIndex=2)
    graph.borders([x], [y])
    condition = file.graph("condition")
    here, is_equal = condition.tensor("int32", (1,)), condition.tensor("bool", (1,))
    condition.op("EQUAL", [here, here], [is_equal], "EqualOptions")
    condition.borders([here], [is_equal])
    body = file.graph("body")
    before, after = (body.tensor("int32", (1,)) for _ in range(2))
    body.op("ADD", [before, before], [after], "AddOptions")
    body.borders([before], [after])
    file.signature("serving_default", [("x", x)], [("y", y)])
    return file.content()


def unbounded() -> bytes:
    """Write a whole file whose output is as large as its input says."""
    file = FileWriter()
    graph = file.graph()
    shape = graph.tensor("int32", (2,))
    value = graph.tensor("float32", (), data=np.array(1, np.float32))
    y = graph.tensor("float32", (1, 1), signature=(-1, -1))
    graph.op("FILL", [shape, value], [y], "FillOptions")
    graph.borders([shape], [y])
    file.signature("serving_default", [("shape", shape)], [("y", y)])
    return file.content()
