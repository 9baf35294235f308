from __future__ import annotations

import copy
import time
from collections.abc import Hashable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_edgeq.baselines.align import align, common
from tests.baselines.op_maps import borders, op, residual


def test_ops_in_front_shift_nothing() -> None:
    """Two ops more at the top are two ops more, not a map of changed rows."""
    old = residual()["ops"]

    found = align(old, [op("QUANTIZE"), op("PAD"), *old])

    assert (found.appeared, found.size) == ([0, 1], 2)


def test_ops_that_changed_where_another_moved_are_paired_all_the_same() -> None:
    """By their rows fewer ops differ, as a QUANTIZE only moved: what is left is still one op."""

    def floats(row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "scheme": "float", "inputs": ["float32"], "outputs": ["float32"]}

    joined, added = op("CONCATENATION", module=""), op("ADD", module="")
    layers = [op("CONV_2D", module=f"layer{index}") for index in range(4)]
    old = [*layers, op("QUANTIZE"), joined, added]
    new = [op("QUANTIZE"), *layers, floats(joined), op("QUANTIZE"), floats(added)]

    found = align(old, new)

    assert [(old[a]["op"], new[b]["op"]) for a, b in found.changed] == [
        ("CONCATENATION", "CONCATENATION"),
        ("ADD", "ADD"),
    ]
    assert found.disappeared == []
    assert [new[index]["op"] for index in found.appeared] == ["QUANTIZE"]


def test_ops_of_the_same_module_are_paired() -> None:
    """Two convolutions that swap their granularity both changed: neither came or went."""
    old = [op("CONV_2D", "a"), op("CONV_2D", "b", granularity="per_tensor")]
    new = [op("CONV_2D", "a", granularity="per_tensor"), op("CONV_2D", "b")]

    found = align(old, new)

    assert (found.changed, found.size) == ([(0, 0), (1, 1)], 2)


def test_a_block_in_front_of_a_sequential_renames_the_rest() -> None:
    """A layer put first shifts every later name: that is one layer more, not four changed."""
    old = [op("CONV_2D", "0"), op("MUL", "1", "float"), op("CONV_2D", "2", "dynamic")]
    new = [
        op("CONV_2D", "0", "float16"),
        op("CONV_2D", "1"),
        op("MUL", "2", "float"),
        op("CONV_2D", "3", "dynamic"),
    ]

    found = align(old, new)

    assert (found.appeared, found.size) == ([0], 1)


@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
@pytest.mark.parametrize("every", [1, 7])
def test_sixteen_hundred_repeated_ops_align_well_and_fast(named: bool, every: int) -> None:
    """In a network of equal blocks each changed ADD is found, with or without module names."""
    old = [
        op(name, f"blocks.{block}.{name.lower()}" if named else None)
        for block in range(400)
        for name in ("CONV_2D", "RELU", "ADD", "MUL")
    ]
    new = copy.deepcopy(old)
    changed = [index for index, row in enumerate(old) if row["op"] == "ADD"][::every]
    for index in reversed(changed):
        new[index : index + 1] = borders(old[index])

    began = time.perf_counter()
    found = align(old, new)
    took = time.perf_counter() - began

    assert [before for before, _ in found.changed] == changed
    assert (len(found.appeared), found.disappeared, found.moved) == (3 * len(changed), [], [])
    assert took < 2


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
