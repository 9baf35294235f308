"""A target of a session: started when it is first used, and shared by all that runs on it."""

from __future__ import annotations

import re
import shlex
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from pytest_edgeq.errors import CrashedError, UnrunnableError
from pytest_edgeq.names import GPU_KERNELS
from pytest_edgeq.numerics.target_machine import PRECISIONS, TargetMachine
from pytest_edgeq.runtimes.workers.link import Link, LinkError, printed_lines
from pytest_edgeq.runtimes.workers.target_spec import checked_command

if TYPE_CHECKING:
    from pytest_edgeq.runtimes.engines import Engine, Opening
    from pytest_edgeq.runtimes.workers.remote_engine import RemoteFile


Texts: TypeAlias = Mapping[str, tuple[str, str, str]]
"""Symptom, cause and fix by how a target failed."""


_TRIED: Final = ("xnnpack", "builtin")
"""Kernels that a trial of a target runs."""


class Trial(NamedTuple):
    """The result of a trial."""

    machine: TargetMachine  # the machine that answered
    start: float  # milliseconds until it answered
    runs: dict[str, float]  # milliseconds of one run, to and fro, by kernels


class Target:
    """A command that starts a Python with numpy and ai_edge_litert elsewhere."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        seconds: float,
        *,
        path: Sequence[str] | None = None,
    ) -> None:
        self.name = name
        self.command = checked_command(name, command)
        self.seconds = seconds
        self._path = path  # of its imports; None for those of its own
        self.adapter = ""  # the GPU there, once a file has run on it
        self.proven: set[str] = set()  # kernels of the GPU that compute what their name says
        self.hung = ""  # how its GPU did not start in time: each test would wait for it again
        self.machine: TargetMachine | None = None  # that answers; None before the first use
        self.files: weakref.WeakValueDictionary[object, RemoteFile] = weakref.WeakValueDictionary()
        self._lock = threading.RLock()
        self._refused: LinkError | None = None
        self._links: list[Link] = []  # the link of now, if there is one
        weakref.finalize(self, _close, self._links)

    def start(self) -> TargetMachine:
        """Start the command, unless it runs, or raise an UnrunnableError."""
        try:
            self.link()
        except LinkError as error:
            raise self.failure(self.name, error) from None
        assert self.machine is not None, "unreachable because `link` has set it"
        return self.machine

    def try_out(self) -> Trial:
        """Start the command, unless it runs, and run a file of one op on its kernels."""
        import numpy as np

        from pytest_edgeq.runtimes.edge import EdgeFile
        from pytest_edgeq.runtimes.registry import Runtimes
        from pytest_edgeq.tflite.writing import one_op

        began = time.perf_counter()
        machine = self.start()
        start = time.perf_counter() - began
        edge = EdgeFile(one_op("NEG", "x"), runtimes=Runtimes(targets={self.name: self}))
        runs = {}
        for kernels in _TRIED:
            runner = edge.runner(f"{self.name}:{kernels}")
            began = time.perf_counter()
            [result] = runner.run({"x": np.array([3], np.float32)})
            runs[kernels] = (time.perf_counter() - began) * 1e3
            if result.tolist() != [-3.0]:
                raise RuntimeError(
                    f"the {self.name}:{kernels} runtime computes something else: expected [-3.0] "
                    f"of NEG of 3, got {result.tolist()}"
                )
        return Trial(machine, start * 1e3, runs)

    def machine_for(self, kernels: str) -> TargetMachine:
        """Return the machine with the precision of kernels, or raise an UnrunnableError."""
        machine = self.machine or self.start()
        if kernels not in GPU_KERNELS:
            return machine
        from pytest_edgeq.runtimes.workers.gpu_engine import prove_gpu

        prove_gpu(self, kernels)
        return replace(machine, adapter=self.adapter, precision=PRECISIONS[kernels])

    @property
    def used(self) -> TargetMachine | None:
        """The machine with its GPU, if a file has run there; None before the first use."""
        if self.machine is None or not self.proven:
            return self.machine
        precisions = " and ".join(PRECISIONS[each] for each in sorted(self.proven))
        return replace(self.machine, adapter=self.adapter, precision=precisions)

    def open(self, opening: Opening) -> Engine:
        """Open a file there, or raise an UnrunnableError."""
        # Only now, as they import numpy.
        from pytest_edgeq.runtimes.workers.gpu_engine import GpuEngine
        from pytest_edgeq.runtimes.workers.remote_engine import TargetEngine

        kind = GpuEngine if opening.kernels in GPU_KERNELS else TargetEngine
        return kind(opening, self)

    def link(self) -> Link:
        """Return the link of now, which is started where there is none, or raise a LinkError."""
        with self._lock:
            if self._refused is not None:
                raise self._refused
            if self._links and self._links[0].is_alive:
                return self._links[0]
            self.close()
            try:
                link = Link(self.command, self.seconds, path=self._path)
            except LinkError as error:
                if self.machine is None:
                    # Each test would wait for it again, by ssh for minutes.
                    self._refused = error
                raise
            self.machine = TargetMachine.of(self.name, link.facts)
            self._links.append(link)
            return link

    def failure(
        self, runtime: str, error: LinkError, op: str = "", texts: Texts = MappingProxyType({})
    ) -> UnrunnableError:
        """Return the error for a test: symptom, op, command, output and fix."""
        name = runtime.partition(":")[0]
        kind = "crash" if error.kind == "lost" and _CRASH.search(error.what) else error.kind
        first, cause, fix = texts.get(kind) or _TEXTS[kind]
        is_here = runtime in GPU_KERNELS
        check = "" if is_here else f"; then edgeq target check {name}"
        name = "xnnpack" if is_here else name
        lines = [first.format(what=error.what), *([op] if op else [])]
        lines.append(f"command: {shlex.join(self.command)}")
        lines += printed_lines(error.printed)
        lines.append(f"cause: {cause}")
        lines.append(f"fix: {fix.format(name=name, check=check, more=2 * round(self.seconds))}")
        is_crash = error.kind in ("lost", "time")
        return (CrashedError if is_crash else UnrunnableError)(runtime, "\n".join(lines))

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


_CRASH: Final = re.compile(r"SIG(SEGV|ABRT|BUS|FPE|ILL|TRAP)|exit code (132|133|134|135|136|139)")
"""Signals of crashes, and the exit codes of a shell for them."""


_TEXTS: Final = {
    "absent": (
        "did not start: expected a Python that answers, got {what}",
        "the program is not installed here, or not on the PATH",
        "install it, or give its whole path in edgeq_targets",
    ),
    "start": (
        "did not start: expected a Python that answers, got {what}",
        "the command ended before a Python answered",
        "run the command in a shell, where it must start a Python{check}",
    ),
    "missing": (
        "cannot run files: expected a Python with numpy and ai_edge_litert, got {what}",
        "the command starts a Python in which a package cannot be imported",
        "install it there: python3 -m pip install ai-edge-litert numpy{check}",
    ),
    "garbage": (
        "returned something else than an answer: expected frames on stdout, got {what}",
        "the command, a login script or a wrapper prints to stdout, which carries the answers",
        "have it print to stderr, or nothing (ssh -T, docker run -i without -t){check}",
    ),
    "mute": (
        "hides what is printed there: expected the stderr of a Python, got {what}",
        "the command or a wrapper redirects stderr, where LiteRT's GPU engine writes its errors",
        "leave stderr as it is (no 2>/dev/null){check}",
    ),
    "lost": (
        "lost its target: expected an answer, got {what}",
        "the kernels crashed, somebody ended the process, or the connection broke; it was tried "
        "once more where no state was lost",
        "run the test again by itself; edgeq target check {name} shows whether the target is there",
    ),
    "crash": (
        "lost its target: expected an answer, got {what}",
        "native code of the target crashed on this file, twice: the file is damaged, or it is a "
        "defect of the library there",
        "build the file again, leave the op out, or name other kernels ({name}:builtin); report it "
        "with the file to the library's authors",
    ),
    "closed": (
        "was closed: expected an answer, got {what}",
        "the session ended, or edgeq.close() was called, while a file ran",
        "run the test again",
    ),
    "time": (
        "did not answer: expected an answer in time, got {what}",
        "the file needs longer than that there, it hangs, or the connection is stuck",
        "--edgeq-target-timeout={more} allows more time; edgeq target check {name} shows whether "
        "the target is there",
    ),
}
