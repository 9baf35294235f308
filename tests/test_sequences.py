"""Longest common subsequences."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from pytest_edgeq.baselines.align import common

keys = st.lists(st.sampled_from("abc"), max_size=12)


def longest(old: Sequence[Hashable], new: Sequence[Hashable]) -> int:
    """Return the length of a longest common subsequence, from the textbook's table."""
    above = [0] * (len(new) + 1)
    for one in old:
        row = [0]
        for index, other in enumerate(new):
            row.append(above[index] + 1 if one == other else max(above[index + 1], row[index]))
        above = row
    return above[-1]


@given(old=keys, new=keys)
def test_common_is_a_longest_common_subsequence(old: list[str], new: list[str]) -> None:
    """The pairs are equal keys, in order on both sides, and as many as the textbook finds."""
    pairs = common(old, new)

    assert [old[row] for row, _ in pairs] == [new[column] for _, column in pairs]
    assert pairs == sorted(set(pairs))
    assert len({row for row, _ in pairs}) == len({column for _, column in pairs}) == len(pairs)
    assert len(pairs) == longest(old, new)
