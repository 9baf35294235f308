"""The line of a long step: on a terminal, below what pytest writes, and gone in the end."""

from __future__ import annotations

import re
import sys

import pytest

from fixtures.tflite import make
from tests.plugin.screen import Recording, record

PROJECT = """
import time
from pathlib import Path
import pytest
from pytest_edgeq.plugin.state import progress_key


@pytest.fixture
def progress(request):
    return request.config.stash[progress_key]


def wait():
    until = time.monotonic() + 60
    while not Path("seen").exists() and time.monotonic() < until:
        time.sleep(0.01)
    Path("seen").unlink()  # fails where nothing was shown


@pytest.mark.parametrize("number", range(3))
def test_before(number):
    pass


def test_with_a_long_step{suffix}(progress):
    print("told by the test")
    with progress.step("check", "Outer", [1, 2, 3]) as step:
        wait()
        samples = step.each(iter("abc"))
        next(samples), next(samples)
        with progress.step("convert", "Größe\\n{long}"):
            wait()
    assert not "a long step"


def test_after():
    pass
"""

QUICK = """
import time
from pytest_edgeq.plugin.state import progress_key

def test_a_long_step(request):
    with request.config.stash[progress_key].step("convert", "Net"):
        time.sleep(0.5)
"""


@pytest.fixture(autouse=True)
def _shown_soon(pytester: pytest.Pytester) -> None:
    """Show a step after a tenth of the time, in a project that may sleep less, too."""
    pytester.makeconftest(
        "from pytest_edgeq.plugin import terminal_progress\nterminal_progress._DELAY = 0.05\n"
    )


def _project(pytester: pytest.Pytester, *, suffix: str = "") -> None:
    pytester.makepyfile(test_it=PROJECT.format(suffix=suffix, long="x" * 100))


def _assert_nothing_is_left(run: Recording) -> None:
    """What pytest has written stands where it would without, and so does the cursor."""
    lines, cursor = run.screen()
    assert (lines, cursor) == run.screen_of_pytest_alone()
    assert not [line for line in lines if line.startswith(("edgeq: check", "edgeq: convert"))]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("rows", [24, 4])
@pytest.mark.parametrize("option", ["-v", "-q", "--color=yes"])
def test_the_line_is_seen_and_leaves_no_trace(
    pytester: pytest.Pytester, option: str, rows: int
) -> None:
    """In each style, in the middle of the screen and on its last row."""
    _project(pytester)

    run = record(pytester.path, option, rows=rows)

    told = [re.sub(r"\d+ s", "… s", line) for line in run.steps]
    assert told[0] == "edgeq: check 0 of 3, … s, Outer"
    assert any(line.startswith("edgeq: convert, … s, Gr??e?xxxxx") for line in told)
    assert run.seen
    assert max(map(len, run.steps)) == 79
    _assert_nothing_is_left(run)
    lines, _ = run.screen()
    assert any("1 failed, 4 passed" in line for line in lines)


def test_the_outer_step_is_shown_again(pytester: pytest.Pytester) -> None:
    """A step in another one is shown while it runs; samples are counted when they are read."""
    pytester.makepyfile(
        test_it=PROJECT.partition("@pytest.mark")[0].format()
        + """
def test_it(progress):
    with progress.step("check", "Outer", [1, 2, 3]) as step:
        with progress.step("convert", "Inner"):
            wait()
        step.advance()
        wait()
"""
    )
    run = record(pytester.path)

    names = [line.split(",")[0] for line in run.steps]
    assert list(dict.fromkeys(names)) == ["edgeq: convert", "edgeq: check 1 of 3"]
    _assert_nothing_is_left(run)


def test_a_step_of_an_executor_tells_its_rate_and_what_is_in_flight(
    pytester: pytest.Pytester,
) -> None:
    """Samples are counted when they have been measured."""
    pytester.makepyfile(
        test_it=PROJECT.partition("@pytest.mark")[0].format()
        + """
def test_it(progress):
    with progress.step("compare", "Net", range(10)) as step:
        step.in_flight = 4
        step.advance(6)
        wait()
"""
    )
    run = record(pytester.path)

    assert re.fullmatch(r"edgeq: compare 6 of 10, \d+ s, \d+\.\d/s, 4 in flight, Net", run.steps[0])
    _assert_nothing_is_left(run)


