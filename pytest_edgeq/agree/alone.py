"""The ops of a file, each alone on what the kernels that keep every tensor gave it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

from pytest_edgeq.agree.pair import make_pair
from pytest_edgeq.agree.results import RuntimeResults
from pytest_edgeq.tflite.cut import Cut, cut_ops
from pytest_edgeq.tflite.edge import EdgeFile
from pytest_edgeq.tflite.runtimes import Runner
from pytest_edgeq.unrunnable import UnrunnableError

__all__ = ["Alone"]

# A user's test shows the user's line and the message, not how we came to it.
__tracebackhide__ = True

Array = npt.NDArray[Any]


class Alone:
    """
    Runs each op alone on two runtimes; the file that holds them is made when first needed.

    Args:
        edge: The whole file.
        base: Kernels that keep every tensor, which the others are held against.
    """

    def __init__(self, edge: EdgeFile, base: str) -> None:
        # Interpreters of its own: those of `edge` may be running in another thread.
        self._edge = edge.apart()
        self._base = base
        self._cut: Cut | None = None
        self._lone_ops: EdgeFile | None = None

    def look(self, results: RuntimeResults, inputs: Mapping[str, Array], index: int) -> None:
        """
        Hold every op of a runtime against the base.

        Args:
            results: The runtime; what was found goes there.
            inputs: Of the whole file.
            index: Of the sample, for texts.
        """
        if not results.runs_alone:
            return
        kept = self._edge.runner(self._base, keep=True)
        kept.run(inputs)
        try:
            cut, lone_ops = self._made(kept)
        except ValueError as error:
            results.refuses_alone(f"runtimes were not compared op by op: {error}")
            return
        if not cut.outputs:
            return
        given = {name: kept.tensor(tensor) for name, tensor in cut.inputs.items()}
        try:
            outputs = lone_ops.runner(results.name).run(given)
        except UnrunnableError as error:
            results.refuses_alone(
                f"runtime {results.name!r} was not compared op by op, as it does not run the file "
                f"in which ops stand alone: {error}"
            )
            return
        for (op, tensor), actual in zip(cut.outputs, outputs, strict=True):
            pair = results.pairs.get((op.index, tensor))
            if pair is None:
                own = results.name in self._edge.runtimes.own
                pair = make_pair(self._edge.graph, op, tensor, results.name, self._base, own=own)
                results.pairs[op.index, tensor] = pair
            values = {
                place: kept.tensor(place)
                for place in (*op.inputs, *op.outputs)
                if place >= 0 and pair.is_float
            }
            pair.update(index, kept.tensor(tensor), actual, values)

    def close(self, results: RuntimeResults) -> None:
        """Let go of the session that a runtime of one's own has for the ops."""
        if self._lone_ops is not None and results.pairs:
            self._lone_ops.runner(results.name).close()

    def _made(self, kept: Runner) -> tuple[Cut, EdgeFile]:
        if self._cut is None or self._lone_ops is None:
            self._cut = cut_ops(
                self._edge.graph,
                self._edge.signature.subgraph,
                lambda index: kept.tensor(index).shape,
            )
            self._lone_ops = EdgeFile(
                self._cut.content, threads=self._edge.threads, runtimes=self._edge.runtimes
            )
        return self._cut, self._lone_ops
