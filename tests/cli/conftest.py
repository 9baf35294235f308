"""Run commands in this process, and compare their texts with golden files."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
from click.testing import CliRunner, Result

from pytest_edgeq.cli import edgeq
from pytest_edgeq.cli.text import WIDTH

GOLDEN = Path(__file__).parent / "golden"
CONVERTED = Path(__file__).parents[2] / "fixtures" / "tflite" / "converted"

Run: TypeAlias = Callable[..., Result]
Refused: TypeAlias = Callable[..., None]
Check: TypeAlias = Callable[[str, str], None]


@pytest.fixture
def run() -> Run:
    """Run `edgeq` with arguments; the result has exit code, stdout and stderr."""

    def invoke(*arguments: object, given: str | None = None) -> Result:
        return CliRunner().invoke(
            edgeq, [str(each) for each in arguments], input=given, prog_name="edgeq"
        )

    return invoke


@pytest.fixture
def refused(run: Run) -> Refused:
    """Run what ends with exit code 2: a text on stderr, without a traceback, and no output."""

    def invoke(*arguments: object, says: str) -> None:
        done = run(*arguments)
        assert (done.exit_code, done.stdout) == (2, "")
        assert done.stderr.startswith(("Error: ", "Usage: "))
        assert says in " ".join(done.stderr.split())

    return invoke


@pytest.fixture
def golden() -> Check:
    """Compare a text with tests/cli/golden/<name>.txt, and its width with that of a terminal."""

    def check(name: str, text: str) -> None:
        assert text == (GOLDEN / f"{name}.txt").read_text("utf-8")
        assert max(map(len, text.splitlines())) <= WIDTH

    return check


def module(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m pytest_edgeq` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "pytest_edgeq", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | variables,
        timeout=100,
    )


_WITHOUT_TORCH = """
import sys
for name in ("torch", "torchao", "litert_torch", "ai_edge_torch", "ai_edge_quantizer", "pytest"):
    sys.modules[name] = None
from pytest_edgeq.cli import main
sys.argv = ["edgeq", *sys.argv[1:]]
main()
"""


def without_torch(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command where neither torch nor the converter nor pytest can be imported."""
    return subprocess.run(
        [sys.executable, "-c", _WITHOUT_TORCH, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
