"""Try numbered cases in a process that may die, hang or grow, and tell which did."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.waiting import SECONDS

ROOT = Path(__file__).parents[2]


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

    def fail(self, *failure: str | int) -> None:
        """Add a failed case."""
        self.failures.append(Failure(*failure))  # type: ignore[arg-type] # as its fields are
        self.outcomes[self.failures[-1].kind] += 1


def try_cases(seed: int, numbers: range) -> Report:
    """Try each case once, in as few processes as live."""
    report, left = Report(), numbers
    while left:
        with tempfile.TemporaryFile() as stderr:
            left = _try_until_one_dies(seed, left, report, stderr.fileno())
    return report


def _try_until_one_dies(seed: int, numbers: range, report: Report, stderr: int) -> range:
    """Return the numbers that are left."""
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    asked = seed, numbers.start, numbers.stop
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.trials", *map(str, asked)],
        stdout=subprocess.PIPE,
        stderr=stderr,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        text=True,
    )
    assert process.stdout is not None
    number, stage, hung = numbers.start, "import", threading.Event()

    def kill() -> None:
        hung.set()
        process.kill()

    timer = threading.Timer(SECONDS, kill)
    with process.stdout:
        for line in process.stdout:
            word, _, rest = line.rstrip("\n").partition(" ")
            if word == "stage":
                stage = rest
                if stage == "start":
                    timer = threading.Timer(SECONDS, kill)
                    timer.start()
                continue
            timer.cancel()
            outcome, _, text = rest.partition(" ")
            if outcome == "bare":
                report.fail(number, "bare", stage, text)
            else:
                report.outcomes[outcome if outcome == "refused" else text] += 1
            number += 1
    timer.cancel()
    code = process.wait(SECONDS)
    if hung.is_set():
        report.fail(number, "hung", stage, f"longer than {SECONDS:g} s")
    elif code:
        os.lseek(stderr, max(0, os.lseek(stderr, 0, os.SEEK_END) - 600), os.SEEK_SET)
        printed = os.read(stderr, 600).decode("utf-8", "replace").split("\n")
        last = " / ".join(line for line in printed[-4:] if line.strip())
        name = signal.Signals(-code).name if code < 0 else f"exit {code}"
        report.fail(number, "died", stage, f"{name}: {last}")
    return range(number + bool(hung.is_set() or code), numbers.stop)
