"""Which op of a file ends the process that it runs in: found by its ops, cut out."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pytest_edgeq.tflite.boundary import numpy_dtype
from pytest_edgeq.tflite.cut import cut_ops
from pytest_edgeq.tflite.op_dtypes import entry_of
from pytest_edgeq.tflite.opening import Opening
from pytest_edgeq.tflite.refused import first_failing
from pytest_edgeq.tflite.subgraph import Op

_MOST_TRIALS: Final = 16
"""Files that are tried; by halves this is enough for 2 ** 8 ops."""

_MOST_SECONDS: Final = 30.0

SECONDS_OF_A_TRIAL: Final = 5.0
"""Seconds after which ops count as hanging."""

Inputs = Mapping[str, npt.NDArray[Any]]


def crashing_op_text(
    opening: Opening, step: str, inputs: Inputs, ends: Callable[[bytes, Inputs | None], bool]
) -> str:
    """Say which op ended the process."""
    search = _Search(opening, step, inputs, ends)
    try:
        op = search.found()
    except _GivenUpError as error:
        return f"op: not found: {error}"
    except Exception as error:  # of a damaged file the graph need not make sense
        return f"op: not found: its ops cannot be cut out ({type(error).__name__}: {error})"[:150]
    if op is not None:
        return f"op: {_where(op, opening)}"
    told = "op: not found: its ops, cut out and run on zeros, end no process"
    if search.left_out:
        first, why = search.left_out[0]
        more = f" and {len(search.left_out) - 1} more" if len(search.left_out) > 1 else ""
        told += f"\n  not cut out: {_where(first, opening)}{more}: {why}"
    return told


def _where(op: Op, opening: Opening) -> str:
    return entry_of(opening.graph, op, opening.modules).where


class _GivenUpError(Exception):
    """The search has reached its bounds."""


class _Search:
    """Cuts ops out of a file and tries them, by halves."""

    def __init__(
        self,
        opening: Opening,
        step: str,
        inputs: Inputs,
        ends: Callable[[bytes, Inputs | None], bool],
    ) -> None:
        self._opening = opening
        self._runs = step == "run"
        borders = opening.signature.inputs
        self._known = {b.tensor.index: inputs[b.name] for b in borders if b.name in inputs}
        self._try = ends
        self.left_out: tuple[tuple[Op, str], ...] = ()
        self._trials = 0
        self._begun = time.monotonic()

    def found(self) -> Op | None:
        """
        Return the first op that ends the process by itself; None where none does.

        Raises:
            _GivenUpError: The bounds on trials or time are reached.
        """
        ops = self._opening.graph.subgraphs[self._opening.signature.subgraph].ops
        return first_failing(ops, self._ends)

    def _ends(self, ops: Sequence[Op]) -> bool:
        """Whether these ops end the process that they run in."""
        if self._trials >= _MOST_TRIALS or time.monotonic() - self._begun > _MOST_SECONDS:
            raise _GivenUpError(
                f"{self._trials} files with some of its ops were tried, in "
                f"{time.monotonic() - self._begun:.0f} s"
            )
        self._trials += 1
        graph, subgraph = self._opening.graph, self._opening.signature.subgraph
        tensors = graph.subgraphs[subgraph].tensors

        def shape_of(index: int) -> tuple[int, ...]:
            known = self._known.get(index)
            return tensors[index].shape if known is None else known.shape

        cut = cut_ops(graph, subgraph, shape_of, {op.index for op in ops})
        if self._trials == 1:
            self.left_out = cut.left_out
        if not cut.outputs:
            return False
        given = {
            name: self._known.get(index, np.zeros(shape_of(index), _dtype(tensors[index].dtype)))
            for name, index in cut.inputs.items()
        }
        try:
            return self._try(cut.content, given if self._runs else None)
        except Exception:  # the kernels refuse them, which ends no process
            return False


def _dtype(name: str) -> Any:
    dtype = numpy_dtype(name)
    assert dtype is not None, "unreachable because such ops are not cut out"
    return dtype
