"""
What `--edgeq-isolate=auto` costs on README's test suite. Run it: it is not a test.

`python -m tests.bench.speed.bench_isolate [ROUNDS]` runs the suite of README under pytest with
`--edgeq-isolate=off`, `auto` and `on`, in turns, and prints the least time of each mode as a
multiple of `off`: with an empty cache directory, in which nothing is known to have survived, and
with one that earlier runs have filled. Goal: at most 1.15 for `auto`. Beside the time on the clock
stands processor time, of the child, too, which other work on the machine changes less.

First it prints milliseconds of a call of a worker, of 600 kB in and out and of next to nothing.
Goal: at most 2.5 ms for 600 kB, on a machine that does nothing else.
"""

from __future__ import annotations

import operator
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from pytest_edgeq.names import ISOLATE_MODES
from pytest_edgeq.runtimes.workers.local_worker import LocalWorker
from tests.docs.blocks import ROOT, blocks
from tests.docs.session import environment

_PLUGINS = ("-pno:anyio", "-pno:randomly")

MODES = sorted(ISOLATE_MODES, key=lambda mode: ("off", "auto", "on").index(mode))


def _write(folder: Path) -> None:
    """Write README's files."""
    for block in blocks():
        if block.file is not None and block.language == "python":
            folder.joinpath(block.file[0]).write_text(block.text, encoding="utf-8")


def _run(folder: Path, cache: Path, *options: str) -> tuple[float, float]:
    """Run the suite; return seconds on the clock and of the processor."""
    variables = {**environment(), "PYTHONPATH": str(ROOT)}
    variables.pop("PYTEST_ADDOPTS")
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *_PLUGINS, f"--edgeq-cache-dir={cache}", *options],
        cwd=folder,
        env=variables,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    took, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return took, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(folder: Path, rounds: int, *, is_warm: bool) -> None:
    """Print the line of a cache directory that is empty before each run, or filled by others."""
    cache = folder / "cache"
    best: dict[str, tuple[float, float]] = {}
    for _ in range(rounds):
        for mode in MODES:
            if not is_warm:
                shutil.rmtree(cache, ignore_errors=True)
            figures = _run(folder, cache, f"--edgeq-isolate={mode}")
            known = best.get(mode, figures)
            best[mode] = (min(known[0], figures[0]), min(known[1], figures[1]))
    base = best["off"]
    told = ", ".join(
        f"{mode} {clock:.2f} s × {clock / base[0]:.3f} (processor × {processor / base[1]:.3f})"
        for mode, (clock, processor) in best.items()
    )
    print(f"{'warm' if is_warm else 'cold'} cache: {told}", flush=True)


def measure_messages() -> None:
    """Print milliseconds of a call, of the least and the median of 500."""
    worker = LocalWorker(4 << 30)
    for name, value in (("600 kB", np.ones(150_000, np.float32)), ("4 B", np.ones(1, np.float32))):
        taken = []
        for _ in range(500):
            started = time.perf_counter()
            worker.call(60, operator.neg, value)
            taken.append(1e3 * (time.perf_counter() - started))
        load = os.getloadavg()[0]
        print(
            f"a call of {name} in and out: {min(taken[1:]):.2f} ms at least, "
            f"{statistics.median(taken):.2f} ms in the median, load {load:.1f}",
            flush=True,
        )
    worker.close()


def main(arguments: list[str]) -> None:
    """Measure all."""
    measure_messages()
    rounds = int(arguments[0]) if arguments else 5
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write(folder)
        _run(folder, folder / "cache", "--edgeq-update", "--edgeq-isolate=off")
        for mode in MODES:
            _run(folder, folder / "cache", f"--edgeq-isolate={mode}")
        print(f"{len(os.sched_getaffinity(0))} cores, least of {rounds} runs")
        measure(folder, rounds, is_warm=True)
        measure(folder, rounds, is_warm=False)


if __name__ == "__main__":
    main(sys.argv[1:])
