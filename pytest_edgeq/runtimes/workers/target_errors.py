"""Errors of a target that does not answer as it should, or whose kernels fail."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Final

from pytest_edgeq.errors import CrashedError, UnrunnableError
from pytest_edgeq.runtimes.workers.link import Answer, LinkError, printed_lines

_ERRORS: Final = {each.__name__: each for each in (RuntimeError, ValueError, KeyError, MemoryError)}

_CRASH: Final = re.compile(r"SIG(SEGV|ABRT|BUS|FPE|ILL|TRAP)|exit code (132|133|134|135|136|139)")
"""Signals of crashes, and the exit codes of a shell for them."""


def raise_error(answer: Answer) -> Answer:
    """Return an answer if it is no error."""
    head = answer[0]
    if "error" not in head:
        return answer
    kind = head["error"]
    if kind in _ERRORS:
        raise _ERRORS[kind](head["text"])
    raise RuntimeError(f"{kind}: {head['text']}")


def link_error(
    runtime: str, command: Sequence[str], error: LinkError, seconds: float, op: str = ""
) -> UnrunnableError:
    """Return the error for a test: symptom, op, command, output and fix."""
    name = runtime.partition(":")[0]
    kind = "crash" if error.kind == "lost" and _CRASH.search(error.what) else error.kind
    first, cause, fix = _TEXTS[kind]
    lines = [first.format(what=error.what), *([op] if op else [])]
    lines.append(f"command: {shlex.join(command)}")
    lines += printed_lines(error.printed)
    lines.append(f"cause: {cause}")
    lines.append(f"fix: {fix.format(name=name, more=2 * round(seconds))}")
    is_crash = error.kind in ("lost", "time")
    return (CrashedError if is_crash else UnrunnableError)(runtime, "\n".join(lines))


_TEXTS: Final = {
    "absent": (
        "did not start: expected a Python that answers, got {what}",
        "the program is not installed here, or not on the PATH",
        "install it, or give its whole path in edgeq_targets",
    ),
    "start": (
        "did not start: expected a Python that answers, got {what}",
        "the command ended before a Python answered",
        "run the command in a shell, where it must start a Python; then edgeq target check {name}",
    ),
    "missing": (
        "cannot run files: expected a Python with numpy and ai_edge_litert, got {what}",
        "the command starts a Python in which a package cannot be imported",
        "install it there: python3 -m pip install ai-edge-litert numpy; then "
        "edgeq target check {name}",
    ),
    "garbage": (
        "gave something else than an answer: expected frames on stdout, got {what}",
        "the command, a login script or a wrapper prints to stdout, which carries the answers",
        "have it print to stderr, or nothing (ssh -T, docker run -i without -t); then "
        "edgeq target check {name}",
    ),
    "lost": (
        "lost its target: expected an answer, got {what}",
        "the kernels crashed, somebody ended the process, or the connection broke; it was tried "
        "once more where no state was lost",
        "run the test again by itself; edgeq target check {name} tells whether the target is there",
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
        "the file takes longer than that there, it hangs, or the connection is stuck",
        "--edgeq-target-timeout={more} gives it more time; edgeq target check {name} tells whether "
        "the target is there",
    ),
}
