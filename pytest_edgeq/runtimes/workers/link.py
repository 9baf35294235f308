"""The process of a target, and the frames that go to and fro."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYetError
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, BinaryIO, Final, cast

from pytest_edgeq.runtimes.workers import far_side
from pytest_edgeq.runtimes.workers.far_side import FrameError, Head, pack, unpack

Answer = tuple[Head, list[Any]]

_HELLO: Final = 0
"""Number of the first answer, which no request asks for."""

_BOOT: Final = "f'=0;{exec(input())}'"
"""
Runs the line that stdin gives, whether a shell stands between or not.

`ssh` and `adb` hand words to a shell of the far side, `qemu` and `docker` do not; and which of them
a command is cannot be told. The word holds no blank, and what a shell makes of it without its
quotes, `f=0;{exec(input())}`, does the same as what Python makes of it with them, an f-string.
"""

_GUARD: Final = (
    "import ctypes, os, signal, sys\n"
    "ctypes.CDLL(None).prctl(1, signal.SIGKILL)\n"  # PR_SET_PDEATHSIG
    "if os.getppid() != int(sys.argv[1]): os._exit(1)\n"
    "os.execvp(sys.argv[2], sys.argv[2:])"
)
"""Linux ends the command when this process dies, also by SIGKILL."""

_LINES: Final = 12
"""How many lines that the command prints are kept for failure texts."""

_CHATTER: Final = b"INFO: "
"""Begins lines that LiteRT prints for each file."""

_OF_THIS_PYTHON: Final = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP")
"""Variables that lead another CPU's Python to the libraries of this one."""

_ENDS_WITHIN: Final = 2.0
"""Seconds that a command has to end by itself when its input is closed."""


class LinkError(Exception):
    """
    The far side does not answer as it should.

    Attributes:
        what: What came in place of an answer.
        printed: The last lines that the command printed.
        kind: `absent`, `start`, `missing`, `garbage`, `lost`, `time` or `closed`.
    """

    def __init__(self, kind: str, what: str, printed: Sequence[str]) -> None:
        super().__init__(what)
        self.kind, self.what, self.printed = kind, what, list(printed)


class LostError(LinkError):
    """The far side was there, and has gone: a crash, a kill, a lost connection."""

    def __init__(self, what: str, printed: Sequence[str]) -> None:
        super().__init__("lost", what, printed)


