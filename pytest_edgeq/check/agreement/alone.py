"""Run each op alone, on its inputs in the kernels that keep tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from pytest_edgeq.check.agreement.pair import make_pair
from pytest_edgeq.check.agreement.runtime_results import RuntimeResults
from pytest_edgeq.errors import CopyError
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.runtimes.runner import Copied, Runner
from pytest_edgeq.tflite.cut import ALONE, KEPT_GROUPS, Cut, cut_ops, grouped_ops
from pytest_edgeq.tflite.op_dtypes import entry_of
from pytest_edgeq.tflite.subgraph import Op

Array = npt.NDArray[Any]


@dataclass(slots=True, eq=False)
class _CutGroup:
    """Ops that are run together."""

    ops: tuple[Op, ...]
    cut: Cut | None = None  # the file that holds them; None while it is not written
    file: EdgeFile | None = None  # the same, open


class SingleOps:
    """Runs each op alone on two runtimes; its files are written on first use."""

    def __init__(self, edge: EdgeFile, base: str) -> None:
        # A clone, since the interpreters of `edge` may run in another thread.
        self._edge = edge.clone()
        self._base = base
        self._ran: int | None = None
        self._groups: list[_CutGroup] = []

    def compare_ops(self, results: RuntimeResults, inputs: Mapping[str, Array], index: int) -> None:
        """Compare every op of a runtime with the base runtime."""
        if not results.runs_ops:
            return
        kept = self._edge.runner(self._base, keep=True)
        if self._ran != index:
            kept.run(inputs)
            self._ran = index
        if not self._groups:
            ops = self._edge.graph.subgraphs[self._edge.signature.subgraph].ops
            groups = grouped_ops(self._edge.graph, ops, lambda each: kept.tensor(each).shape)
            self._groups = [_CutGroup(each) for each in groups]
        for group in self._groups:
            try:
                cut, file = self._cut_file(group, kept)
            except ValueError as error:
                results.skip_ops(f"runtimes were not compared op by op: {error}")
                return
            try:
                if cut.outputs:
                    self._compare(results, cut, file, kept, index)
            except CopyError as error:
                results.skip_ops(f"runtime {results.name!r} was not compared op by op: {error}")
                return
            finally:
                if len(self._groups) > KEPT_GROUPS:
                    self._close(group, results)
                    group.cut = group.file = None
        if len(self._groups) > KEPT_GROUPS:
            self._edge, self._ran = self._edge.clone(), None

    def _compare(
        self, results: RuntimeResults, cut: Cut, file: EdgeFile, kept: Runner, index: int
    ) -> None:
        given = {name: kept.tensor(tensor) for name, tensor in cut.inputs.items()}
        outputs = file.runner(results.name).run(given)
        for (op, tensor), actual in zip(cut.outputs, outputs, strict=True):
            pair = results.pairs.get((op.index, tensor))
            if pair is None:
                runtimes = self._edge.runtimes
                pair = make_pair(
                    self._edge.graph,
                    op,
                    tensor,
                    (results.name, self._base),
                    kernels=None
                    if results.name in runtimes.own
                    else runtimes.kernels_of(results.name),
                )
                results.pairs[op.index, tensor] = pair
            values = {
                place: kept.tensor(place)
                for place in (*op.inputs, *op.outputs)
                if place >= 0 and pair.is_float
            }
            pair.update(index, kept.tensor(tensor), actual, values)

    def close(self, results: RuntimeResults) -> None:
        """Close the sessions that a user's runtime has open for the ops."""
        for group in self._groups:
            self._close(group, results)

    def _close(self, group: _CutGroup, results: RuntimeResults) -> None:
        if group.file is not None and results.pairs:
            group.file.runner(results.name).close()

    def _cut_file(self, group: _CutGroup, kept: Runner) -> tuple[Cut, EdgeFile]:
        if group.cut is None or group.file is None:
            group.cut, group.file = cut_single_ops(self._edge, kept, group.ops)
        return group.cut, group.file


def cut_single_ops(edge: EdgeFile, kept: Runner, ops: Iterable[Op]) -> tuple[Cut, EdgeFile]:
    """Return a file with these ops, isolated from each other, and the same opened."""
    cut = cut_ops(
        edge.graph,
        edge.signature.subgraph,
        lambda index: kept.tensor(index).shape,
        {op.index for op in ops},
    )
    names = {
        (0, number): entry_of(edge.graph, op, edge.modules).where
        for number, op in enumerate(cut.ops)
    }
    copied = Copied(ALONE, names)
    return cut, EdgeFile(cut.content, threads=edge.threads, runtimes=edge.runtimes, copied=copied)
