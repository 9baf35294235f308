"""A target of a session: started when it is first used, and shared by all that runs on it."""

from __future__ import annotations

import hashlib
import itertools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pytest_edgeq.numerics.target_machine import TargetMachine
from pytest_edgeq.runtimes.workers.link import Answer, Link, LinkError, LostError
from pytest_edgeq.runtimes.workers.target_errors import link_error, raise_error
from pytest_edgeq.runtimes.workers.target_spec import checked_command

if TYPE_CHECKING:
    import numpy.typing as npt

    from pytest_edgeq.runtimes.engines import Engine, Source
    from pytest_edgeq.runtimes.opening import Opening
    from pytest_edgeq.runtimes.workers.target_engine import FarFile


_Result = TypeVar("_Result")

_MOST_KEPT = 1 << 28
"""Bytes of files that the far side keeps beside those that are open: boards have little memory."""


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
        """What the far side says of itself; None before the first use."""
        self._lock = threading.RLock()
        self._refused: LinkError | None = None
        self._open = _Open()
        self._close = weakref.finalize(self, self._open.close)

    def start(self) -> TargetMachine:
        """
        Start the command, unless it runs.

        Returns:
            What the far side says of itself.

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
        from pytest_edgeq.runtimes.workers.target_engine import TargetEngine

        return TargetEngine(self, opening)

    def load(self, runtime: str, file: FarFile) -> None:
        """
        Open a file on the far side; where the connection is lost, once more.

        Raises:
            UnrunnableError, RuntimeError, ValueError, MemoryError: As `ask` does.
        """
        self._attempt(runtime, lambda link: self._opened(link, file), needs_state=False)

    def ask(
        self,
        runtime: str,
        file: FarFile,
        head: Mapping[str, Any],
        parts: Sequence[Any] = (),
        *,
        needs_state: bool = False,
    ) -> Answer:
        """
        Ask about a file; where the connection is lost, once more.

        Raises:
            UnrunnableError: The far side is gone for good, or does not answer.
            RuntimeError, ValueError, KeyError, MemoryError: As the kernels raised it.
        """

        def asked(link: Link) -> Answer:
            if needs_state and file not in self._open.numbers:
                raise LostError("another process, which has not seen the samples before", ())
            request = {**head, "key": self._opened(link, file)}
            return link.ask({**request, "forget": self._open.forgotten()}, parts)

        answer, made = self._attempt(runtime, asked, needs_state=needs_state)
        raise_error(answer)
        return answer, made

    def _attempt(
        self, runtime: str, call: Callable[[Link], _Result], *, needs_state: bool
    ) -> _Result:
        try:
            try:
                return call(self._link())
            except LostError:
                if needs_state:
                    raise
                return call(self._link())
        except LinkError as error:
            raise link_error(runtime, self.command, error, self.seconds) from None

    def ends(self, opening: Opening, inputs: Mapping[str, npt.NDArray[Any]] | None) -> bool:
        """
        Tell whether a file ends the far side, which is then started again.

        Raises:
            RuntimeError, ValueError, KeyError, MemoryError: The kernels refuse it.
        """
        from pytest_edgeq.runtimes.workers.target_engine import FarFile, in_order

        file = FarFile(opening, opening.kernels)
        try:
            link = self._link()
            number = self._opened(link, file)
            if inputs is not None:
                answer, _ = link.ask({"what": "run", "key": number}, in_order(opening, inputs))
                raise_error(answer)
        except LinkError:
            return True
        return False

    def share(self, key: object, file: FarFile) -> FarFile:
        """Return the file that is known under a key, or this one, which is known from now on."""
        with self._lock:
            return self._open.shared.setdefault(key, file)

    def close(self) -> None:
        """End the command; the next use starts it anew."""
        with self._lock:
            self._open.close()

    # --- the link -------------------------------------------------------------------------------

    def _link(self) -> Link:
        with self._lock:
            if self._refused is not None:
                raise self._refused
            link = self._open.link
            if link is not None and link.is_alive:
                return link
            self._open.close()
            try:
                link = Link(self.command, self.seconds)
            except LinkError as error:
                if self.machine is None:
                    # Each test would wait for it again, by ssh for minutes.
                    self._refused = error
                raise
            self.machine = TargetMachine.of(self.name, link.facts)
            self._open.link = link
            return link

    def _opened(self, link: Link, file: FarFile) -> int:
        """Return the number of a file on this link; it is sent and opened if it is not yet."""
        with self._lock:
            known = self._open.numbers.get(file)
            if known is not None:
                return known
            content = _content(file.source)
            digest = hashlib.sha256(content).hexdigest()
            if digest not in self._open.sent:
                dropped = self._open.make_room(len(content))
                link.ask({"what": "file", "drop": dropped}, [content])
                self._open.sent[digest] = len(content)
            number = next(self._open.counter)
            answer, _ = link.ask({"what": "open", "key": number, "digest": digest, **file.head})
            raise_error(answer)
            self._open.add(file, number)
            return number


def make_targets(commands: Mapping[str, Sequence[str]], seconds: float) -> dict[str, Target]:
    """
    Make a target of each command, by name; none is started.

    Raises:
        TypeError, ValueError: A command is no list of words, or empty.
    """
    return {name: Target(name, command, seconds) for name, command in commands.items()}


class _Open:
    """What is open on the link of now."""

    def __init__(self) -> None:
        self.link: Link | None = None
        self.counter = itertools.count()
        self.sent: dict[str, int] = {}
        self.numbers: weakref.WeakKeyDictionary[FarFile, int] = weakref.WeakKeyDictionary()
        self.shared: weakref.WeakValueDictionary[object, FarFile] = weakref.WeakValueDictionary()
        self._forgotten: list[int] = []

    def add(self, file: FarFile, number: int) -> None:
        """Take note of a file; when it goes, the far side is told to let go of it."""
        self.numbers[file] = number
        weakref.finalize(file, self._forgotten.append, number).atexit = False

    def make_room(self, size: int) -> list[str]:
        """Return the hashes of the files that the far side need not keep; the oldest go first."""
        dropped = []
        while self.sent and sum(self.sent.values()) + size > _MOST_KEPT:
            oldest = next(iter(self.sent))
            del self.sent[oldest]
            dropped.append(oldest)
        return dropped

    def forgotten(self) -> list[int]:
        """Return the numbers of files that are gone, once."""
        found, self._forgotten[:] = list(self._forgotten), []
        return found

    def close(self) -> None:
        """End the process."""
        link, self.link = self.link, None
        self.sent, self.numbers = {}, weakref.WeakKeyDictionary()
        self._forgotten[:] = []
        if link is not None:
            link.close()


def _content(source: Source) -> bytes:
    return source.read_bytes() if isinstance(source, Path) else source
