"""Run a `.tflite` file: one engine for a file, a runtime and a signature."""

from __future__ import annotations

import functools
import re
import tempfile
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.errors import CopyError, CrashedError, UnreadableError, UnrunnableError
from pytest_edgeq.names import GPU_KERNELS
from pytest_edgeq.runtimes.engines import (
    Arrays,
    CompiledEngine,
    Engine,
    InterpreterEngine,
    Opening,
)
from pytest_edgeq.runtimes.gpu_refusals import gpu_refusal
from pytest_edgeq.runtimes.refusals import refusal
from pytest_edgeq.runtimes.registry import Runtimes
from pytest_edgeq.runtimes.unsafe import unsafe_ops
from pytest_edgeq.tflite.boundary import numpy_dtype
from pytest_edgeq.tflite.layout import fits
from pytest_edgeq.tflite.mapped import Source
from pytest_edgeq.tflite.runtimes import Runtime
from pytest_edgeq.tflite.subgraph import Op, Signature, SignatureTensor

# Kernels without a delegate, which would keep intermediate tensors in its own memory.
KEEPING = ("builtin", "reference")


def open_here(opening: Opening) -> Engine:
    """Open a file in this process, or on its target."""
    if opening.target is not None:
        return opening.target.open(opening)
    if opening.own is not None:
        return _OwnEngine(opening.own, opening.graph.source, opening.signature)
    return CompiledEngine(opening) if opening.runtime == "compiled" else InterpreterEngine(opening)


@dataclass(frozen=True, slots=True, eq=False)
class Copied:
    """The origin of a file that was written from the user's."""

    what: str  # name of the file in texts
    # by subgraph and index of its ops, their names in the user's file
    ops: Mapping[tuple[int, int], str] = field(default_factory=dict)
    is_part: bool = False  # whether the ops have run in the whole file before


