"""Try numbered cases in processes that may die, hang or grow, and tell which did."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.waiting import SECONDS, line_of

ROOT = Path(__file__).parents[2]

_SECONDS = 60.0
"""What a case may take; a sound one takes some milliseconds."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A case that ended in no result and in no error of the package."""

    number: int
    kind: str  # `died`, `hung` or `bare`
    stage: str  # what was being done
    told: str  # the signal with the last lines of stderr, or the error


@dataclass(slots=True)
class Report:
    """How the cases ended: how many in each way, and those that failed."""

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)


def try_cases(kind: str, seed: int, numbers: Iterable[int], workers: int = 2) -> Report:
    """Try each case of a kind once."""
    shares = [list(numbers)[i::workers] for i in range(workers)]
    report, lock = Report(), threading.Lock()
    with ThreadPoolExecutor(workers) as pool:
        working = [pool.submit(_work, kind, seed, share, report, lock) for share in shares]
    for each in working:
        each.result()  # of a worker that failed, its error
    report.failures.sort(key=lambda failure: failure.number)
    return report


def _work(
    kind: str, seed: int, numbers: Iterable[int], report: Report, lock: threading.Lock
) -> None:
    process = None
    with tempfile.TemporaryFile() as stderr:
        for number in numbers:
            process = process or _start(kind, seed, stderr.fileno())
            stderr.seek(0)
            stderr.truncate()
            failure, outcome = _try(process, number)
            if failure is not None and failure.kind != "bare":
                process = None
                stderr.seek(0)
                printed = stderr.read()[-600:].decode("utf-8", "replace").split("\n")
                last = " / ".join(line for line in printed[-4:] if line.strip())
                failure = replace(failure, told=f"{failure.told}: {last}")
            with lock:
                report.outcomes[outcome if failure is None else failure.kind] += 1
                report.failures += [] if failure is None else [failure]
        if process is not None:
            _end(process)


def _start(kind: str, seed: int, stderr: int) -> subprocess.Popen[str]:
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.trials", kind, str(seed)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        text=True,
        bufsize=1,
    )
    assert process.stdout is not None
    if line_of(process) != "ready\n":
        raise RuntimeError(f"the process that tries {kind} ended before the first: {_end(process)}")
    return process


def _end(process: subprocess.Popen[str]) -> int:
    """Wait for a process that has nothing more to read, or is dead, and return its exit code."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    code = process.wait(SECONDS)
    process.stdout.close()
    return code


def _try(process: subprocess.Popen[str], number: int) -> tuple[Failure | None, str]:
    """Have a process try a case; it is dead where it died or hung."""
    assert process.stdin is not None
    assert process.stdout is not None
    hung = threading.Event()

    def kill() -> None:
        hung.set()
        process.kill()

    timer = threading.Timer(_SECONDS, kill)
    timer.start()
    stage = "start"
    try:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(f"{number}\n")
        for line in process.stdout:
            word, _, rest = line.rstrip("\n").partition(" ")
            if word == "stage":
                stage = rest
            elif word == "done":
                outcome, _, text = rest.partition(" ")
                if outcome == "bare":
                    return Failure(number, "bare", stage, text), ""
                return None, outcome if outcome == "refused" else text
    finally:
        timer.cancel()
    code = _end(process)
    if hung.is_set():
        return Failure(number, "hung", stage, f"longer than {_SECONDS:g} s"), ""
    name = signal.Signals(-code).name if code < 0 else f"exit {code}"
    return Failure(number, "died", stage, name), ""
