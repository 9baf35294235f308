"""
How files are isolated in the pytest sessions of this process.

This module is cheap to import: the plugin says here what its options are.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path

from pytest_edgeq.runtimes.workers.bounds import DEFAULT_SECONDS


@dataclasses.dataclass(frozen=True)
class IsolationSettings:
    """
    Settings of isolation, resolved from the options of a session.

    Attributes:
        mode: `auto`, `on` or `off`.
        seconds: Bound on the time of one step in the child.
        memory: Bound on its memory, in bytes; None for the default.
        cache_dir: Remembers what has survived; None for this process alone.
        controller: Id of the process that this one is a worker of; None where it is none.
    """

    mode: str = "auto"
    seconds: float = DEFAULT_SECONDS
    memory: int | None = None
    cache_dir: Path | None = None
    controller: int | None = None


_sessions: list[IsolationSettings] = []
"""Settings of each pytest session of this process, outermost first: sessions can be nested."""


def begin(settings: IsolationSettings) -> Callable[[], None]:
    """
    Begin a session with these settings.

    Returns:
        What ends it; with the last session the child processes end.
    """
    _sessions.append(settings)

    def end() -> None:
        _sessions.remove(settings)
        workers = sys.modules.get("pytest_edgeq.runtimes.workers.local_worker")
        if not _sessions and workers is not None:
            workers.close_workers()

    return end


def innermost() -> IsolationSettings:
    """Return the settings of the session that runs inside of all others, or the defaults."""
    return _sessions[-1] if _sessions else IsolationSettings()


def is_abandoned() -> bool:
    """Return whether this process is a worker whose controller has ended."""
    controller = innermost().controller
    return controller is not None and os.getppid() != controller
