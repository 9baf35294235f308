"""Reports of how a worker ended."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pytest_edgeq.runtimes.workers.link import LinkError, printed_lines, signal_name
from pytest_edgeq.tflite.mapped import Buffer, MappedFile

# Printed by libraries where an allocation fails, before they end the process.
_OUT_OF_MEMORY = ("bad_alloc", "Cannot allocate memory", "ut of memory", "emory allocation")

# Share of the bound on memory at which a process ended for want of it.
_NEAR = 0.9

_SIGNALS = {
    "SIGKILL": "from outside",
    "SIGSEGV": "(invalid memory access)",
    "SIGBUS": "(memory that its file does not back)",
    "SIGABRT": "(abort)",
    "SIGFPE": "(integer division by zero or overflow)",
    "SIGILL": "(an instruction that this CPU lacks)",
    "SIGTRAP": "(a trap of the compiler)",
}

# The first line and the frames that faulthandler writes.
_DUMP = re.compile(r"^(?:Fatal Python error: .*|Timeout \(.*\)!)$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$')


class Memory(NamedTuple):
    """Memory of a process, in bytes."""

    resident: int
    data: int  # private writable mappings, which the bound is on

    @classmethod
    def of(cls, pid: int) -> Memory | None:
        """Read the memory of a running process; None where it has ended, or there is no /proc."""
        try:
            pages = Path(f"/proc/{pid}/statm").read_bytes().split()
        except OSError:
            return None
        resident, data = (int(pages[place]) * os.sysconf("SC_PAGE_SIZE") for place in (1, 5))
        # Without any it has ended, and nobody has asked for its status yet.
        return cls(resident, data) if resident else None


class WorkerCrashError(LinkError):
    """
    A worker of this machine ended before it returned a result.

    `kind` is `signal`, `exit`, `timeout`, `memory` or `start`; `memory` what it held when it was
    last looked at, `bound` the bytes that it could map, 0 where it never ran.
    """

    def __init__(
        self, error: LinkError, seconds: float | None, memory: Memory | None, bound: int
    ) -> None:
        code = -signal.SIGKILL if error.code is None else error.code
        kinds = {"closed": "signal", "time": "timeout", "memory": "memory"}
        kinds["lost"] = "exit" if code >= 0 else "signal"
        kind = kinds.get(error.kind, "start")
        self.was_killed = kind == "signal" and code == -signal.SIGKILL  # by another process
        ran_out = any(word in error.printed for word in _OUT_OF_MEMORY) or (
            memory is not None and memory.data > _NEAR * bound
        )
        if kind in ("signal", "exit") and ran_out and not self.was_killed:
            kind = "memory"
        name = signal_name(-code)
        what = {
            "signal": name if name not in _SIGNALS else f"{name} {_SIGNALS[name]}",
            "timeout": f"no result in {seconds or 0:g} s",
            "memory": f"memory beyond the bound of {size_text(bound)}",
            "start": "a child process that cannot be started",
            "exit": f"an exit with status {code}",
        }[kind]
        printed = error.printed or error.what if kind == "start" else error.printed
        super().__init__(kind, what, printed, code, error.pid)
        self.memory, self.bound = None if kind == "start" else memory, bound

    def _frames(self, dump: str) -> list[str]:
        """Return the Python frames below which it ended, the innermost first, without ours."""
        frames: list[str] = []
        for line in dump.splitlines():
            frame = _FRAME.match(line)
            if frame is None:
                frames = []  # of another thread
            elif frame[1] == "<edgeq worker>":  # of `remote_worker`
                return frames
            elif "/pytest_edgeq/" not in frame[1]:
                frames.append(f"{frame[1]}, line {frame[2]}, in {frame[3]}")
        return []

    def text(self, first: str, facts: Sequence[str] = (), *, own: str | None = None) -> str:
        """Return a failure text with this first line; `own` is the file of a user's own runtime."""
        lines = [first, *facts]
        printed, *dump = _DUMP.split(self.printed)
        if own is not None and dump and (frames := self._frames(dump[-1])):
            # What cloudpickle sends does not know its file.
            frames = [frame.replace("<dynamic-code>", own or "<dynamic-code>") for frame in frames]
            lines += ["where:", *(f"  {frame}"[:150] for frame in frames[:3])]
        held = "unknown, as it was not looked at before it ended"
        if self.memory is not None:
            held = f"{size_text(self.memory.resident)} in RAM, {size_text(self.memory.data)} mapped"
        elif sys.platform != "linux":
            held = "unknown on this system"
        lines.append(f"memory held: {held} (bound: {size_text(self.bound)})")
        lines += printed_lines(printed) or ["printed: nothing"]
        kind = "killed" if self.was_killed else self.kind
        cause, fix = _TEXTS[f"own {kind}" if own is not None and kind == "signal" else kind]
        library, correct = _OF_LIBRARY if own is None else _OF_OWN
        lines.append(f"cause: {cause.format(library=library)}")
        lines.append(f"fix: {fix.format(correct=correct)}")
        return "\n".join(lines)


_OF_LIBRARY = ("the library", "report it with the file to the library's authors")
_OF_OWN = ("the runtime of your own", "correct the runtime")

# Causes and fixes by how a worker ended.
_TEXTS = {
    "killed": (
        "another process sent SIGKILL, as the kernel does where memory runs out (the OOM killer), "
        "or a user or a job manager; the test did not",
        "give the machine or container more memory, run fewer workers (-n), or look into its log "
        "(dmesg)",
    ),
    "timeout": (
        "{library} did not return: an endless loop, a wait, or a machine too slow for this bound",
        "{correct}, or raise the bound: --edgeq-isolate-timeout",
    ),
    "memory": (
        "{library} asked for more memory than the bound allows: a leak, a large model, or "
        "sizes in the file that nothing bounds",
        "{correct}, or raise the bound: --edgeq-isolate-memory",
    ),
    "start": (
        "the child process ended before it could run anything",
        "read what it printed; --edgeq-isolate=off runs without one",
    ),
    "exit": (
        "{library} called exit, which ends a process without an error",
        "{correct}: let it raise an error",
    ),
    "own signal": (
        "native code that the runtime of your own calls ended its process, where no Python error "
        "can be raised",
        "correct the runtime; `where:` is the Python that called the native code",
    ),
    "signal": (
        "native code of the library ended its process, where no Python error can be raised: a "
        "defect of the library,\n  which a damaged or unusual file brings out",
        "build the file again, leave the op out, or choose another runtime; report it with the "
        "file to the library's authors",
    ),
}


def file_fact(content: Buffer, digest: str) -> str:
    """Return the line of a failure text that names the open file."""
    where = content.label if isinstance(content, MappedFile) else "held in memory"
    return f"file: {where} ({len(content):,} bytes, sha256 {digest[:16]})"


def size_text(size: int) -> str:
    """Write a number of bytes."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size >> 10} KiB"
