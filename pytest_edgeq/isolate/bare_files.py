"""
The isolation of files that no `Edgeq` has opened: bare paths and bytes given to assertions.

This module is cheap to import: the plugin says here what its options are.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_edgeq.isolate.bounds import DEFAULT_SECONDS, default_memory

if TYPE_CHECKING:
    from pytest_edgeq.tflite.registry import Runtimes

__all__ = ["IsolationSettings", "bare_runtimes", "begin", "is_abandoned"]


@dataclasses.dataclass(frozen=True)
class IsolationSettings:
    """
    What the options of a session come to.

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
"""Of the pytest sessions of this process; one may run inside of another."""


def begin(settings: IsolationSettings) -> Callable[[], None]:
    """
    Begin a session with these settings.

    Returns:
        What ends it; with the last session the child processes end.
    """
    _sessions.append(settings)

    def end() -> None:
        _sessions.remove(settings)
        pool = sys.modules.get("pytest_edgeq.isolate.child_process")
        if not _sessions and pool is not None:
            pool.close_children()

    return end


def is_abandoned() -> bool:
    """Return whether this process is a worker whose controller has ended."""
    controller = _sessions[-1].controller if _sessions else None
    return controller is not None and os.getppid() != controller


def bare_runtimes() -> Runtimes:
    """Return the runtimes of a bare file, isolated as the innermost session says."""
    from pytest_edgeq.cache.directory import Store
    from pytest_edgeq.isolate.policy import Isolation
    from pytest_edgeq.tflite.registry import BUILT_IN
    from pytest_edgeq.warn import warn_user

    told = _sessions[-1] if _sessions else IsolationSettings()
    isolation = Isolation(
        told.mode,
        seconds=told.seconds,
        memory=default_memory() if told.memory is None else told.memory,
        store=None if told.cache_dir is None else Store(told.cache_dir, warn_user),
    )
    return BUILT_IN.isolated(isolation)
