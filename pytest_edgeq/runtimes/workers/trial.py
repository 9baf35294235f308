"""Try a target: start it, and run a file of one op on its kernels."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from pytest_edgeq.numerics.target_machine import TargetMachine
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.runtimes.registry import Runtimes
from pytest_edgeq.runtimes.workers.target import Target
from pytest_edgeq.tflite.writing import one_op

_KERNELS = ("xnnpack", "builtin")


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of a trial."""

    machine: TargetMachine  # the machine that answered
    start: float  # milliseconds until it answered
    runs: dict[str, float]  # milliseconds of one run, to and fro, by kernels


def try_target(target: Target) -> Trial:
    """Start a target, if it does not run, and run a file of one op."""
    began = time.perf_counter()
    machine = target.start()
    start = time.perf_counter() - began
    edge = EdgeFile(one_op("NEG", "x"), runtimes=Runtimes(targets={target.name: target}))
    inputs = {"x": np.array([3], np.float32)}
    runs = {}
    for kernels in _KERNELS:
        runner = edge.runner(f"{target.name}:{kernels}")
        began = time.perf_counter()
        [result] = runner.run(inputs)
        runs[kernels] = (time.perf_counter() - began) * 1e3
        if result.tolist() != [-3.0]:
            raise RuntimeError(
                f"the {target.name}:{kernels} runtime computes something else: expected [-3.0] of "
                f"NEG of 3, got {result.tolist()}"
            )
    return Trial(machine, start * 1e3, runs)
