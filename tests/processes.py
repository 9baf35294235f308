"""Which processes are left."""

from __future__ import annotations

import time
from collections.abc import Iterable

import psutil

__all__ = ["left_after"]


def left_after(seconds: float, processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """
    Return the processes that still run after so many seconds; at once when there is none.

    A zombie has ended: who reaps an orphan, and how soon, is up to the machine's first process.
    """
    processes = list(processes)
    end = time.monotonic() + seconds
    while (left := [each for each in processes if _runs(each)]) and time.monotonic() < end:
        time.sleep(0.05)
    return left


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
