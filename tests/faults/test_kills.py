"""Processes that are killed at random moments leave whole files, and the next run is right."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pytest_edgeq.baselines import store
from tests.faults import kills

# Up to 50 sessions of pytest are killed, and as many processes are waited for.
pytestmark = pytest.mark.timeout(1500)


@pytest.mark.slow
@pytest.mark.parametrize("count", [8, pytest.param(50, marks=pytest.mark.full)])
@pytest.mark.parametrize("what", kills.ALL)
def test_a_kill_leaves_whole_files(what: str, count: int, tmp_path: Path) -> None:
    """At so many random moments of each."""
    kills.ALL[what](tmp_path, 0, count)


def test_what_a_killed_write_left_is_deleted(tmp_path: Path) -> None:
    """By a write an hour later; what a process is writing stays."""
    store.write(tmp_path / "a.json", b"1")
    left, being_written = tmp_path / ".edgeq-0.tmp", tmp_path / ".edgeq-1.tmp"
    for path in (left, being_written):
        path.touch()
    os.utime(left, (0, 0))

    store.write(tmp_path / "b.json", b"2")

    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [being_written.name, "a.json", "b.json"]
