"""Kill processes that say that they hang."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

from tests.waiting import SECONDS, rounds


@contextlib.contextmanager
def killing(pids: Path) -> Iterator[None]:
    """Kill each process for which a folder has a file with its number."""
    ended = threading.Event()

    def kill() -> None:
        for _ in rounds():
            for path in pids.iterdir():
                path.unlink()
                os.kill(int(path.name), signal.SIGKILL)
            if ended.wait(0.05):
                return

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield
    finally:
        ended.set()
        killer.join(SECONDS)
