"""
How files are isolated in the pytest sessions of this process, its cores, and bounds on the child.

This module is cheap to import: the plugin says here what its options are.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

# Bound on one step, such as one run or the passes of the converter. The longest step measured takes
# 8 s, the passes for ViT-B/16; the rest is for larger models, slower machines and many workers.
DEFAULT_SECONDS: Final = 300

# Twice what conversion, quantization and runs of ViT-B/16 map at most: 1.94 GiB.
_LEAST_MEMORY: Final = 4 << 30

# Twice what a child maps that has loaded LiteRT and a small file.
_CHILD_ALONE: Final = 256 << 20

_UNITS: Final = {"": 1 << 20, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_CGROUPS: Final = ("memory.max", "memory/memory.limit_in_bytes")


def parse_memory(text: str) -> int:
    """Return a number of bytes from a text such as `4G`, `512M` or `2048` (MiB)."""
    found = re.fullmatch(r"([0-9]+)\s*([MGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise ValueError(f"expected a size such as 4G, 512M or 2048 (MiB), got {text!r}")
    return _at_least(int(found[1]) * _UNITS[found[2].upper()], text)


def _at_least(size: int, given: object) -> int:
    if size < _CHILD_ALONE:
        raise ValueError(f"expected a size of at least 256M, got {given!r}: libraries take half")
    return size


def memory_bound(given: int | str | None) -> int:
    """Return the memory bound of the user in bytes, or the default."""
    if given is None:
        return default_memory()
    if isinstance(given, str):
        return parse_memory(given)
    if isinstance(given, bool) or not isinstance(given, int):
        raise TypeError(f"isolate_memory: expected bytes, or a text such as 4G, got {given!r}")
    return _at_least(given, given)


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_memory(workers: int = 1) -> int:
    """Return the default bound: half of the memory, divided by the workers."""
    total = _total_memory()
    return max(min(_LEAST_MEMORY, total), total // 2 // workers)


@functools.cache
def _total_memory() -> int:
    """Return the bytes of memory of this machine or container; a default if unknown."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on Windows
        return 2 * _LEAST_MEMORY
    for name in _CGROUPS:
        with contextlib.suppress(OSError, ValueError):  # no such control group, or "max"
            total = min(total, int(Path("/sys/fs/cgroup", name).read_text()))
    return total


class IsolationSettings(NamedTuple):
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
