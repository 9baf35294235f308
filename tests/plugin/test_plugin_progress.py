"""The line of a long step: on a terminal, below what pytest writes, and gone in the end."""

from __future__ import annotations

import re

import pytest

from fixtures.tflite import make
from tests.plugin.screen import Recording, record
from tests.projects import Project

HEAD = """
import time
from pathlib import Path
import pytest
from pytest_edgeq.plugin.state import state_key


@pytest.fixture
def progress(request):
    return request.config.stash[state_key].progress


def wait():
    until = time.monotonic() + 60
    while not Path("seen").exists() and time.monotonic() < until:
        time.sleep(0.01)
    Path("seen").unlink()  # fails where nothing was shown

"""

LONG = """
@pytest.mark.parametrize("number", range(3))
def test_before(number):
    pass


def test_with_a_long_step{suffix}(progress):
    print("told by the test")
    with progress.step("check", "Outer", [1, 2, 3]) as step:
        wait()
        samples = step.each(iter("abc"))
        next(samples), next(samples)
        with progress.step("convert", "Größe\\n" + 100 * "x"):
            wait()
    assert not "a long step"


def test_after():
    pass
"""

QUICK = """
import time
from pytest_edgeq.plugin.state import state_key

def test_a_long_step(request):
    with request.config.stash[state_key].progress.step("convert", "Net"):
        time.sleep(0.3)

def test_of_a_debugger(request, capfd):
    with capfd.disabled(), request.config.stash[state_key].progress.step("convert", "Net"):
        time.sleep(0.3)
"""


@pytest.fixture(autouse=True)
def _shown_soon(project: Project) -> None:
    """Show a step after a tenth of the time, in a project that may sleep less, too."""
    soon = "from pytest_edgeq.plugin import terminal_progress\nterminal_progress._DELAY = 0.05\n"
    project.write({"conftest": soon})


def _assert_nothing_is_left(run: Recording) -> None:
    """What pytest has written stands where it would without, and so does the cursor."""
    lines, cursor = run.screen()
    assert (lines, cursor) == run.screen_of_pytest_alone()
    assert not [line for line in lines if line.startswith(("edgeq: check", "edgeq: convert"))]


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("option", "rows"), [("-v", 4), ("-q", 24), ("--color=yes", 4)])
def test_the_line_is_seen_and_leaves_no_trace(project: Project, option: str, rows: int) -> None:
    """In each style, in the middle of the screen and on its last row."""
    project.write(HEAD + LONG.format(suffix=""))
    run = record(project.path, option, rows=rows)
    told = [re.sub(r"\d+ s", "… s", line) for line in run.steps]
    assert told[0] == "edgeq: check 0 of 3, … s, Outer"
    assert any(line.startswith("edgeq: convert, … s, Gr??e?xxxxx") for line in told)
    assert run.seen
    assert max(map(len, run.steps)) == 79
    _assert_nothing_is_left(run)
    assert any("1 failed, 4 passed" in line for line in run.screen()[0])


@pytest.mark.slow
def test_lines_of_several_steps(project: Project) -> None:
    """Of an inner step, its outer one again, an executor, a comparison; none after a failure."""
    file = str(make.CONVERTED / "equal_weights.int8.tflite")
    project.write(
        HEAD
        + f"""
def test_inner_and_outer(progress):
    with progress.step("check", "Outer", [1, 2, 3]) as step:
        with progress.step("convert", "Inner"):
            wait()
        step.advance()
        wait()

def test_executor(progress):
    with progress.step("compare", "Net", range(10)) as step:
        step.in_flight = 4
        step.advance(6)
        wait()

def test_comparison(edgeq):
    import numpy as np

    def samples():
        yield np.ones(shape, np.float32)
        wait()
        yield np.zeros(shape, np.float32)

    file = edgeq.load({file!r})
    model = edgeq.load({file!r}, reference=lambda x: tuple(file.run(x).values()))
    shape = model.inputs[0].shape
    edgeq.compare(model, samples())

def test_fails(progress):
    with progress.step("convert", "Failing"):
        wait()
        raise ValueError("refused")

def test_is_interrupted(progress):
    with progress.step("convert", "Interrupted"):
        wait()
        raise KeyboardInterrupt
"""
    )
    run = record(project.path, "-v")
    told = [re.sub(r"\d+ s", "… s", re.sub(r"\d+\.\d/s", "…/s", line)) for line in run.steps]
    assert list(dict.fromkeys(told)) == [
        "edgeq: convert, … s, Inner",
        "edgeq: check 1 of 3, … s, Outer",
        "edgeq: compare 6 of 10, … s, …/s, 4 in flight, Net",
        "edgeq: compare 1, … s, equal_weights.int8",
        "edgeq: convert, … s, Failing",
        "edgeq: convert, … s, Interrupted",
    ]
    _assert_nothing_is_left(run)


NAME = "_and_" + "a_rather_" * 6 + "long_name"
WIDTH = len(f"test_x.py::test_with_a_long_step{NAME} ")
"""Columns that `-v` writes before the test runs."""


@pytest.mark.sweep(1)
@pytest.mark.parametrize("columns", [WIDTH // 2 + 1, WIDTH // 2 - 1, WIDTH - 1, WIDTH + 1, WIDTH])
def test_a_line_of_pytest_may_be_longer_than_the_terminal(project: Project, columns: int) -> None:
    """Nothing is shown behind the last column: no sequence brings the cursor back to there."""
    test = HEAD + LONG.format(suffix=NAME)
    project.write(test.replace("  wait()", "  time.sleep(0.5)") if columns == WIDTH else test)
    run = record(project.path, "-v", columns=columns)
    assert bool(run.seen) == bool(run.steps) == (columns != WIDTH)
    _assert_nothing_is_left(run)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("options", "environment"),
    [
        (["-s"], {}),
        (["--capture=sys"], {}),
        (["--capture=tee-sys"], {}),
        (["-n", "1"], {}),
        (["-o", "log_cli=true"], {}),
        (["--log-cli-level=INFO"], {}),
        (["-p", "no:terminal"], {}),
        ([], {"CI": "true"}),
        ([], {"TERM": "dumb"}),
        (["-k", "debugger"], {}),
    ],
    ids=str,
)
def test_no_line_where_it_would_be_in_the_way(
    project: Project, options: list[str], environment: dict[str, str]
) -> None:
    """Beside a test's own output, in a log, where no terminal can rewrite, to a debugger."""
    project.write(QUICK)
    run = record(project.path, *options, environment=environment)
    assert run.steps == []
    assert b"edgeq: convert" not in run.written


def test_no_line_where_the_output_is_no_terminal(project: Project) -> None:
    """A pipe or a file, as in a log of CI."""
    result = project.run(files=QUICK, passed=2, hides="edgeq: convert*")
    assert "\x1b" not in result.stdout.str()
