"""The built-in runtimes: LiteRT's and TensorFlow's interpreters, and LiteRT's CompiledModel."""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import os
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.names import NEEDS_TENSORFLOW, printable, readable
from pytest_edgeq.runtimes.process_state import paused_collector
from pytest_edgeq.runtimes.workers.remote_worker import (
    RESOLVERS,
    OpenCompiled,
    OpenInterpreter,
)
from pytest_edgeq.tflite.boundary import numpy_dtype
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.mapped import Buffer
from pytest_edgeq.tflite.op_dtypes import entry_of
from pytest_edgeq.tflite.subgraph import Op, Signature, SignatureTensor

if TYPE_CHECKING:
    from pytest_edgeq.runtimes.workers.target import Target
    from pytest_edgeq.tflite.modules import ModulePaths
    from pytest_edgeq.tflite.runtimes import Runtime

Arrays = list[npt.NDArray[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Opening:
    """A file to open on a runtime."""

    graph: OpGraph
    signature: Signature  # the entry point to run
    runtime: str
    threads: int
    own: Runtime | None = None  # the runner of a user's own runtime; None for a built-in one
    target: Target | None = None  # the target that runs it; None for this machine
    kernels: str = ""  # the built-in runtime whose kernels run it; a user's own runtime's name
    modules: ModulePaths | None = None  # to name ops
    keep: bool = False  # whether to keep every intermediate tensor
    foreign: bool = False  # whether the file was made elsewhere
    is_part: bool = False  # whether its ops have run in a whole file, on the same kernels
    is_trial: bool = False  # whether its ops may be the ones that end a worker
    # interpreters by runtime that run all signatures of the file; None for one a signature
    interpreters: dict[str, Any] | None = None

    def of_copy(
        self, content: bytes, build: Callable[[Buffer], None] | None = None, **changes: Any
    ) -> Opening:
        """Return how a file that was written from parts of this one is opened."""
        graph = OpGraph.read(content, build)
        signature = graph.signatures[0]
        return replace(self, graph=graph, signature=signature, keep=False, **changes)

    def where(self, op: Op) -> str:
        """Name an op in texts."""
        return entry_of(self.graph, op, self.modules).where


class Engine:
    """Interface of an engine: it runs one signature of one file, for every sample."""

    def run(self, arrays: Arrays) -> Arrays:
        """Run one sample, and return its stored outputs; both are in the signature's order."""
        raise NotImplementedError

    def tensor(self, index: int) -> npt.NDArray[Any]:
        """Return a tensor of the last run; only of an engine that keeps all."""
        raise NotImplementedError

    def close(self) -> None:
        """Release everything except memory."""


class InterpreterEngine(OpenInterpreter, Engine):
    """An interpreter, allocated once."""

    def __init__(self, opening: Opening) -> None:
        source, signature, runtime = opening.graph.source, opening.signature, opening.runtime
        interpreters = None if opening.keep else opening.interpreters
        for io_tensor in signature.outputs:
            # The interpreter reads a handle's memory as numbers, and crashes.
            if io_tensor.tensor.dtype in ("resource", "variant"):
                raise _unreadable(io_tensor)
        in_memory = isinstance(source, bytes)
        options: Any = {"model_content": source} if in_memory else {"model_path": str(source)}
        options["num_threads"] = opening.threads
        if interpreters is not None and runtime in interpreters:
            interpreter = interpreters[runtime]
        elif runtime == "tensorflow":
            with warnings.catch_warnings():
                # TensorFlow 2.21 warns that its interpreter moves to LiteRT.
                warnings.simplefilter("ignore")
                interpreter = _tensorflow().lite.Interpreter(**options)
        else:
            from ai_edge_litert.interpreter import Interpreter, OpResolverType

            options["experimental_op_resolver_type"] = OpResolverType[RESOLVERS[runtime]]
            options["experimental_preserve_all_tensors"] = opening.keep
            interpreter = Interpreter(**options)
        if interpreters is not None:
            interpreters[runtime] = interpreter
        head = described(signature)
        if signature.key is not None and (signature.subgraph or interpreters is not None):
            keys = interpreter.get_signature_list()
            [head["signature"]] = (key for key in keys if readable(key) == signature.key)
        super().__init__(interpreter, head, is_shared=interpreters is not None)


def described(signature: Signature, graph: OpGraph | None = None) -> dict[str, Any]:
    """Describe a signature, as plain data: to `OpenInterpreter`, or to `OpenCompiled`."""
    head: dict[str, Any] = {
        "signature": signature.key,
        "subgraph": signature.subgraph,
        "inputs": [[each.name, each.tensor.index] for each in signature.inputs],
        "outputs": [[each.name, each.tensor.index] for each in signature.outputs],
        "shapes": [list(each.tensor.shape) for each in signature.inputs],
        "has_free_shapes": signature.has_free_shapes,
    }
    if graph is not None:
        head["position"] = graph.signatures.index(signature)
        head["dtypes"] = [_dtype_of(each).str for each in signature.outputs]
        head["free"] = [-1 in each.tensor.shape_signature for each in signature.inputs]
    return head


def as_dtype(array: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """Return an array of a file's dtype; bfloat16 is read as bytes, which are right."""
    wanted = numpy_dtype(dtype)
    return array if array.dtype.kind != "V" or wanted is None else array.view(wanted)


def _tensorflow() -> Any:
    """Import TensorFlow (seconds, and 400 MB), which only this runtime needs."""
    if importlib.util.find_spec("tensorflow") is None:
        raise ModuleNotFoundError(NEEDS_TENSORFLOW)
    with paused_collector():
        return importlib.import_module("tensorflow")


class CompiledEngine(OpenCompiled, Engine):
    """
    LiteRT's CompiledModel on the CPU, with buffers for each shape of input.

    Files are refused for which ai-edge-litert 2.3.0 leaves an output unwritten (one that is an
    input, is listed twice, or is computed by no op) or whose shape depends on values.
    """

    def __init__(self, opening: Opening) -> None:
        from ai_edge_litert.compiled_model import CompiledModel
        from ai_edge_litert.options import CpuOptions, Options

        graph, signature = opening.graph, opening.signature
        source = graph.source
        check_outputs_written(graph, signature)
        options = Options(cpu_options=CpuOptions(num_threads=opening.threads))
        make = CompiledModel.from_buffer if isinstance(source, bytes) else CompiledModel.from_file
        content = source if isinstance(source, bytes) else str(source)
        model = make(content, environment=_environment(), options=options)
        info = model.get_signature_by_index(graph.signatures.index(signature))
        for side, io_tensors in (("inputs", signature.inputs), ("outputs", signature.outputs)):
            names = [io_tensor.name for io_tensor in io_tensors]
            known = [printable(name) for name in info[side]]
            if len(known) != len(names) or (signature.key is not None and known != names):
                raise RuntimeError(f"CompiledModel knows the {side} {known}, the file {names}")
        super().__init__(model, described(signature, graph))
        _close_stderr_behind_python()
        self._opening, self._has_room, self._checked = opening, True, False

    def run(self, arrays: Arrays) -> Arrays:
        """Run one sample."""
        if self.fit(arrays):
            self._has_room = self._checked = False
        if not self._has_room:
            self._check_room(arrays)
            self._has_room = True
        outputs = super().run(arrays)
        if not self._checked:
            # It notices that a shape depends on values only after the first run.
            if self.output_shapes() != self.sizes:
                raise RuntimeError(_SHAPE_BY_VALUES)
            self._checked = True
        return [
            as_dtype(array, io_tensor.tensor.dtype)
            for array, io_tensor in zip(outputs, self._opening.signature.outputs, strict=True)
        ]

    @functools.cached_property
    def _interpreter(self) -> InterpreterEngine:
        return InterpreterEngine(replace(self._opening, runtime="xnnpack", interpreters=None))

    def _check_room(self, arrays: Arrays) -> None:
        """
        Compare the outputs' buffers with the results for inputs of another shape.

        If a file computes a length by SHAPE, as Keras does, CompiledModel writes past the end of
        its memory, and the process crashes sooner or later (ai-edge-litert 2.3.0).
        """
        made, outputs = self._interpreter.run(arrays), self._opening.signature.outputs
        for io_tensor, array, size in zip(outputs, made, self.sizes, strict=True):
            if array.shape != size:
                raise RuntimeError(
                    f"Failed to register output: {io_tensor.name!r} has room for {list(size)}, and "
                    f"becomes {list(array.shape)}"
                )


_SHAPE_BY_VALUES = "Failed to register output: its shape is another after the run"


def _dtype_of(io_tensor: SignatureTensor) -> np.dtype[Any]:
    dtype = numpy_dtype(io_tensor.tensor.dtype)
    if dtype is None:
        raise _unreadable(io_tensor)
    return dtype


def _unreadable(io_tensor: SignatureTensor) -> RuntimeError:
    what = f"output {io_tensor.name!r} is {io_tensor.tensor.dtype}"
    return RuntimeError(f"{what}, which cannot be read here")


def check_outputs_written(graph: OpGraph, signature: Signature) -> None:
    """Raise a RuntimeError if CompiledModel leaves an output unwritten (ai-edge-litert 2.3.0)."""
    io_tensors = {each.tensor.index: each for each in (*signature.inputs, *signature.outputs)}
    names = Counter(each.tensor.name for each in io_tensors.values())
    if signature.key is None and max(names.values(), default=0) > 1:
        raise RuntimeError(
            f"CompiledModel identifies tensors by name: {max(names.values())} inputs or outputs "
            f"are called {max(names, key=lambda name: names[name])!r}"
        )
    computed = graph.subgraphs[signature.subgraph].producer
    times = Counter(each.tensor.index for each in signature.outputs)
    inputs = {each.tensor.index for each in signature.inputs}
    for io_tensor in signature.outputs:
        tensor = io_tensor.tensor
        if tensor.index in inputs:
            problem = "is an input, too"
        elif times[tensor.index] > 1:
            problem = f"is listed {times[tensor.index]} times"
        elif tensor.index not in computed and not tensor.is_constant:
            # The interpreter's own words at the run.
            raise RuntimeError(
                f"Tensor data is null: output {io_tensor.name!r} is computed by no op"
            )
        else:
            continue
        raise RuntimeError(
            f"CompiledModel leaves memory unwritten: output {io_tensor.name!r} {problem}"
        )


@functools.cache
def _environment() -> Any:
    """
    Return one environment for all models of the process, with no folders of plugins to search.

    It is never destroyed: it writes `DestroyAccelerator` to stderr then (ai-edge-litert 2.3.0).
    """
    from ai_edge_litert.environment import Environment, EnvironmentOptions

    package = importlib.util.find_spec("ai_edge_litert")
    folder = Path(*(package.submodule_search_locations or [])) if package else Path()
    nowhere = dict.fromkeys(("compiler_plugin_path", "dispatch_library_path"), str(folder / "none"))
    options = EnvironmentOptions(runtime_path=str(folder), **nowhere)
    environment = Environment.create(options=options)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(environment.capsule))
    return environment


@functools.cache
def _close_stderr_behind_python() -> None:
    """
    Have the process close stderr when Python has ended, before older native objects are destroyed.

    The environment that the library makes for its first buffers writes to it, too.
    """
    process, nowhere = ctypes.CDLL(None), os.open(os.devnull, os.O_WRONLY)
    # The later one runs first; `dup` uses the lowest free descriptor, the one just closed.
    for function, argument in ((process.dup, nowhere), (process.close, 2)):
        process.__cxa_atexit(function, ctypes.c_void_p(argument), None)
