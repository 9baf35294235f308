"""
Which op of one op-dtype map is which op of another, by longest common subsequences.

Maps are aligned, not compared by position: one op more at the top is one op more, not a hundred
changed rows.
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

Row = Mapping[str, Any]
Pair = tuple[int, int]
_Key = Callable[[Row], Hashable]


@dataclasses.dataclass(frozen=True)
class Alignment:
    """The differences of two lists of ops; all numbers are positions in their list."""

    pairs: list[Pair]  # old and new position of every op that both lists have, in the new order
    changed: list[Pair]  # those of ops with other fields
    moved: list[Pair]  # those of ops that stand elsewhere in the order
    disappeared: list[int]  # old positions of ops that are gone
    appeared: list[int]  # new positions of ops that are new

    @property
    def size(self) -> int:
        """How many ops differ."""
        pairs = len(self.changed) + len(self.moved)
        return pairs + len(self.disappeared) + len(self.appeared)


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
    pairs = list(_pairs_in_order(old, new, keys))
    gone, came = _unpaired(old, new, pairs)
    twins = defaultdict(list)
    for index in gone:
        twins[_exact(old[index])].append(index)
    moved = [(same.pop(0), at) for at in came if (same := twins.get(_exact(new[at])))]
    pairs += moved
    pairs += _pairs_of_one_place(old, new, *_unpaired(old, new, pairs))
    changed = sorted(pair for pair in pairs if _row(old[pair[0]]) != _row(new[pair[1]]))
    pairs.sort(key=itemgetter(1))
    return Alignment(pairs, changed, moved, *_unpaired(old, new, pairs))


def _pairs_in_order(
    old: Sequence[Row], new: Sequence[Row], keys: Sequence[_Key], offsets: Pair = (0, 0)
) -> Iterator[Pair]:
    """Pair ops that are equal by the first key, and those between them by the others."""
    first, other = offsets
    if not keys:
        if len(old) == len(new) == 1 and old[0]["module"] == new[0]["module"] is not None:
            yield offsets
        return
    start, begin, equal = 0, 0, common(*(list(map(keys[0], rows)) for rows in (old, new)))
    for at, there in [*equal, (len(old), len(new))]:
        between = old[start:at], new[begin:there]
        yield from _pairs_in_order(*between, keys[1:], (first + start, other + begin))
        if at < len(old):
            yield first + at, other + there
        start, begin = at + 1, there + 1


def _unpaired(
    old: Sequence[Row], new: Sequence[Row], pairs: Sequence[Pair]
) -> tuple[list[int], list[int]]:
    """Return the old and the new positions of ops that are in no pair."""
    gone, came = set(range(len(old))), set(range(len(new)))
    return sorted(gone - {at for at, _ in pairs}), sorted(came - {at for _, at in pairs})


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


def common(old: Sequence[Hashable], new: Sequence[Hashable]) -> list[tuple[int, int]]:
    """
    Return a longest common subsequence, as pairs of positions in order.

    difflib.SequenceMatcher takes the longest block first, which in a network of a hundred equal
    blocks is the wrong one, and takes seconds to do so. This is the bit-parallel algorithm of
    Hyyrö (2004): a row of the table is one integer, in which a zero at bit i says that the i-th
    old key made the sequence longer. Keys at the start and at the end that are equal are paired.
    """
    head = 0
    while head < min(len(old), len(new)) and old[head] == new[head]:
        head += 1
    tail = 0
    while tail < min(len(old), len(new)) - head and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    row, column = len(old) - tail, len(new) - tail
    places: dict[Hashable, int] = defaultdict(int)
    for index in range(head, row):
        places[old[index]] |= 1 << (index - head)
    ones = (1 << (row - head)) - 1
    table = [ones]
    for key in new[head:column]:
        last = table[-1]
        hits = last & places.get(key, 0)
        table.append(((last + hits) | (last - hits)) & ones)
    middle: list[tuple[int, int]] = []
    while row > head and column > head:
        if old[row - 1] == new[column - 1]:
            row, column = row - 1, column - 1
            middle.append((row, column))
        elif table[column - head] >> (row - 1 - head) & 1:
            row -= 1
        else:
            column -= 1
    return [
        *((index, index) for index in range(head)),
        *reversed(middle),
        *((len(old) - index, len(new) - index) for index in range(tail, 0, -1)),
    ]
