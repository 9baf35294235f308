"""
What `edgeq.check` costs, against torch and the file on the same samples. Run it: it is not a test.

`python -m tests.bench.speed.bench_check [NET …]` quantizes each network by the dynamic recipe, in a
process of its own, checks it on 16 samples with one thread, and prints the time as a multiple of
one forward of torch and one run of the file on the default runtime for each of the samples, and the
peak memory beyond what converting the model took. Goal: at most 6 times as long and 3 s, and 1 GB.
Times are wall time, without imports; torch and the file run before and after the check, so that
load changes both sides. Memory includes the child processes. Linux only: it is read from /proc.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

from tests.bench.speed.bench_speed import network

COUNT = 16
NETWORKS = ("mobilenetv2", "resnet50", "vit_b_16", "encoder")


def _peak(*, reset: bool = False) -> float:
    """Return the peak memory in MB of this process and its children since it was reset."""
    total = 0.0
    children = [task.read_text().split() for task in Path("/proc/self/task").glob("*/children")]
    for process in ("self", *itertools.chain.from_iterable(children)):
        if reset:
            Path(f"/proc/{process}/clear_refs").write_text("5")
        status = Path(f"/proc/{process}/status").read_text("ascii")
        total += next(int(li.split()[1]) for li in status.splitlines() if li.startswith("VmHWM:"))
    return total / 1024


def measure(name: str) -> None:
    """Print the line of one network."""
    import torch

    import pytest_edgeq.check.gate  # noqa: F401  # imports are not counted
    from pytest_edgeq import Edgeq

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    model, sample = network(name)
    samples = [sample(n) for n in range(COUNT)]
    model.train()
    with torch.no_grad():
        for _ in range(4):  # random weights let activations vanish, but for batch norms that learn
            model(torch.cat(samples[:4]))
    model.eval()
    maker = Edgeq(threads=1)
    quantized = maker.quantize(model, (samples[0],), quantizer="recipe_dynamic_wi8_afp32")
    converted = _peak()
    quantized.run(samples[0])

    def run_plain() -> float:
        started = time.perf_counter()
        with torch.no_grad():
            for each in samples:
                model(each)
                quantized.run(each)
        return time.perf_counter() - started

    before = run_plain()
    _peak(reset=True)
    started = time.perf_counter()
    maker.check(quantized, samples)
    took = time.perf_counter() - started
    peak = _peak()
    plain = (before + run_plain()) / 2
    size = len(quantized.tflite) / 2**20
    print(
        f"{name} ({size:.0f} MB): check {took:.1f} s, torch and the file {plain:.1f} s: "
        f"× {took / plain:.1f}, less 3 s × {(took - 3) / plain:.1f}; "
        f"peak memory {peak:.0f} MB, of converting {converted:.0f} MB; "
        f"load {os.getloadavg()[0]:.1f}",
        flush=True,
    )


def main(arguments: list[str]) -> None:
    """Measure each network in a process of its own."""
    if arguments[:1] == ["--one"]:
        measure(arguments[1])
        return
    for name in arguments or NETWORKS:
        command = [sys.executable, "-m", "tests.bench.speed.bench_check", "--one", name]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main(sys.argv[1:])
