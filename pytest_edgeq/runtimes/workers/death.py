"""How a child process ended, in words."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_LINES = 20
"""Of what the child printed last, in a failure text."""

_FRAMES = 3
"""Of the Python stack, the innermost."""

_WIDTH = 150
"""Characters of a line that the child printed."""

_SIGNALS = {
    "SIGSEGV": "invalid memory access",
    "SIGBUS": "memory that its file does not back",
    "SIGABRT": "abort",
    "SIGFPE": "integer division by zero or overflow",
    "SIGILL": "an instruction that this CPU lacks",
    "SIGTRAP": "a trap of the compiler",
}

_DUMP = re.compile(r"^(?:Fatal Python error: .*|Timeout \(.*\)!)$", re.MULTILINE)
"""First line of what faulthandler writes."""

_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$')

_OWN = "/pytest_edgeq/"

_SENT = "<dynamic-code>"

_CHILD = "/workers/child.py"


@dataclass(frozen=True, slots=True)
class Memory:
    """
    Memory of a process, in bytes.

    Attributes:
        resident: In RAM.
        data: Private writable mappings, which the bound is on.
    """

    resident: int
    data: int

    @classmethod
    def of(cls, pid: int) -> Memory | None:
        """Read the memory of a running process; None where it has ended, or there is no /proc."""
        try:
            status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
        except OSError:
            return None
        sizes = dict(re.findall(r"^(Vm\w+):\s+(\d+) kB$", status, re.MULTILINE))
        if "VmRSS" not in sizes:  # it has ended, and nobody has asked for its status yet
            return None
        return cls(int(sizes["VmRSS"]) << 10, int(sizes["VmData"]) << 10)


@dataclass(frozen=True, slots=True)
class Death:
    """
    How a child ended.

    Attributes:
        kind: `signal`, `exit`, `timeout`, `memory` or `start`.
        signal: Its number.
        exit_code: Of a child that ended by itself.
        seconds: The bound on time, which it exceeded.
        memory: What it held when it was last looked at; None where that is unknown.
        bound: Bytes that it could map; 0 where it never ran.
        printed: The end of what it printed.
    """

    kind: str
    signal: int = 0
    exit_code: int = 0
    seconds: float = 0
    memory: Memory | None = None
    bound: int = 0
    printed: str = ""

    @property
    def was_killed(self) -> bool:
        """Whether another process has killed it: ours tells of the bounds that it exceeds."""
        return self.kind == "signal" and self.signal == getattr(signal, "SIGKILL", -1)

    @property
    def what(self) -> str:
        """Say how it ended, in a few words."""
        if self.kind == "signal":
            name = _signal_name(self.signal)
            if self.was_killed:
                return f"{name} from outside"
            return f"{name} ({_SIGNALS[name]})" if name in _SIGNALS else name
        if self.kind == "timeout":
            return f"no result in {self.seconds:g} s"
        if self.kind == "memory":
            return f"memory beyond the bound of {size_text(self.bound)}"
        if self.kind == "start":
            return "a child process that cannot be started"
        return f"an exit with status {self.exit_code}"

    @property
    def frames(self) -> list[str]:
        """The Python frames below which it ended, the innermost first, without ours."""
        found = _DUMP.search(self.printed)
        if found is None:
            return []
        frames: list[str] = []
        for line in self.printed[found.end() :].splitlines():
            frame = _FRAME.match(line)
            if frame is None:
                frames = []  # of another thread
            elif _OWN in (path := frame[1].replace("\\", "/")):
                if path.endswith(_CHILD) and frame[3] == "step":
                    return frames
            else:
                frames.append(f"{frame[1]}, line {frame[2]}, in {frame[3]}")
        return []

    @property
    def last_lines(self) -> list[str]:
        """The last lines that the library printed, without Python's own about the crash."""
        found = _DUMP.search(self.printed)
        text = self.printed if found is None else self.printed[: found.start()]
        lines = [line.rstrip() for line in text.splitlines()]
        return [line[:_WIDTH] for line in lines if line][-_LINES:]

    def told(self, facts: Sequence[str], *, own: str | None) -> list[str]:
        """Return the lines behind the first of a failure text."""
        lines = list(facts)
        if self.frames and own is not None:
            lines.append("where:")
            # What cloudpickle sends does not know its file.
            frames = [frame.replace(_SENT, own or _SENT) for frame in self.frames[:_FRAMES]]
            lines += [f"  {frame}"[:_WIDTH] for frame in frames]
        if self.memory is not None:
            held = f"{size_text(self.memory.resident)} in RAM, {size_text(self.memory.data)} mapped"
        else:
            held = "unknown, as it was not looked at before it ended"
            if sys.platform != "linux":
                held = "unknown on this system"
        lines.append(f"memory held: {held} (bound: {size_text(self.bound)})")
        printed = self.last_lines
        lines.append("printed last:" if printed else "printed: nothing")
        lines += [f"  | {line}" for line in printed]
        lines += self._way_out(own=own is not None)
        return lines

    def _way_out(self, *, own: bool) -> list[str]:
        library = "the runtime of your own" if own else "the library"
        correct = (
            "correct the runtime" if own else "report it with the file to the library's authors"
        )
        if self.was_killed:
            return [
                "cause: another process sent SIGKILL, as the kernel does where memory runs out "
                "(the OOM killer), or a user or a job manager; the test did not",
                "fix: give the machine or container more memory, run fewer workers (-n), or look "
                "into its log (dmesg)",
            ]
        if self.kind == "timeout":
            return [
                f"cause: {library} did not return: an endless loop, a wait, or a machine too slow "
                "for this bound",
                f"fix: {correct}, or raise the bound: --edgeq-isolate-timeout",
            ]
        if self.kind == "memory":
            return [
                f"cause: {library} asked for more memory than the bound lets it have: a leak, a "
                "large model, or sizes in the file that nothing bounds",
                f"fix: {correct}, or raise the bound: --edgeq-isolate-memory",
            ]
        if self.kind == "start":
            return [
                "cause: the child process ended before it could run anything",
                "fix: read what it printed; --edgeq-isolate=off runs without one",
            ]
        if self.kind == "exit":
            return [
                f"cause: {library} called exit, which ends a process without an error",
                f"fix: {correct}: let it raise an error",
            ]
        if own:
            return [
                "cause: native code that the runtime of your own calls ended its process, where no "
                "Python error can be raised",
                "fix: correct the runtime; `where:` is the Python that called the native code",
            ]
        return [
            "cause: native code of the library ended its process, where no Python error can be "
            "raised: a defect of the library,",
            "  which a damaged or unusual file brings out",
            "fix: build the file again, leave the op out, or choose another runtime; report it "
            "with the file to the library's authors",
        ]


class DeathError(Exception):
    """A child process ended before it gave a result."""

    def __init__(self, death: Death) -> None:
        super().__init__(death.what)
        self.death = death


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def file_fact(source: Path | bytes, digest: str, size: int) -> str:
    """Return the line of a failure text that tells which file was open."""
    where = "held in memory" if isinstance(source, bytes) else str(source)
    return f"file: {where} ({size:,} bytes, sha256 {digest[:16]})"


def size_text(size: int) -> str:
    """Write a number of bytes."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size >> 10} KiB"
