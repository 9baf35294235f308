"""A target of a session: started when it is first used, and shared by all that runs on it."""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_edgeq.errors import CrashedError
from pytest_edgeq.numerics.target_machine import TargetMachine
from pytest_edgeq.runtimes.workers.link import Answer, Link, LinkError
from pytest_edgeq.runtimes.workers.target_errors import link_error, raise_error
from pytest_edgeq.runtimes.workers.target_spec import checked_command

if TYPE_CHECKING:
    from pytest_edgeq.runtimes.engines import Engine
    from pytest_edgeq.runtimes.opening import Opening
    from pytest_edgeq.runtimes.workers.remote_engine import Message, RemoteFile

_MOST_KEPT = 1 << 28
"""Bytes of files that the worker keeps besides those that are open: boards have little memory."""


class Target:
    """
    A command that starts a Python with numpy and ai_edge_litert elsewhere.

    Raises:
        TypeError, ValueError: The command is no list of words, or empty.
    """

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
        self._sent: dict[str, int] = {}
        """Bytes of files that the worker keeps, by hash, the oldest first."""
        self._shared: weakref.WeakValueDictionary[object, RemoteFile] = (
            weakref.WeakValueDictionary()
        )
        weakref.finalize(self, _close, self._links)

    def start(self) -> TargetMachine:
        """
        Start the command, unless it runs.

        Returns:
            The machine that answers.

        Raises:
            UnrunnableError: It does not start, or lacks a package.
        """
        try:
            self._link()
        except LinkError as error:
            raise link_error(self.name, self.command, error, self.seconds) from None
        assert self.machine is not None, "unreachable because _link has set it"
        return self.machine

    def open(self, opening: Opening) -> Engine:
        """
        Open a file there.

        Raises:
            UnrunnableError: The command does not start, ends, or does not answer.
            RuntimeError, ValueError: The kernels cannot allocate the file.
        """
        # Only now, as it imports numpy.
        from pytest_edgeq.runtimes.workers.target_files import open_on

        return open_on(self, opening)

    def ask(self, message: Callable[[Link], Message], *, once: bool = False) -> Answer:
        """
        Send the message for a link, and once more where the connection is lost.

        Raises:
            LinkError: The worker is gone for good, or does not answer.
            RuntimeError, ValueError, KeyError, MemoryError: As the kernels raised it.
        """
        try:
            return self._ask(message)
        except LinkError as error:
            if once or error.kind != "lost":
                raise
            try:
                return self._ask(message)
            except CrashedError:  # a state was lost with the first one
                raise error from None

    def _ask(self, message: Callable[[Link], Message]) -> Answer:
        link = self._link()
        if link.forgotten:
            keys, link.forgotten[:] = list(link.forgotten), []
            link.ask({"what": "forget", "keys": keys}, (), self.seconds)
        return raise_error(link.ask(*message(link), self.seconds))

    def share(self, key: object, file: RemoteFile) -> RemoteFile:
        """Return the file that is known under a key, or this one, which is known from now on."""
        with self._lock:
            return self._shared.setdefault(key, file)

    def open_in(self, link: Link, file: RemoteFile, head: Mapping[str, Any]) -> None:
        """
        Open a file in the worker, unless it is open there.

        Raises:
            LinkError, RuntimeError, ValueError, MemoryError: As `ask` does.
        """
        with self._lock:
            if file.link is link:
                return
            source = file.source
            content = source.read_bytes() if isinstance(source, Path) else source
            digest = hashlib.sha256(content).hexdigest()
            if digest not in self._sent:
                dropped = self._make_room(len(content))
                link.ask({"what": "file", "drop": dropped}, [content], self.seconds)
                self._sent[digest] = len(content)
            head = {**head, "what": "open", "key": file.key, "digest": digest}
            raise_error(link.ask(head, (), self.seconds))
            file.opened_in(link)

    def _make_room(self, size: int) -> list[str]:
        """Return the hashes of the files that the worker need not keep; the oldest go first."""
        dropped = []
        while self._sent and sum(self._sent.values()) + size > _MOST_KEPT:
            oldest = next(iter(self._sent))
            del self._sent[oldest]
            dropped.append(oldest)
        return dropped

    def _link(self) -> Link:
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
            self._sent = {}
            _close(self._links)


def _close(links: list[Link]) -> None:
    while links:
        links.pop().close()


def make_targets(commands: Mapping[str, Sequence[str]], seconds: float) -> dict[str, Target]:
    """
    Make a target of each command, by name; none is started.

    Raises:
        TypeError, ValueError: A command is no list of words, or empty.
    """
    return {name: Target(name, command, seconds) for name, command in commands.items()}
