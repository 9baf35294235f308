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
    """Settings of isolation, resolved from the options of a session."""

    mode: str = "auto"  # `auto`, `on` or `off`
    seconds: float = DEFAULT_SECONDS  # bound on the time of one step in the child
    memory: int | None = None  # bound on its memory, in bytes; None for the default
    cache_dir: Path | None = None  # remembers what has survived; None for this process alone
    # id of the process that this one is a worker of; None where it is none
    controller: int | None = None


_sessions: list[IsolationSettings] = []
"""Settings of each pytest session of this process, outermost first: sessions can be nested."""


def begin(settings: IsolationSettings) -> Callable[[], None]:
    """Begin a session with these settings, and return the function that ends it."""
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
