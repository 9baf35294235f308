"""Run ops of a file alone, each on the inputs that it has in a run of the whole file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy.typing as npt

from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.runtimes.runner import Copied, Runner
from pytest_edgeq.tflite.cut import ALONE, KEPT_GROUPS, Cut, cut_ops, grouped_ops
from pytest_edgeq.tflite.op_dtypes import entry_of
from pytest_edgeq.tflite.subgraph import Op

Array = npt.NDArray[Any]


class _Closable(Protocol):
    def close(self) -> None:
        """Release the interpreters."""


Group = TypeVar("Group", bound=_Closable)


class OpGroup:
    """
    Ops of a file, isolated from each other in a second file.

    That file is written and opened on first use, and again after `close`. `kept` is a runner of the
    whole file that keeps tensors, and `where` names an op in texts.
    """

    def __init__(
        self,
        edge: EdgeFile,
        kept: Runner,
        ops: Iterable[Op],
        where: Callable[[Op], str],
        constants: Callable[[], Mapping[tuple[int, int], Array]] = dict,
    ) -> None:
        self._edge, self.kept, self._where = edge, kept, where
        self._ops, self._constants = frozenset(op.index for op in ops), constants
        self._opened: tuple[Cut, EdgeFile] | None = None

    @property
    def cut(self) -> Cut:
        """The second file, and what its inputs and outputs are in the whole file."""
        return self._open()[0]

    def run(
        self, runtime: str, inputs: Mapping[str, Array] | None = None
    ) -> dict[tuple[int, int], Array]:
        """Return the outputs by op and tensor; by default on the kept tensors."""
        cut, file = self._open()
        if not cut.outputs:
            return {}
        given = {
            name: self.kept.tensor(tensor) if inputs is None else inputs[name]
            for name, (_, tensor) in cut.inputs.items()
        }
        places = ((op.index, tensor) for op, tensor in cut.outputs)
        return dict(zip(places, file.runner(runtime).run(given), strict=True))

    def close(self) -> None:
        """Close the file, and the sessions that a user's own runtimes have open for it."""
        if self._opened is not None:
            self._opened[1].close()
        self._opened = None

    def _open(self) -> tuple[Cut, EdgeFile]:
        if self._opened is None:
            edge, kept = self._edge, self.kept
            cut = cut_ops(
                edge.graph,
                edge.signature.subgraph,
                lambda index: kept.tensor(index).shape,
                self._ops,
                self._constants(),
            )
            names = {(0, number): self._where(op) for number, op in enumerate(cut.ops)}
            copied = Copied(ALONE, names, is_part=True)
            self._opened = (
                cut,
                EdgeFile(cut.content, threads=edge.threads, runtimes=edge.runtimes, copied=copied),
            )
        return self._opened


def in_turn(groups: Sequence[Group]) -> Iterator[Group]:
    """Yield groups; of more than can stay open, each is closed after its use."""
    for group in groups:
        try:
            yield group
        finally:
            if len(groups) > KEPT_GROUPS:
                group.close()


class SingleOps:
    """All ops of a file, each run alone on its inputs in the kernels of a base runtime."""

    def __init__(self, edge: EdgeFile, base: str = "builtin") -> None:
        # A clone, since the interpreters of `edge` may run in another thread.
        self.edge = edge.clone()
        self.base = base
        self._inputs: Mapping[str, Array] | None = None
        self._groups: list[OpGroup] = []

    def groups(self, inputs: Mapping[str, Array]) -> Iterator[OpGroup]:
        """Run the whole file on a sample and yield its ops, in order and in bounded memory."""
        edge = self.edge
        kept = edge.runner(self.base, keep=True)
        if self._inputs is not inputs:
            kept.run(inputs)
            self._inputs = inputs
        if not self._groups:
            # Without `self`: a circle of references would keep interpreters until it is collected.
            def where(op: Op) -> str:
                return entry_of(edge.graph, op, edge.modules).where

            ops = edge.subgraph.ops
            self._groups = [
                OpGroup(edge, kept, each, where)
                for each in grouped_ops(edge.graph, ops, lambda index: kept.tensor(index).shape)
            ]
        yield from in_turn(self._groups)
        if len(self._groups) > KEPT_GROUPS:
            # The interpreter that keeps all tensors goes as well.
            self.edge, self._inputs, self._groups = edge.clone(), None, []

    def close(self) -> None:
        """Close all files."""
        for group in self._groups:
            group.close()