class Runner:
    """One file on one runtime, opened once and used for every sample."""

    def __init__(self, opening: Opening, runtimes: Runtimes, copied: Copied | None = None) -> None:
        self._opening, self._runtimes, self._copied = opening, runtimes, copied
        runtime, kernels = opening.runtime, opening.kernels
        if opening.keep and kernels not in KEEPING:
            keeping = ", ".join(n for n in runtimes.names if runtimes.kernels_of(n) in KEEPING)
            raise ValueError(
                f"the {runtime} runtime keeps no intermediate tensors; these do: {keeping}"
            )
        self._file = "the .tflite file" if copied is None else copied.what
        try:
            for op, cause in () if runtime in runtimes.own else unsafe_ops(opening.graph, kernels):
                text = f"cannot load {self._file}: {self._where(op)}\ncause: {cause}"
                raise UnrunnableError(kernels, text)
            self._engine = self._open(opening)
        except (RuntimeError, ValueError, MemoryError) as error:
            raise self._refusal("load", error, []) from error.__cause__
        if opening.own is not None:
            runtimes.opened(self._engine)

    def run(self, inputs: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        """Run one sample."""
        arrays = [np.asarray(inputs[each.name]) for each in self._opening.signature.inputs]
        try:
            return self._engine.run(arrays)
        except (RuntimeError, ValueError, KeyError, MemoryError) as error:
            # KeyError: the signature has no name for an output of its subgraph.
            raise self._refusal("run", error, arrays) from error.__cause__

    def tensor(self, index: int) -> npt.NDArray[Any]:
        """
        Return a tensor after the last run, if tensors are kept, or raise an UnreadableError.

        Complex numbers are returned as pairs of floats, whose errors can be measured.
        """
        subgraph = self._opening.graph.subgraphs[self._opening.signature.subgraph]
        tensor = subgraph.tensors[index]
        if tensor.dtype in ("resource", "variant"):
            raise UnreadableError(f"tensor {tensor.name!r} is {tensor.dtype}: it is not read")
        is_stored = index not in subgraph.producer and index not in subgraph.inputs
        if is_stored and 0 in tensor.shape and not tensor.is_variable:
            # The empty shape that RESHAPE makes a scalar by: interpreters have no memory for it.
            return np.empty(tensor.shape, numpy_dtype(tensor.dtype))
        value = self._engine.tensor(index)
        return value[..., np.newaxis].view(np.float32) if value.dtype == np.complex64 else value

    def close(self) -> None:
        """Release everything except memory, such as a user's own session."""
        self._engine.close()

    def _open(self, opening: Opening) -> Engine:
        isolation = self._runtimes.isolation
        return open_here(opening) if isolation is None else isolation.open(opening)

    def _refusal(self, what: str, error: Exception, arrays: Arrays) -> UnrunnableError | CopyError:
        what, graph, runtime = f"{what} {self._file}", self._opening.graph, self._opening.runtime
        if isinstance(error, UnrunnableError):
            refused = error
        elif isinstance(error, _OwnError):
            refused = UnrunnableError(runtime, f"cannot {what}{error}")
        elif self._opening.kernels in GPU_KERNELS:
            load = functools.partial(self._load, kernels=self._opening.kernels)
            refused = gpu_refusal(what, str(error), graph, runtime, self._where, load)
        else:
            message = (runtime == "compiled" and self._interpreter_error(arrays)) or str(error)
            refused = refusal(what, message, graph, runtime, self._where, self._load)
        if self._copied is None:
            return refused
        if isinstance(refused, CrashedError):
            first = refused.text.splitlines()[0]
            return CopyError(f"the {refused.runtime} runtime {first} ({self._file})")
        # Its ops have other numbers.
        return CopyError(re.sub(r" ?Node number \d+ \(\w+\) failed to \w+\.?", "", str(refused)))

    def _where(self, op: Op) -> str:
        if self._copied is not None:
            return self._copied.ops.get((op.subgraph, op.index), op.name)
        return self._opening.where(op)

    def _load(self, content: bytes, kernels: str) -> Engine:
        build = self._runtimes.builder(foreign=self._opening.foreign)
        runtime = kernels if self._opening.target is None else self._opening.runtime
        changes = {"runtime": runtime, "kernels": kernels, "threads": 1}
        return self._open(self._opening.of_copy(content, build, **changes))

    def _interpreter_error(self, arrays: Arrays) -> str:
        """Return the interpreter's error: CompiledModel's names neither op nor cause (2.3.0)."""
        try:
            engine = self._open(replace(self._opening, runtime="xnnpack", kernels="xnnpack"))
            if arrays:
                engine.run(arrays)
        except (RuntimeError, ValueError, KeyError) as error:
            return str(error)
        return ""


class _OwnError(RuntimeError):
    """A user's own runtime failed, or returned an invalid output."""


class _OwnEngine(Engine):
    """A session of a user's own runtime, whose outputs are checked."""

    def __init__(self, runner: Runtime, source: Source, signature: Signature) -> None:
        self._signature = signature
        path, remove = on_disk(source)
        try:
            self._session = runner(path, signature.key)
        except Exception as error:
            remove()
            raise _OwnError(_raised(error)) from error
        # Also if nobody closes it: when the model is collected, at the latest at exit.
        self._close = weakref.finalize(self, _close, self._session, remove)
        if not callable(self._session):
            raise _OwnError(
                f": the runner returned {type(self._session).__name__}, expected a session to call "
                "with the inputs by name"
            )

    def run(self, arrays: Arrays) -> Arrays:
        """Run one sample and check the outputs."""
        if not self._close.alive:
            raise _OwnError(": its session was closed; load or quantize the model again")
        pairs = zip(self._signature.inputs, arrays, strict=True)
        try:
            outputs = self._session({each.name: np.array(value) for each, value in pairs})
        except Exception as error:
            raise _OwnError(_raised(error)) from error
        if not isinstance(outputs, Mapping):
            raise _OwnError(
                f": the runner returned {type(outputs).__name__}, expected a dict of arrays by the "
                "outputs' names"
            )
        wanted = [each.name for each in self._signature.outputs]
        if set(outputs) != set(wanted):
            raise _OwnError(
                f": the runner returned the outputs {list(outputs)}, the file has {wanted}"
            )
        return [_checked(outputs[each.name], each) for each in self._signature.outputs]

    def close(self) -> None:
        """Close the session, once."""
        self._close()


def _raised(error: Exception) -> str:
    return f": the runner raised {type(error).__name__}: {error}"


def _close(session: object, remove: Callable[[], object]) -> None:
    try:
        getattr(session, "close", lambda: None)()
    finally:
        remove()


def on_disk(source: Source) -> tuple[Path, Callable[[], object]]:
    """Return the path of a file, written where it is held in memory, and how to remove that."""
    if isinstance(source, Path):
        return source, lambda: None
    folder = tempfile.TemporaryDirectory(prefix="edgeq-")
    path = Path(folder.name) / "model.tflite"
    path.write_bytes(source)
    return path, folder.cleanup


def _checked(value: object, io_tensor: SignatureTensor) -> npt.NDArray[Any]:
    """Return a copy of an output of the right dtype and shape."""
    tensor = io_tensor.tensor
    dtype = numpy_dtype(tensor.dtype)
    shape = tensor.shape_signature
    expected = f": output {io_tensor.name!r}: expected {tensor.dtype} {list(shape)}"
    if not isinstance(value, np.ndarray) or isinstance(value, np.ma.MaskedArray):
        raise _OwnError(f"{expected}, the runner returned {type(value).__name__}, no numpy array")
    if value.dtype != dtype or not fits(value.shape, shape):
        raise _OwnError(f"{expected}, the runner returned {value.dtype} {list(value.shape)}")
    return np.array(value)
