"""A file that runs on a target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.errors import CrashedError
from pytest_edgeq.runtimes.crashing_op import Inputs, crashing_op_text
from pytest_edgeq.runtimes.engines import Arrays, Engine, Source
from pytest_edgeq.runtimes.workers.target_errors import LOST
from pytest_edgeq.tflite.boundary import numpy_dtype
from pytest_edgeq.tflite.graph import OpGraph

if TYPE_CHECKING:
    from pytest_edgeq.runtimes.opening import Opening
    from pytest_edgeq.runtimes.workers.target import Target
    from pytest_edgeq.tflite.subgraph import Tensor


class FarFile:
    """A file as it is opened on the far side; it is let go of there when this object goes."""

    def __init__(self, opening: Opening, kernels: str) -> None:
        signature = opening.signature
        self.source: Source = opening.source
        self.head: dict[str, Any] = {
            "kernels": kernels,
            "threads": opening.threads,
            "keep": opening.keep,
            "signature": signature.key,
            "subgraph": signature.subgraph,
            "inputs": [[border.name, border.tensor.index] for border in signature.inputs],
            "outputs": [[border.name, border.tensor.index] for border in signature.outputs],
            "shapes": [list(border.tensor.shape) for border in signature.inputs],
            "has_free_shapes": signature.has_free_shapes,
        }


class TargetEngine(Engine):
    """
    A file that is open on a target.

    Engines of one file share what is open there, unless runs leave something behind.

    Raises:
        UnrunnableError: The target does not start, ends, or does not answer.
        RuntimeError, ValueError, MemoryError: The kernels cannot allocate the file, or a tensor
            of the file cannot be read.
    """

    def __init__(self, target: Target, opening: Opening) -> None:
        self._target, self._opening = target, opening
        for border in opening.signature.outputs:
            if border.tensor.dtype in ("resource", "variant", "string"):
                raise RuntimeError(
                    f"output {border.name!r} is {border.tensor.dtype}, which cannot be sent"
                )
        file = FarFile(opening, opening.kernels)
        self._is_stateful = opening.graph.is_stateful
        if not opening.keep and not self._is_stateful:
            key = (opening.graph, opening.signature, opening.kernels, opening.threads)
            file = target.share(key, file)
        self._file = file
        self._has_run = False
        self._kept: dict[int, npt.NDArray[Any]] = {}
        self._constants: dict[int, npt.NDArray[Any]] = {}
        try:
            target.load(opening.runtime, file)
        except CrashedError as error:
            raise self._with_op(error, {}) from None

    def run(self, inputs: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        """
        Run one sample.

        Raises:
            UnrunnableError: The target ends, or does not answer.
            RuntimeError, ValueError, KeyError, MemoryError: The kernels fail.
        """
        needs_state = self._is_stateful and self._has_run
        self._kept.clear()
        try:
            _, made = self._target.ask(
                self._opening.runtime,
                self._file,
                {"what": "run"},
                in_order(self._opening, inputs),
                needs_state=needs_state,
            )
        except CrashedError as error:
            raise (error if needs_state else self._with_op(error, inputs)) from None
        self._has_run = True
        return [
            _as_dtype(array, border.tensor.dtype)
            for array, border in zip(made, self._opening.signature.outputs, strict=True)
        ]

    def tensor(self, index: int) -> npt.NDArray[Any]:
        """
        Return a tensor as the last run left it; all of them travel at the first call.

        Raises:
            UnrunnableError: The target has ended since the run.
            ValueError: It has no memory.
        """
        tensors = self._opening.graph.subgraphs[self._opening.signature.subgraph].tensors
        if tensors[index].is_constant:
            if index not in self._constants:
                self._constants |= self._read([tensors[index]])
            found = self._constants
        else:
            if not self._kept:
                computed = [
                    tensor
                    for tensor in tensors
                    # A resource must not be asked for: the process dies.
                    if not tensor.is_constant and numpy_dtype(tensor.dtype) is not None
                ]
                self._kept = self._read(computed)
            found = self._kept
        if index not in found:
            raise ValueError(f"tensor {index} cannot be read")
        return found[index].copy()

    def _with_op(self, error: CrashedError, inputs: Mapping[str, npt.NDArray[Any]]) -> CrashedError:
        """Add to an error which op it is, as far as cut files tell it."""
        if not error.told.startswith(LOST):
            return error

        def ends(content: bytes, given: Inputs | None) -> bool:
            graph = OpGraph.read(content)
            [signature] = graph.signatures
            opening = replace(
                self._opening, source=content, graph=graph, signature=signature, keep=False
            )
            return self._target.ends(opening, given)

        op = crashing_op_text(self._opening, "run" if inputs else "load", inputs, ends)
        first, rest = error.told.split("\n", 1)
        return CrashedError(error.runtime, f"{first}\n{op}\n{rest}")

    def _read(self, tensors: Sequence[Tensor]) -> dict[int, npt.NDArray[Any]]:
        dtypes = {tensor.index: tensor.dtype for tensor in tensors}
        answer, made = self._target.ask(
            self._opening.runtime,
            self._file,
            {"what": "tensors", "indices": list(dtypes)},
            needs_state=True,
        )
        return {
            index: _as_dtype(array, dtypes[index])
            for index, array in zip(answer["indices"], made, strict=True)
        }


def in_order(opening: Opening, inputs: Mapping[str, npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
    """
    Return the inputs of a file as they are sent.

    Raises:
        RuntimeError: One cannot be sent.
    """
    return [_sendable(inputs[border.name]) for border in opening.signature.inputs]


def _sendable(value: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array = np.asarray(value)
    if array.dtype.hasobject or array.dtype.kind in "SU":
        raise RuntimeError(f"an input of {array.dtype} cannot be sent: texts run on this machine")
    return array


def _as_dtype(array: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """Return an array of a file's dtype; `.npy` knows no bfloat16, whose bytes are right."""
    wanted = numpy_dtype(dtype)
    if array.dtype.kind == "V" and wanted is not None:
        return array.view(wanted)
    return array
