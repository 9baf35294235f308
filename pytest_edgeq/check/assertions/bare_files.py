"""Isolation of files passed to assertions as bare paths or bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_edgeq.runtimes.workers.bounds import default_memory
from pytest_edgeq.runtimes.workers.sessions import innermost

if TYPE_CHECKING:
    from pytest_edgeq.runtimes.registry import Runtimes
    from pytest_edgeq.runtimes.workers.policy import Isolation


def bare_isolation() -> Isolation:
    """Return the isolation of the innermost session; the defaults outside of pytest."""
    from pytest_edgeq.errors import warn_user
    from pytest_edgeq.quantize.cache.directory import Store
    from pytest_edgeq.runtimes.workers.policy import Isolation

    session = innermost()
    return Isolation(
        session.mode,
        seconds=session.seconds,
        memory=default_memory() if session.memory is None else session.memory,
        store=None if session.cache_dir is None else Store(session.cache_dir, warn_user),
    )


def bare_runtimes() -> Runtimes:
    """Return the runtimes of a bare file, isolated as the innermost session says."""
    from pytest_edgeq.runtimes.registry import BUILT_IN

    return BUILT_IN.isolated(bare_isolation())
