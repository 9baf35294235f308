"""Compare failure texts with golden files, without what differs from machine to machine."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_edgeq.runtimes.workers import policy
from pytest_edgeq.runtimes.workers.crash_report import size_text
from pytest_edgeq.runtimes.workers.settings import default_memory

GOLDEN = Path(__file__).parent / "golden"

_VARYING = (
    (re.compile(r"(?<=^file: )/.*[/\\](?=\w+\.tflite)", re.MULTILINE), "<folder>/"),
    (re.compile(r"sha256 [0-9a-f]{16}"), "sha256 <hash>"),
    (re.compile(r"held: .* in RAM, .* mapped"), "held: <size> in RAM, <size> mapped"),
    (re.compile(rf"bound: {re.escape(size_text(default_memory()))}\)"), "bound: <size>)"),
    (
        re.compile(r"^  .*[/\\](\w+\.py), line \d+, in", re.MULTILINE),
        r"  <folder>/\1, line <n>, in",
    ),
)


Golden = Callable[[str, type[Exception], Callable[[], object]], None]
"""Run what must fail, and compare its text with the golden file of this name."""


@pytest.fixture(scope="session")
def golden() -> Golden:
    """Compare a failure's text with tests/runtimes/isolate/golden/<name>.txt."""

    def check(name: str, error: type[Exception], call: Callable[[], object]) -> None:
        with pytest.raises(error) as caught:
            call()
        text = str(caught.value)
        for pattern, stands_for in _VARYING:
            text = pattern.sub(stands_for, text)
        assert f"{text}\n" == (GOLDEN / f"{name}.txt").read_text("utf-8")
        assert max(map(len, text.splitlines())) <= 160

    return check


@pytest.fixture(autouse=True)
def _nothing_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each test begin with no file known to have survived."""
    monkeypatch.setattr(policy, "_survived", set())
