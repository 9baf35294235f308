"""A target of a session: started on first use, and shared."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pytest_edgeq.numerics.target_machine import TargetMachine
from pytest_edgeq.runtimes.workers.link import Link, LinkError
from pytest_edgeq.runtimes.workers.target_errors import link_error
from pytest_edgeq.runtimes.workers.target_spec import checked_command

if TYPE_CHECKING:
    from pytest_edgeq.runtimes.engines import Engine
    from pytest_edgeq.runtimes.opening import Opening
    from pytest_edgeq.runtimes.workers.target_files import TargetFiles


class Target:
    """A command that starts a Python with numpy and ai_edge_litert elsewhere."""

    def __init__(self, name: str, command: Sequence[str], seconds: float) -> None:
        self.name = name
        self.command = checked_command(name, command)
        self.seconds = seconds
        self.machine: TargetMachine | None = None
        """The machine that answers; None before the first use."""
        self._lock = threading.RLock()
        self._refused: LinkError | None = None
        self._links: list[Link] = []
        """The link of now, if there is one."""
        self._files: TargetFiles | None = None
        weakref.finalize(self, _close, self._links)

    def start(self) -> TargetMachine:
        """Start the command, unless it runs, or raise an UnrunnableError."""
        try:
            self.link()
        except LinkError as error:
            raise link_error(self.name, self.command, error, self.seconds) from None
        assert self.machine is not None, "unreachable because `link` has set it"
        return self.machine

    def open(self, opening: Opening) -> Engine:
        """Open a file there, or raise an UnrunnableError."""
        if self._files is None:
            # Only now, as it imports numpy.
            from pytest_edgeq.runtimes.workers.target_files import TargetFiles

            # Who asks for a file holds the target.
            self._files = TargetFiles(weakref.proxy(self))
        return self._files.open(opening)

    def link(self) -> Link:
        """Return the link of now, which is started where there is none, or raise a LinkError."""
        with self._lock:
            if self._refused is not None:
                raise self._refused
            if self._links and self._links[0].is_alive:
                return self._links[0]
            self.close()
            try:
                link = Link(self.command, self.seconds)
            except LinkError as error:
                if self.machine is None:
                    # Each test would wait for it again, by ssh for minutes.
                    self._refused = error
                raise
            self.machine = TargetMachine.of(self.name, link.facts)
            self._links.append(link)
            return link

    def close(self) -> None:
        """End the command; the next use starts it anew."""
        with self._lock:
            _close(self._links)


def _close(links: list[Link]) -> None:
    while links:
        links.pop().close()


def make_targets(commands: Mapping[str, Sequence[str]], seconds: float) -> dict[str, Target]:
    """Make a target of each command, by name; none is started."""
    return {name: Target(name, command, seconds) for name, command in commands.items()}
