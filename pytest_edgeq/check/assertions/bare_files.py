"""The isolation of files that no `Edgeq` has opened: bare paths and bytes given to assertions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_edgeq.runtimes.workers.bounds import default_memory
from pytest_edgeq.runtimes.workers.sessions import innermost

if TYPE_CHECKING:
    from pytest_edgeq.runtimes.registry import Runtimes
    from pytest_edgeq.runtimes.workers.policy import Isolation


def bare_isolation() -> Isolation:
    """Return the isolation that the innermost session asks for; the defaults outside of pytest."""
    from pytest_edgeq.errors import warn_user
    from pytest_edgeq.quantize.cache.directory import Store
    from pytest_edgeq.runtimes.workers.policy import Isolation

    told = innermost()
    return Isolation(
        told.mode,
        seconds=told.seconds,
        memory=default_memory() if told.memory is None else told.memory,
        store=None if told.cache_dir is None else Store(told.cache_dir, warn_user),
    )


def bare_runtimes() -> Runtimes:
    """Return the runtimes of a bare file, isolated as the innermost session says."""
    from pytest_edgeq.runtimes.registry import BUILT_IN

    return BUILT_IN.isolated(bare_isolation())
