"""Which processes are left."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable

import psutil

from pytest_edgeq.runtimes.workers.link import LOCAL_NAME
from tests.waiting import wait_until


def target_workers(parent: int | None = None) -> list[psutil.Process]:
    """Return the processes of targets that this process, or another one, has started."""
    found = []
    for each in psutil.Process(parent).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended
            words = each.cmdline()
            if "exec(input())" in " ".join(words) and words[-1] != LOCAL_NAME:
                found.append(each)
    return found


def let_sigint_through() -> None:
    """
    Let processes that are started from now on get SIGINT, where this one ignores it.

    A job in the background of a script ignores it, and hands that on to its processes.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def left_after(processes: Iterable[psutil.Process], seconds: float = 20) -> list[psutil.Process]:
    """
    Return the processes that still run after so many seconds; at once when there is none.

    A zombie has ended: who reaps an orphan, and how soon, is up to the machine's first process.
    """
    processes = list(processes)
    with contextlib.suppress(AssertionError):
        wait_until(lambda: not any(map(_runs, processes)), None, seconds)
    return [each for each in processes if _runs(each)]


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
