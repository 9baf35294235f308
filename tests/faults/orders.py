"""
Run a suite under `-n 2` in random orders: no test may fail, and all runs store the same bytes.

`python -m tests.faults.orders --seed 0 --count 20 tests/examples/test_digits_quant.py` takes any
suite; without a path it is one of 30 tests without a model, as in the slow lane.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.faults.sessions import ROOT, SCHEMES, Project, environment


def run_in_random_orders(suite: Sequence[str], folder: Path, seed: int, count: int) -> None:
    """
    Run the suite of paths, or of the folder's own project, so many times.

    Raises:
        AssertionError: A test failed, or two runs have stored different bytes.
    """
    first: dict[str, bytes] | None = None
    for number, stored in _runs(suite, folder, seed, count):
        first = stored if first is None else first
        other = {name for name in {*first, *stored} if first.get(name) != stored.get(name)}
        assert stored, "no baseline was stored: the suite has none"
        assert not other, f"seed {number}: stored differently than by seed {seed}: {sorted(other)}"


def _runs(
    suite: Sequence[str], folder: Path, seed: int, count: int
) -> Iterator[tuple[int, dict[str, bytes]]]:
    project = None if suite else Project(folder)
    for number in range(seed, seed + count):
        kept = folder / f"baselines{number}"
        options = (
            *("-n", "2", "-p", "randomly", f"--randomly-seed={number}"),
            *("--edgeq-update=new", f"--edgeq-snapshot-dir={kept}"),
        )
        if project is None:
            command = [sys.executable, "-m", "pytest", "-q", *options, *suite]
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=environment() | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": ""},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
                timeout=600,
            )
            code, text = done.returncode, done.stdout
        else:
            code, text = project.run(SCHEMES[0], *options)
        assert code == 0, f"seed {number}:\n{text}"
        yield (
            number,
            {
                path.relative_to(kept).as_posix(): path.read_bytes()
                for path in sorted(kept.rglob("*"))
                if path.is_file()
            },
        )


def main() -> None:
    """Run a suite."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", nargs="*")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=20)
    given = parser.parse_args()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        run_in_random_orders(given.suite, Path(folder), given.seed, given.count)
    print(f"seeds {given.seed} to {given.seed + given.count - 1}: passed, all stored the same")
    print(f"in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
