"""The runtimes that a command can name: the built-in ones, and those of the project's targets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pytest_edgeq.names import RUNTIMES

if TYPE_CHECKING:
    from pytest_edgeq.runtimes.registry import Runtimes


@contextlib.contextmanager
def project_runtimes(name: str) -> Iterator[Runtimes]:
    """
    Give the runtimes that this one is of; a target that was started is ended.

    Raises:
        ValueError: There is no such runtime.
        RuntimeError: pytest does not read the project's ini.
    """
    from pytest_edgeq.runtimes.registry import Runtimes

    if name in RUNTIMES:
        yield Runtimes()
        return
    # The ini is read for a name that it may have given alone: pytest takes a moment.
    from pytest_edgeq.plugin.project_targets import project_targets
    from pytest_edgeq.runtimes.workers.target import make_targets

    commands, seconds = project_targets()
    found = Runtimes(
        targets=make_targets(commands, seconds),
        hint="a target is one of edgeq_targets in the ini file that pytest reads here",
    )
    found.check(name)
    try:
        yield found
    finally:
        found.close()
