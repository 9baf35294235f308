"""A worker process and the framed messages to and from it, over its stdin and stdout."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

from pytest_edgeq.runtimes.workers import remote_worker
from pytest_edgeq.runtimes.workers.remote_worker import (
    FrameError,
    Head,
    pack,
    read_payload,
    unpack_head,
    unpack_parts,
)

_HELLO: Final = 0
"""Number of the first answer, which no request asks for."""

_BOOT: Final = "f'=0;{exec(input())}'"
"""
Runs the line that stdin gives, whether a shell stands between or not.

`ssh` and `adb` hand words to a shell of the other machine, `qemu` and `docker` do not; and which of
them a command is cannot be known. The word holds no blank, and what a shell makes of it without its
quotes, `f=0;{exec(input())}`, does the same as what Python makes of it with them, an f-string.
"""

LOCAL_NAME: Final = "edgeq-worker"
"""The last word of the command of a worker of this machine, for lists of processes."""

_GUARD: Final = (
    "import ctypes, os, signal, sys\n"
    "ctypes.CDLL(None).prctl(1, signal.SIGKILL)\n"  # PR_SET_PDEATHSIG
    "if os.getppid() != int(sys.argv[1]): os._exit(1)\n"
    "os.execvp(sys.argv[2], sys.argv[2:])"
)
"""Linux ends the command when this process dies, also by SIGKILL or while native code runs."""

_OF_THIS_PYTHON: Final = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP")
"""Variables that lead another CPU's Python to the libraries of this one."""

_TICK: Final = 0.05
"""Seconds between two looks at a process that is waited for."""

_ENDS_WITHIN: Final = 2.0
"""Seconds that a command has to end by itself when its input is closed."""

_KEPT_BYTES: Final = 1 << 20
"""Of the output of the process, the last."""

_MARK: Final = re.compile(remote_worker.MARK.replace(b"%d", rb"(\d+)"))

_PIPE_BYTES: Final = 1 << 20
"""What a pipe to a worker of this machine holds: most messages without waiting for its reader."""

CHATTER: Final = re.compile(r"INFO: |I0000 |.*(npu_registry|compiler_plugin\.cc)|└ Could not load")
"""Lines that LiteRT prints for each file."""

_ERRORS: Final = {each.__name__: each for each in (RuntimeError, ValueError, KeyError, MemoryError)}
"""Errors of kernels, by what a target calls them."""


class LinkError(Exception):
    """
    The worker does not answer as it should.

    `kind` is `absent`, `start`, `missing`, `garbage`, `mute` (its stderr is hidden), `lost`,
    `time`, `closed`, or `other`: the request of another thread got no answer; `code` the exit
    status, minus the signal's number where one ended it; `pid` that of the process, if it ran.
    """

    def __init__(
        self,
        kind: str,
        what: str,
        printed: str = "",
        code: int | None = None,
        pid: int | None = None,
    ) -> None:
        super().__init__(what)
        self.kind, self.what, self.printed, self.code, self.pid = kind, what, printed, code, pid


class WorkerTracebackError(Exception):
    """The cause of an error that a function raised: its traceback in the worker, as text."""


