"""
The commands that need no torch: seconds from start to exit, and of the CPU. Run it: it is no test.

`python tests/bench/speed/bench_cli.py` runs each in processes of their own, five times. Target:
under 0.5 s. Seconds of the CPU do not depend on what else runs. Not on Windows.
`python -X importtime -m pytest_edgeq show FILE` tells where the time goes.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[3]
FILES = ROOT / "fixtures" / "tflite" / "converted"
RUNS = 5


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _seconds(arguments: list[str]) -> tuple[float, float]:
    start, start_cpu = time.perf_counter(), _cpu_seconds()
    done = subprocess.run(
        [sys.executable, "-m", "pytest_edgeq", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    seconds = time.perf_counter() - start, _cpu_seconds() - start_cpu
    if done.returncode == 2:
        raise RuntimeError(done.stderr)
    return seconds


def _main() -> None:
    old, new = (str(FILES / f"attention.{name}.tflite") for name in ("float", "int8"))
    with tempfile.TemporaryDirectory() as folder:
        samples = Path(folder) / "x.npz"
        np.savez(samples, args_0=np.random.default_rng(0).standard_normal((16, 1, 5, 8)))
        for arguments in (
            ["--help"],
            ["cache"],
            ["show", new],
            ["show", new, "--json"],
            ["diff", old, new],
            ["compare", old, new, "--inputs", str(samples)],
        ):
            runs = [_seconds(arguments) for _ in range(RUNS)]
            wall, cpu = ([run[kind] for run in runs] for kind in (0, 1))
            print(
                f"edgeq {arguments[0]:8} {min(wall):.3f} … {max(wall):.3f} s, "
                f"of the CPU {min(cpu):.3f} … {max(cpu):.3f} s"
            )


if __name__ == "__main__":
    _main()
