"""
Which op of one op-dtype map is which op of another.

Maps are aligned, not compared by position: one op more at the top is one op more, not a hundred
changed rows.
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from pytest_edgeq.baselines.sequences import common

Row = Mapping[str, Any]
Pair = tuple[int, int]
_Gap = tuple[int, int, int, int]
_Key = Callable[[Row], Hashable]


@dataclasses.dataclass(frozen=True)
class Alignment:
    """The differences of two lists of ops; all numbers are positions in their list."""

    changed: list[Pair]  # old and new position of ops that are the same op with other fields
    moved: list[Pair]  # old and new position of ops that stand elsewhere in the order
    disappeared: list[int]  # old positions of ops that are gone
    appeared: list[int]  # new positions of ops that are new

    @property
    def size(self) -> int:
        """How many ops differ."""
        pairs = len(self.changed) + len(self.moved)
        return pairs + len(self.disappeared) + len(self.appeared)


def pairs(alignment: Alignment, n_old: int, n_new: int) -> list[Pair]:
    """Return old and new position of every op that both lists have, in the new order."""
    known = [*alignment.changed, *alignment.moved]
    left_old = {before for before, _ in known}.union(alignment.disappeared)
    left_new = {after for _, after in known}.union(alignment.appeared)
    # Ops that are the same on both sides keep their order.
    same = zip(
        (index for index in range(n_old) if index not in left_old),
        (index for index in range(n_new) if index not in left_new),
        strict=True,
    )
    return sorted([*known, *same], key=lambda pair: pair[1])


def fields(row: Row) -> dict[str, Any]:
    """Return the compared fields of an op: all but its module, which a rename changes."""
    return {key: value for key, value in row.items() if key != "module"}


def align(old: Sequence[Row], new: Sequence[Row]) -> Alignment:
    """
    Compute the differences of two lists of ops.

    Two ways are tried, and the one with fewer differences is taken. Imagine two ops that swap
    their dtypes: by their modules, both changed. Imagine a block put in front of a Sequential: by
    their modules every op changed, by their rows one block appeared.
    """
    by_module = _align(old, new, (_exact, _place, _row, _op))
    if by_module.size <= 1:
        return by_module
    by_row = _align(old, new, (_row, _place, _op))
    return by_row if by_row.size < by_module.size else by_module


def _exact(row: Row) -> Hashable:
    return json.dumps(row, sort_keys=True)


def _row(row: Row) -> Hashable:
    return json.dumps(fields(row), sort_keys=True)


def _place(row: Row) -> Hashable:
    # An op of unknown module equals no other.
    return object() if row["module"] is None else (row["op"], row["module"], row["subgraph"])


def _op(row: Row) -> Hashable:
    return str(row["op"])


def _align(old: Sequence[Row], new: Sequence[Row], keys: Sequence[_Key]) -> Alignment:
    pairs: list[Pair] = []
    gaps: list[_Gap] = [(0, len(old), 0, len(new))]
    for key in keys:
        narrower: list[_Gap] = []
        for gap in gaps:
            found, rest = _match(
                [key(row) for row in old[gap[0] : gap[1]]],
                [key(row) for row in new[gap[2] : gap[3]]],
                gap,
            )
            pairs += found
            narrower += rest
        gaps = narrower
    pairs += [
        (old_start, new_start)
        for old_start, old_end, new_start, new_end in gaps
        if old_end - old_start == new_end - new_start == 1
        and old[old_start]["module"] is not None
        and old[old_start]["module"] == new[new_start]["module"]
    ]
    changed = sorted(pair for pair in pairs if _row(old[pair[0]]) != _row(new[pair[1]]))
    return _with_moves(old, new, pairs, changed)


def _match(
    old: Sequence[Hashable], new: Sequence[Hashable], gap: _Gap
) -> tuple[list[Pair], list[_Gap]]:
    """Pair equal keys within one gap in order; return the pairs and the gaps that remain."""
    pairs = [(gap[0] + row, gap[2] + column) for row, column in common(old, new)]
    gaps: list[_Gap] = []
    old_at, new_at = gap[0], gap[2]
    for old_next, new_next in [*pairs, (gap[1], gap[3])]:
        if old_at < old_next or new_at < new_next:
            gaps.append((old_at, old_next, new_at, new_next))
        old_at, new_at = old_next + 1, new_next + 1
    return pairs, gaps


def _with_moves(
    old: Sequence[Row], new: Sequence[Row], pairs: Sequence[Pair], changed: list[Pair]
) -> Alignment:
    """Separate ops that only moved from those that appeared or disappeared."""
    matched_old = {pair[0] for pair in pairs}
    matched_new = {pair[1] for pair in pairs}
    gone = defaultdict(list)
    for index, row in enumerate(old):
        if index not in matched_old:
            gone[_exact(row)].append(index)
    moved, appeared = [], []
    for index, row in enumerate(new):
        if index in matched_new:
            continue
        if twins := gone.get(_exact(row)):
            moved.append((twins.pop(0), index))
        else:
            appeared.append(index)
    disappeared = sorted(index for indices in gone.values() for index in indices)
    left = _pairs_of_one_place(old, new, disappeared, appeared)
    left_old, left_new = {before for before, _ in left}, {after for _, after in left}
    return Alignment(
        sorted([*changed, *left]),
        moved,
        [index for index in disappeared if index not in left_old],
        [index for index in appeared if index not in left_new],
    )


def _pairs_of_one_place(
    old: Sequence[Row], new: Sequence[Row], disappeared: Sequence[int], appeared: Sequence[int]
) -> list[Pair]:
    """
    Pair ops that disappeared and appeared under one name and module.

    Only if as many disappeared as appeared: otherwise the pairs are ambiguous.
    """
    places: dict[Hashable, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for side, (rows, indices) in enumerate(((old, disappeared), (new, appeared))):
        for index in indices:
            row = rows[index]
            places[row["op"], row["module"], row["subgraph"]][side].append(index)
    return [
        pair
        for before, after in places.values()
        if len(before) == len(after)
        for pair in zip(before, after, strict=True)
    ]