class Link:
    """
    A running target.

    Requests may come from several threads; the far side answers them one after the other.

    Attributes:
        facts: What the far side says of itself (`far_side.facts`).

    Raises:
        LinkError: The command does not start, ends, prints something else, or lacks a package.
    """

    def __init__(self, command: Sequence[str], seconds: float) -> None:
        self._seconds = seconds
        self._printed: deque[str] = deque(maxlen=_LINES)
        self._waiting: dict[int, Future[Answer]] = {}
        self._lock = threading.Lock()
        self._out: queue.SimpleQueue[list[bytes] | None] = queue.SimpleQueue()
        self._next = _HELLO
        self._end: LinkError | None = None
        hello: Future[Answer] = Future()
        self._waiting[_HELLO] = hello
        self._sign_of_life = time.monotonic()
        self._process = self._started(command)
        self._loops = [
            threading.Thread(target=loop, name="edgeq-target", daemon=True)
            for loop in (self._write, self._read)
        ]
        for loop in self._loops:
            loop.start()
        source = Path(far_side.__file__).read_text(encoding="utf-8")
        self._out.put([f"exec({source!a})\n".encode("ascii")])
        try:
            head, _ = self._result(hello)
        except LinkError as error:
            self.close()
            kind = "start" if isinstance(error, LostError) else error.kind
            raise LinkError(kind, error.what, error.printed) from None
        if "missing" in head:
            self.close()
            what = f"Python {head['python']} that lacks a package ({head['missing']})"
            raise LinkError("missing", what, self._printed)
        self.facts: dict[str, Any] = head["facts"]

    @property
    def is_alive(self) -> bool:
        """Whether it still answers, as far as is known."""
        return self._end is None

    def ask(self, head: Head, parts: Iterable[Any] = ()) -> Answer:
        """
        Send a request, and wait for the answer.

        Raises:
            LostError: The far side has gone.
            LinkError: No sign of life came in time, or something that is no answer.
        """
        answer: Future[Answer] = Future()
        with self._lock:
            if self._end is not None:
                raise self._end
            self._next += 1
            number = self._next
            self._waiting[number] = answer
        self._out.put(pack({**head, "id": number, "seconds": self._seconds}, parts))
        return self._result(answer)

    def close(self) -> None:
        """End the command; no process is left."""
        # No loss, after which threads that wait would start it anew.
        self._ended(LinkError("closed", "the end of the session", ()))
        self._out.put(None)
        process = self._process
        try:
            process.wait(_ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            self._kill()
            process.wait()
        else:
            self._kill()  # what the command has started
        for thread in (*self._loops, self._watcher):
            thread.join(_ENDS_WITHIN)

    # --- threads --------------------------------------------------------------------------------

    def _started(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        program = shutil.which(command[0])
        if program is None:
            raise LinkError("absent", f"no program {command[0]!r}", ())
        words = [program, *command[1:], "-u", "-c", _BOOT]
        if sys.platform == "linux":
            words = [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid()), *words]
        started: Future[subprocess.Popen[bytes]] = Future()
        # Linux ends the command with the thread that has started it, so this one lives as long.
        self._watcher = threading.Thread(
            target=self._watch, args=(words, started), name="edgeq-target", daemon=True
        )
        self._watcher.start()
        return started.result()

    def _watch(self, words: list[str], started: Future[subprocess.Popen[bytes]]) -> None:
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={k: v for k, v in os.environ.items() if k not in _OF_THIS_PYTHON},
                start_new_session=True,  # Ctrl-C is for this process to act on
            )
        except OSError as error:
            started.set_exception(LinkError("start", str(error), ()))
            return
        started.set_result(process)
        assert process.stderr is not None
        with process.stderr as stderr:
            for line in stderr:
                if not line.startswith(_CHATTER):
                    self._printed.append(line.decode(errors="replace").rstrip()[:500])
        process.wait()

    def _write(self) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(OSError, ValueError):  # the reader tells that it has gone
            while (pieces := self._out.get()) is not None:
                for piece in pieces:
                    stdin.write(piece)
                stdin.flush()
        with contextlib.suppress(OSError):  # what was not written cannot be flushed
            stdin.close()

    def _read(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        with stdout:
            self._take_frames(stdout)

    def _take_frames(self, stdout: IO[bytes]) -> None:
        try:
            stream = cast("BinaryIO", _Alive(cast("BufferedReader", stdout), self._note_life))
            while (frame := unpack(stream)) is not None:
                head, parts = frame
                with self._lock:
                    waiting = self._waiting.pop(head["id"], None)
                if waiting is not None:  # else it was given up meanwhile
                    waiting.set_result((head, parts))
        except FrameError as error:
            said = f", {error.received[:32]!r}" if error.received else ""
            self._kill()
            self._settle()
            self._ended(LinkError("garbage", f"{error} on stdout{said}", self._printed))
            return
        self._ended(LostError(self._death(), self._printed))

    def _note_life(self) -> None:
        self._sign_of_life = time.monotonic()

    # --- ends -----------------------------------------------------------------------------------

    def _result(self, answer: Future[Answer]) -> Answer:
        began = time.monotonic()
        while True:
            last = max(began, self._sign_of_life)
            try:
                return answer.result(max(0.0, last + self._seconds - time.monotonic()))
            except NotYetError:
                if self._sign_of_life <= last and not answer.done():
                    what = f"nothing for {self._seconds:g} s"
                    self._ended(LinkError("time", what, self._printed))
                    self._kill()

    def _ended(self, error: LinkError) -> None:
        with self._lock:
            if self._end is None:
                self._end = error
            waiting = list(self._waiting.values())
            self._waiting.clear()
        for each in waiting:
            each.set_exception(self._end)

    def _settle(self) -> None:
        """Wait until the last lines that were printed have been read."""
        self._watcher.join(_ENDS_WITHIN)

    def _death(self) -> str:
        self._settle()
        try:
            code = self._process.wait(_ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            return "the end of its stdout"
        if code < 0:
            return f"{signal.Signals(-code).name} of its process"
        return f"exit code {code}"

    def _kill(self) -> None:
        with contextlib.suppress(OSError):  # it has ended
            if os.name == "posix":
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()


class _Alive:
    """A stream that tells of each piece read from it."""

    def __init__(self, stream: BufferedReader, note: Callable[[], None]) -> None:
        self._stream, self._note = stream, note

    def read(self, count: int) -> bytes:
        piece = self._stream.read1(count)
        self._note()
        return piece
