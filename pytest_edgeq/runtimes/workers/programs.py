"""Run the programs that make an emulated root, and tell their failures in sentences."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Sequence

_LAST_LINES = 6
"""How many lines of output are shown: enough for the errors of apt-get and of pip."""


class EmulatedRootError(RuntimeError):
    """An emulated root cannot be made; the text says why, and what to do."""


def run(command: Sequence[str], failure: str) -> subprocess.CompletedProcess[str]:
    """
    Run a program as `start` does, and require that it succeeds.

    Raises:
        EmulatedRootError: The program fails; has its last lines.
    """
    done = start(command)
    if done.returncode:
        ended = (
            f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
        )
        raise EmulatedRootError(
            f"{failure}: {shlex.join(command[:2])} ended with {ended}"
            f"{last_lines(done.stderr or done.stdout)}"
        )
    return done


def start(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a program, whose messages are in English, to its end."""
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"LC_ALL": "C"}
    )


def last_lines(output: str) -> str:
    """Return the last lines of a program's output, indented, each below a line break."""
    return "".join(f"\n  {line.strip()}" for line in output.splitlines()[-_LAST_LINES:])