NAME = "_and_" + "a_rather_" * 6 + "long_name"
WIDTH = len(f"test_it.py::test_with_a_long_step{NAME} ")
"""Columns that `-v` writes before the test runs."""


@pytest.mark.sweep(2)
@pytest.mark.parametrize("columns", [WIDTH // 2 - 1, WIDTH // 2 + 1, WIDTH - 1, WIDTH + 1])
def test_a_line_of_pytest_may_be_longer_than_the_terminal(
    pytester: pytest.Pytester, columns: int
) -> None:
    """The name of the test fills more than one row."""
    _project(pytester, suffix=NAME)

    run = record(pytester.path, "-v", columns=columns)

    assert run.seen
    _assert_nothing_is_left(run)


def test_no_line_where_the_cursor_stands_behind_the_last_column(pytester: pytest.Pytester) -> None:
    """The next character would begin a row, and no sequence brings the cursor back to there."""
    _project(pytester, suffix=NAME)
    file = pytester.path / "test_it.py"
    file.write_text(file.read_text().replace("  wait()", "  time.sleep(0.5)"))

    run = record(pytester.path, "-v", columns=WIDTH)

    assert run.steps == []


@pytest.mark.sweep(3)
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
    ],
    ids=str,
)
def test_no_line_where_it_would_be_in_the_way(
    pytester: pytest.Pytester, options: list[str], environment: dict[str, str]
) -> None:
    """Beside a test's own output, in a log, and where no terminal can rewrite a line."""
    pytester.makepyfile(QUICK)

    run = record(pytester.path, *options, environment=environment)

    assert run.steps == []
    assert b"edgeq: convert" not in run.written


def test_no_line_while_a_test_uses_the_terminal_itself(pytester: pytest.Pytester) -> None:
    """A debugger, for instance, for which pytest stops to capture."""
    pytester.makepyfile(
        """
        import time
        from pytest_edgeq.plugin.state import progress_key

        def test_it(request, capfd):
            with capfd.disabled(), request.config.stash[progress_key].step("convert", "Net"):
                time.sleep(0.5)
        """
    )
    assert record(pytester.path).steps == []


def test_no_line_where_the_output_is_captured(pytester: pytest.Pytester) -> None:
    """By a pipe or a file, as in a log of CI."""
    pytester.makepyfile(QUICK)

    result = pytester.run(sys.executable, "-m", "pytest")

    result.stdout.no_fnmatch_line("edgeq: convert*")
    assert "\x1b" not in result.stdout.str()


def test_a_failing_step_leaves_no_line(pytester: pytest.Pytester) -> None:
    """Nor does one that the user interrupts."""
    pytester.makepyfile(
        PROJECT.partition("@pytest.mark")[0].format()
        + """
def test_fails(progress):
    with progress.step("convert", "Net"):
        wait()
        raise ValueError("refused")

def test_is_interrupted(progress):
    with progress.step("convert", "Net"):
        wait()
        raise KeyboardInterrupt
"""
    )
    run = record(pytester.path, "-v")

    assert run.steps
    _assert_nothing_is_left(run)


def test_real_steps(pytester: pytest.Pytester) -> None:
    """Samples of `compare` are counted, of a generator without a total."""
    file = make.CONVERTED / "equal_weights.int8.tflite"
    pytester.makepyfile(
        PROJECT.partition("@pytest.mark")[0].format()
        + f"""
import numpy as np

def samples(shape):
    yield np.ones(shape, np.float32)
    wait()
    yield np.zeros(shape, np.float32)

class Counted:
    def __init__(self, shape):
        self.shape = shape
    def __len__(self):
        return 2
    def __iter__(self):
        return samples(self.shape)

def test_it(edgeq):
    file = edgeq.load({str(file)!r})
    model = edgeq.load({str(file)!r}, reference=lambda x: tuple(file.run(x).values()))
    shape = model.inputs[0].shape
    edgeq.compare(model, samples(shape))
    edgeq.compare(model, Counted(shape))
"""
    )
    run = record(pytester.path)

    counted = {line.split(", ")[0] for line in run.steps}
    assert {"edgeq: compare 1", "edgeq: compare 1 of 2"} <= counted
    _assert_nothing_is_left(run)
