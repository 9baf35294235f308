"""State of the process: CPU, random number generators, the garbage collector."""

from __future__ import annotations

import functools
import gc
import hashlib
import platform
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np

from pytest_edgeq.versions import loaded_torch

CPU_INFO = Path("/proc/cpuinfo")

_CPU_LINES = (
    *("vendor_id", "cpu family", "model", "model name", "cache size", "flags", "cpu", "isa"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features"),
)
"""Lines of that file by which oneDNN, MKL, XNNPACK and OpenBLAS choose kernels."""


@functools.cache
def cpu_model() -> str:
    """Return a hash of the CPU's properties: models with one instruction set differ in results."""
    if not CPU_INFO.exists():
        return platform.processor()
    lines = CPU_INFO.read_text().splitlines()
    chosen = sorted({line for line in lines if line.split("\t")[0].strip() in _CPU_LINES})
    return hashlib.sha256("\n".join(chosen).encode()).hexdigest()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Fix the random number generators of numpy and Python, and torch's where it is loaded."""
    torch = loaded_torch()
    python, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]) if torch else nullcontext():
        if torch:
            torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy_state)


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Exclude the objects of libraries from garbage collection, 4 to 9 % of a conversion's time."""
    if gc.get_freeze_count():
        yield  # objects frozen by others must stay frozen
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def paused_collector() -> Iterator[None]:
    """Turn the garbage collector off while libraries are imported, a third of the import's time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
