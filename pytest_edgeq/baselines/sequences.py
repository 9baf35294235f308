"""Longest common subsequences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence


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
