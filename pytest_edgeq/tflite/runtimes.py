"""Run a `.tflite` file: one interpreter a file, a set of kernels and a signature."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.presets import RUNTIMES
from pytest_edgeq.suggest import nearest
from pytest_edgeq.tflite.graph import OpGraph, Signature
from pytest_edgeq.tflite.modules import ModuleTree
from pytest_edgeq.tflite.op_dtypes import OpDtypeMap
from pytest_edgeq.tflite.source import MappedFile

__all__ = ["Runner", "check_runtime"]

# A user's test shows the user's line and the message, not how we came to it.
__tracebackhide__ = True

_RESOLVERS = {
    "xnnpack": "BUILTIN",
    "builtin": "BUILTIN_WITHOUT_DEFAULT_DELEGATES",
    "reference": "BUILTIN_REF",
}

# What the kernels' own words mean, and the way out.
_KNOWN_REFUSALS = (
    (
        re.compile(r"embedding_lookup\.cc.*zero_point"),
        "the kernel takes only symmetric tables (zero point 0) and this one is not. Dynamic PT2E "
        "quantization writes such tables: quantize the model with a recipe "
        "(recipe_dynamic_wi8_afp32), or keep the embedding in float.",
    ),
    (
        re.compile(r"activations\.cc.*scale not near"),
        "the int8 softmax and sigmoid kernels write fixed output parameters (scale 1/256, zero "
        "point −128): annotate the output with FixedQParamsQuantizationSpec(scale=1/256, "
        "zero_point=-128), or leave the op in float.",
    ),
    (
        re.compile(r"Tensor data is null"),
        "the signature names an output that no op of the file computes: the step that wrote the "
        "file broke it.",
    ),
    (
        re.compile(r"in XNNPACK delegate"),
        "the XNNPACK delegate takes no tensor of this kind: choose another runtime "
        "(runtime='builtin'), and mind that a device that runs XNNPACK will refuse the file.",
    ),
    (
        re.compile(r"Didn't find op for builtin opcode|unresolved custom op"),
        "these kernels do not have the op, or not in this version: choose another runtime.",
    ),
)


def check_runtime(runtime: str) -> str:
    """
    Give the runtime back if there is one of this name.

    Raises:
        ValueError: There is none; lists those that there are.
    """
    if runtime not in RUNTIMES:
        raise ValueError(
            f"unknown runtime {runtime!r}{nearest(str(runtime), RUNTIMES)}; "
            f"valid: {', '.join(RUNTIMES)}"
        )
    return runtime


class Runner:
    """
    One interpreter, allocated once and used for every sample.

    Args:
        source: Path or content of the file.
        graph: Its graph.
        signature: The entry point to run.
        runtime: `xnnpack`, `builtin` (optimized kernels without a delegate) or `reference`.
        threads: Of the interpreter.
        modules: To name the op that refuses.

    Raises:
        RuntimeError: The kernels cannot allocate the file; says which op and why.
    """

    def __init__(
        self,
        source: Path | bytes,
        graph: OpGraph,
        signature: Signature,
        runtime: str,
        threads: int = 1,
        modules: ModuleTree | None = None,
    ) -> None:
        from ai_edge_litert.interpreter import Interpreter, OpResolverType

        where: dict[str, Any] = (
            {"model_content": source} if isinstance(source, bytes) else {"model_path": str(source)}
        )
        resolver = OpResolverType[_RESOLVERS[check_runtime(runtime)]]
        self._signature = signature
        self._graph = graph
        self._runtime = runtime
        self._modules = modules
        self._allocated = {border.tensor.index: border.tensor.shape for border in signature.inputs}
        try:
            self._interpreter = Interpreter(
                **where,
                num_threads=threads,
                experimental_op_resolver_type=resolver,
            )
            self._interpreter.allocate_tensors()
        except (RuntimeError, ValueError) as error:
            raise RuntimeError(self._refusal("load", error)) from None
        # Its own runner sizes and allocates everything again at each call, so it is only for the
        # signatures that nothing else can run.
        self._runner = (
            None
            if signature.key is None or signature.subgraph == 0
            else self._interpreter.get_signature_runner(signature.key)
        )

    def run(self, inputs: Mapping[str, npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
        """
        Run one sample.

        Args:
            inputs: Arrays of the file's own dtypes by the signature's input names.

        Returns:
            The outputs as the file gives them, in the model's own order.

        Raises:
            RuntimeError: The kernels fail; says which op and why.
        """
        try:
            return self._run(inputs)
        except (RuntimeError, ValueError, KeyError) as error:
            # KeyError: the signature has no name for an output of its subgraph.
            raise RuntimeError(self._refusal("run", error)) from None

    def _run(self, inputs: Mapping[str, npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
        if self._runner is not None:
            outputs = self._runner(**inputs)
            return [outputs[border.name] for border in self._signature.outputs]
        interpreter = self._interpreter
        shapes = {
            border.tensor.index: np.shape(inputs[border.name]) for border in self._signature.inputs
        }
        if shapes != self._allocated:
            # Not allocated with these shapes, should the kernels refuse them.
            self._allocated = {}
            for index, shape in shapes.items():
                interpreter.resize_tensor_input(index, shape)
            interpreter.allocate_tensors()
            self._allocated = shapes
        for border in self._signature.inputs:
            interpreter.set_tensor(border.tensor.index, inputs[border.name])
        interpreter.invoke()
        return [interpreter.get_tensor(border.tensor.index) for border in self._signature.outputs]

    def _refusal(self, what: str, error: Exception) -> str:
        return _refusal(what, str(error), self._graph, self._runtime, self._modules)


def _refusal(
    what: str, error: str, graph: OpGraph, runtime: str, modules: ModuleTree | None
) -> str:
    node = re.search(r"Node number (\d+) \((\w+)\)", error)
    tensor = re.search(r"of tensor (\d+) in XNNPACK delegate", error)
    where = ""
    if tensor is not None:
        # The delegate names a tensor of the first subgraph, and itself as the node.
        users = (op.index for op in graph.subgraphs[0].ops if int(tensor[1]) in op.inputs)
        user = next(users, None)
        entries = [e for e in OpDtypeMap(graph, modules) if (e.subgraph, e.index) == (0, user)]
        where = "".join(f": {entry.where}" for entry in entries)
    elif node is not None:
        index, name = int(node[1]), node[2]
        entries = [e for e in OpDtypeMap(graph, modules).ops(name) if e.index == index]
        # Kernels number the ops of each subgraph from 0, and delegates behind the last.
        where = f": {entries[0].where}" if len(entries) == 1 else f": {name} (op {index})"
    meaning = next((text for symptom, text in _KNOWN_REFUSALS if symptom.search(error)), None)
    lines = [f"the {runtime} runtime cannot {what} the .tflite file{where}"]
    if meaning is not None:
        lines.append(f"cause: {meaning}")
    lines.append(f"the kernels said: {error.strip()}")
    return "\n".join(lines)


def source_of(graph: OpGraph) -> Path | bytes:
    """What an interpreter opens: the path of a mapped file, the content of one held in memory."""
    buffer = graph.buffer
    return buffer.path if isinstance(buffer, MappedFile) else buffer
