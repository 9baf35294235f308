"""Ops without a match behind which most of what went in is gone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pytest_edgeq.localize.rows import LOWERING, LayerError
from pytest_edgeq.tflite.graph import Op, OpGraph, Signature

__all__ = ["Lost", "lost_behind_unmatched"]

_GROWN_DB = 10.0
"""By how much an error must have grown: to ten times its energy."""

_LITTLE_DB = 20.0
"""
What must be left at most, an error of a tenth of the values.

An op that rounds to int8 leaves as much where the values span 13 of its 256 codes.
"""

_MOST_CLIPPED = 0.05
"""Share of codes at the ends of the range from which on this may be what is lost."""


@dataclass(frozen=True, slots=True)
class Lost:
    """
    Where an output, or an op that is matched again, has lost what an unmatched op still took.

    Attributes:
        row: Of the first op without a match.
        before_db: SQNR of the worst of what it takes, against the float model.
        after_db: Of what is made of it.
        where: What this is, for texts.
    """

    row: LayerError
    before_db: float
    after_db: float
    where: str


def lost_behind_unmatched(
    graph: OpGraph,
    signature: Signature,
    rows: Sequence[LayerError],
    outputs: Mapping[str, float],
) -> list[Lost]:
    """
    Find ops that torch has nothing like, and behind which the outputs are no longer torch's.

    An op of a sound file that is not followed gives what torch needs all the same: what is made of
    it is about as near to torch as what it takes. Weights lose something of their own, so that ops
    with weights are left out.

    Args:
        graph: The file.
        signature: The entry point.
        rows: Of its ops, as they were localized.
        outputs: By the signature's names of outputs, the SQNR of each in dB.
    """
    ops = graph.subgraphs[signature.subgraph].ops
    view = _View(
        {row.index: row for row in rows},
        {index: op for op in ops for index in op.outputs if index >= 0},
        {index: [op for op in ops if index in op.inputs] for op in ops for index in op.outputs},
        {each.tensor.index: each.name for each in signature.outputs},
        outputs,
    )
    found = []
    for op in ops:
        row = view.rows.get(op.index)
        if row is None or row.matched:
            continue
        before = view.taken(op)
        reached = min(view.reached(op, set()), default=None)
        if before is None or reached is None:
            continue
        after, where = reached
        if after < _LITTLE_DB and before - after > _GROWN_DB:
            found.append(Lost(row, before, after, where))
    return found


@dataclass(frozen=True, slots=True)
class _View:
    """Who makes and who takes what."""

    rows: Mapping[int, LayerError]
    makers: Mapping[int, Op]
    takers: Mapping[int, Sequence[Op]]
    names: Mapping[int, str]
    outputs: Mapping[str, float]

    def taken(self, op: Op) -> float | None:
        """SQNR of the worst of what an op takes; None where this is not all known and sound."""
        worst = math.inf
        for maker in (self.makers[index] for index in op.inputs if index in self.makers):
            row = self.rows.get(maker.index)
            if row is None or not row.matched or row.verdict == LOWERING:
                return None
            if row.cumulative_sqnr_db is not None:
                worst = min(worst, row.cumulative_sqnr_db)
        return worst

    def reached(self, op: Op, seen: set[int]) -> Iterator[tuple[float, str]]:
        """What is made of an op's result, over ops without a match, up to where it is known."""
        for index in op.outputs:
            clipped = self.rows[op.index].clipped or 0.0
            if index in self.names and clipped < _MOST_CLIPPED:
                yield self.outputs[self.names[index]], f"output {self.names[index]!r}"
            for taker in self.takers.get(index, ()):
                row = self.rows.get(taker.index)
                if row is None or taker.index in seen or "weight" in row.dtypes:
                    continue
                seen.add(taker.index)
                if not row.matched:
                    yield from self.reached(taker, seen)
                elif row.cumulative_sqnr_db is not None and not _loses(row):
                    yield row.cumulative_sqnr_db, row.name


def _loses(row: LayerError) -> bool:
    """Whether it is the op itself that loses, on what it takes."""
    local, total = row.local_sqnr_db, row.cumulative_sqnr_db
    return local is None or total is None or local < total + _GROWN_DB