class Link:
    """
    A running worker.

    Requests may come from several threads. The worker answers one after the other, and any thread
    that waits reads the answers of all. With `local`, the arguments of `remote_worker.main` in a
    process of this Python, messages are pickles and functions can be called.

    Raises:
        LinkError: The command does not start, ends, prints something else, or lacks a package.
    """

    def __init__(
        self,
        command: Sequence[str],
        seconds: float,
        *,
        local: Mapping[str, Any] | None = None,
        path: Sequence[str] | None = None,
        on_tick: Callable[[], object] = lambda: None,
    ) -> None:
        self._is_local = local is not None
        self._on_tick = on_tick
        self._owner = os.getpid()
        self._end: LinkError | None = None
        self._writing, self._reading = threading.Lock(), threading.Lock()
        # A pool may be collected, and so ended, at any allocation of any thread.
        self._ending, self._draining = threading.RLock(), threading.RLock()
        self._numbers = itertools.count(_HELLO + 1)
        self._waiting: list[int] = []  # numbers of requests, in the order in which it reads them
        self._answers: dict[int, tuple[Head, memoryview]] = {}
        self._tail = b""  # of its output, since the last mark
        self._marked: dict[int, bytes] = {}  # output before a mark, by its number
        self.forgotten: list[int] = []  # keys of open files that nobody uses any more
        self._process = self._started(command)
        self.pid = self._process.pid
        self._pipes = [
            cast("BinaryIO", pipe)
            for pipe in (self._process.stdin, self._process.stdout, self._process.stderr)
        ]
        self._in, self._out, self._err = (pipe.fileno() for pipe in self._pipes)
        self._is_err_open = True
        for pipe in (self._in, self._out, self._err):
            os.set_blocking(pipe, False)
            if self._is_local and sys.platform == "linux":
                import fcntl

                with contextlib.suppress(OSError):  # beyond what this user's pipes may hold
                    fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._life = time.monotonic()
        try:
            source = Path(remote_worker.__file__).read_text(encoding="utf-8")
            # Before the first import: a file of the working directory may have a library's name.
            path = "" if path is None else f"import sys;sys.path[:]={path!a};"
            boot = f"{path}exec(compile({source!a},'<edgeq worker>','exec'));main({local!a})\n"
            self._write([boot.encode("ascii")], seconds)
            head, _ = self._result(_HELLO, seconds)
        except LinkError as error:
            self.close()
            kind = "start" if error.kind == "lost" or self._is_local else error.kind
            raise LinkError(kind, error.what, error.printed, error.code) from None
        except BaseException:  # Ctrl-C
            self.close(0)
            raise
        if "missing" in head:
            self.close()
            what = f"Python {head['python']} that lacks a package ({head['missing']})"
            raise LinkError("missing", what, self.printed)
        # what a target says of itself (`remote_worker.facts`)
        self.facts: dict[str, Any] = head.get("facts", {})

    @property
    def is_alive(self) -> bool:
        """Whether it can answer requests, as far as is known; False in a fork."""
        if self._owner != os.getpid():
            return False
        hung_up = select.poll()  # which is known before the thread that waits for its end runs
        hung_up.register(self._out, 0)
        if self._end is None and (self._process.poll() is not None or hung_up.poll(0)):
            self._lost()  # before others that wait for an answer learn that it was closed
        return self._end is None

    @property
    def printed(self) -> str:
        """The end of its output."""
        return self._tail.decode(errors="replace")

    def take_printed(self) -> bytes:
        """Return its output since the last call."""
        self._drain()
        taken, self._tail = self._tail, b""
        return taken

    def ask(self, head: Head, parts: Iterable[Any] = (), seconds: float | None = None) -> list[Any]:
        """
        Send a request, and return the answer, or raise its error or a LinkError.

        With `printed` in its head, the answer or the error ends with the text that was printed.
        """
        number, has_text = next(self._numbers), "printed" in head
        # Finalizers of other threads may add some meanwhile.
        forgotten = [self.forgotten.pop() for _ in range(len(self.forgotten))]
        head = {**head, "id": number, "seconds": seconds, "forget": forgotten}
        pieces = pack(head, parts, is_local=self._is_local)
        try:
            with self._writing:
                self._waiting.append(number)
                self._write(pieces, seconds)
            del pieces
            head, rest = self._result(number, seconds)
            texts = [self._text(number, seconds)] if has_text else []
        except LinkError as error:  # not by `_ended`: what `close` waits for may end by itself
            if error.kind not in ("lost", "time") or number not in self._waiting[1:]:
                raise
            raise LinkError("other", error.what) from None
        except BaseException:
            # Half of a message may stand in the pipes.
            self._ended("lost", "an interrupt of this process")
            raise
        answer = unpack_parts(head, rest, is_local=self._is_local)
        if "error" not in head:
            return answer + texts
        if self._is_local:
            raise answer[0] from WorkerTracebackError(f"\n{head['error']}")
        kind, text = head["error"]
        text = "\n".join((text, *texts))
        raise _ERRORS[kind](text) if kind in _ERRORS else RuntimeError(f"{kind}: {text}")

    def kill(self) -> None:
        """Kill the process; its running call fails."""
        if self._owner == os.getpid():
            self._ended("closed", "the end of the session")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_ENDS_WITHIN)

    def close(self, seconds: float = _ENDS_WITHIN) -> None:
        """Close stdin, and kill the process if it has not ended after so many seconds."""
        if self._owner != os.getpid():
            return
        with self._ending:
            # Not "lost", after which waiting threads would restart the worker.
            self._end = self._end or LinkError("closed", "the end of the session")
        stdin, stdout, stderr = self._pipes
        with self._writing, self._reading:  # threads that wait notice the end within a tick
            stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
            self._kill()  # also what the command has started
            self._process.wait()
            stdout.close()
            with self._draining:
                self._drain()
                self._is_err_open = False
                stderr.close()

    def _write(self, pieces: Iterable[bytes], seconds: float | None) -> None:
        began = time.monotonic()
        with contextlib.suppress(BrokenPipeError):  # the answer or its lack says why
            for piece in pieces:
                view = memoryview(piece)
                while view:
                    self._check()
                    try:
                        view = view[os.write(self._in, view) :]
                    except BlockingIOError:
                        self._wait(self._in, select.POLLOUT, began, seconds)

    def _result(self, number: int, seconds: float | None) -> tuple[Head, memoryview]:
        """Return an answer as `unpack_head` does; keep those of other threads that come first."""
        began = time.monotonic()
        while True:
            with self._reading:
                if number not in self._answers:
                    head, rest = unpack_head(self._payload(began, seconds))
                    self._answers[head["id"]] = head, rest
                    if head["id"] != _HELLO:
                        self._waiting.remove(head["id"])
                if number in self._answers:
                    self._drain()
                    return self._answers.pop(number)

    def _text(self, number: int, seconds: float | None) -> str:
        """Return the output during a request, which may arrive behind its answer."""
        began = time.monotonic()
        while number not in self._marked:
            self._check()
            if not self._is_err_open:
                raise self._ended("mute", "its end")
            self._wait(self._err, select.POLLIN, began, seconds, "mute")
        return self._marked.pop(number).decode(errors="replace")

    def _payload(self, began: float, seconds: float | None) -> memoryview:
        read_into = functools.partial(self._read_into, began, seconds)
        try:
            payload = read_payload(read_into, is_local=self._is_local)
        except FrameError as error:
            raise self._ended("garbage", f"{error} on stdout, {error.received[:32]!r}") from None
        if payload is None:
            raise self._lost()
        return payload

    def _read_into(self, began: float, seconds: float | None, view: memoryview) -> int:
        """Read bytes of answers, as many as there are; none at the end of them."""
        while True:
            self._check()
            try:
                count = os.readv(self._out, [view])
            except BlockingIOError:
                self._wait(self._out, select.POLLIN, began, seconds)
            else:
                self._life = time.monotonic()
                return count

    def _check(self) -> None:
        if self._end is not None:
            raise self._end

    def _wait(
        self, pipe: int, event: int, began: float, seconds: float | None, kind: str = "time"
    ) -> None:
        """Wait for a pipe for a tick; read the output of the process meanwhile."""
        poll = select.poll()
        poll.register(pipe, event)
        if self._is_err_open:
            poll.register(self._err, select.POLLIN)
        end = math.inf if seconds is None else max(began, self._life) + seconds
        ready = dict(poll.poll(1e3 * min(_TICK, max(0.0, end - time.monotonic()))))
        if self._err in ready:
            self._drain()
        if pipe in ready:
            return
        self._on_tick()
        # What it has started may hold its pipes.
        if self._process.poll() is not None and not poll.poll(0):
            raise self._lost()
        if seconds is not None and time.monotonic() >= max(began, self._life) + seconds:
            raise self._ended(kind, f"nothing for {seconds:g} s")

    def _drain(self) -> None:
        """Read the output of the process, and keep its end."""
        with self._draining, contextlib.suppress(BlockingIOError):
            while self._is_err_open:
                chunk = os.read(self._err, _KEPT_BYTES)
                self._is_err_open = bool(chunk)
                *marked, tail = _MARK.split(self._tail + chunk)
                self._marked.update(zip(map(int, marked[1::2]), marked[::2], strict=True))
                self._tail = tail[-_KEPT_BYTES:]

    def _started(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        program = shutil.which(command[0])
        if program is None:
            raise LinkError("absent", f"no program {command[0]!r}")
        words = [program, *command[1:], "-u", "-c", _BOOT]
        environment = dict(os.environ)
        if self._is_local:
            words.append(LOCAL_NAME)
        else:
            for name in _OF_THIS_PYTHON:
                environment.pop(name, None)
        if sys.platform == "linux":
            words = [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid()), *words]
        started: Future[subprocess.Popen[bytes]] = Future()
        # Linux ends a guarded process with the thread that has started it: this one waits for it.
        start = threading.Thread(target=_start, args=(words, environment, started), daemon=True)
        start.start()
        try:
            return started.result()
        except OSError as error:
            raise LinkError("start", str(error)) from error

    def _lost(self) -> LinkError:
        """Say how the process ended."""
        try:
            code = self._process.wait(_ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            return self._ended("lost", "the end of its stdout")
        what = f"{signal_name(-code)} of its process" if code < 0 else f"exit code {code}"
        return self._ended("lost", what, code)

    def _ended(self, kind: str, what: str, code: int | None = None) -> LinkError:
        """Kill the process, so that all later requests fail; return the first reason."""
        if kind != "lost":
            self._kill()
        self._drain()
        with self._ending:
            if self._end is None:
                self._end = LinkError(kind, what, self.printed, code, self.pid)
        self._kill()
        return self._end

    def _kill(self) -> None:
        if self._owner == os.getpid():
            with contextlib.suppress(OSError):  # it has ended
                os.killpg(self._process.pid, signal.SIGKILL)


def _start(
    words: list[str], environment: dict[str, str], started: Future[subprocess.Popen[bytes]]
) -> None:
    pipe = subprocess.PIPE
    try:
        # In a session of its own: Ctrl-C is for this process to act on.
        process = subprocess.Popen(
            words, 0, None, pipe, pipe, pipe, env=environment, start_new_session=True
        )
    except BaseException as error:  # of the thread that waits
        started.set_exception(error)
    else:
        started.set_result(process)
        process.wait()


def signal_name(number: int) -> str:
    """Return the name of a signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def printed_lines(printed: str) -> list[str]:
    """Return the last lines that a process printed, for a failure text; none if it printed none."""
    lines = [line.rstrip()[:150] for line in printed.splitlines()]
    lines = [line for line in lines if line and not CHATTER.match(line)][-20:]
    return ["printed last:", *(f"  | {line}" for line in lines)] if lines else []
