"""Baselines do not depend on the order of the tests, nor on which worker runs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import sessions

# Up to 20 sessions of pytest on two workers.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run_in_random_orders(folder: Path, seed: int, count: int) -> None:
    """Run the folder's own project so many times, and compare what each run stores."""
    project, first = sessions.Project(folder), None
    for number in range(seed, seed + count):
        kept = folder / f"baselines{number}"
        code, text = project.run(
            sessions.SCHEMES[0],
            *("-n", "2", "-p", "randomly", f"--randomly-seed={number}"),
            *("--edgeq-update=new", f"--edgeq-snapshot-dir={kept}"),
        )
        assert code == 0, f"seed {number}:\n{text}"
        paths = sorted(path for path in kept.rglob("*") if path.is_file())
        stored = {path.relative_to(kept).as_posix(): path.read_bytes() for path in paths}
        first = stored if first is None else first
        other = {name for name in {*first, *stored} if first.get(name) != stored.get(name)}
        assert stored, "no baseline was stored: the suite has none"
        assert not other, f"seed {number}: stored differently than by seed {seed}: {sorted(other)}"


@pytest.mark.parametrize("count", [6, pytest.param(20, marks=pytest.mark.full)])
def test_all_orders_store_the_same(count: int, tmp_path: Path) -> None:
    """So many of them, each on two workers."""
    run_in_random_orders(tmp_path, 0, count)
