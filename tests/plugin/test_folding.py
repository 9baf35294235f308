"""Lines of failures fit a terminal."""

from __future__ import annotations

import pytest

from pytest_edgeq.plugin.tracebacks import WIDTH, folded
from tests.plugin.conftest import Run


def test_a_long_line_is_folded_at_blanks() -> None:
    """No word is lost, and the rest stands two to the right of the line."""
    long = "    cause: " + " ".join(f"word{i}" for i in range(60))
    first, *rest = folded(long).splitlines()
    assert rest
    assert all(len(line) <= WIDTH for line in [first, *rest])
    assert first.startswith("    cause: word0 ")
    assert all(line.startswith("      word") for line in rest)
    assert folded(long).split() == long.split()
    assert folded(folded(long)) == folded(long)


def test_what_is_pasted_is_not_folded() -> None:
    """A command stays one line, whatever its length."""
    command = f"update: pytest {'x' * 100}.py::test[{'y ' * 60}] --edgeq-update=changed"
    assert folded(command) == command


def test_short_lines_are_left() -> None:
    """Tables keep their columns, empty lines are kept."""
    text = "one   two\n\n  1     2"
    assert folded(text) == text


@pytest.mark.parametrize("option", ["--tb=auto", "--tb=long"])
def test_an_error_of_ours_is_folded(pytester: pytest.Pytester, run_here: Run, option: str) -> None:
    """The texts of the user's own code are left alone."""
    pytester.makepyfile(
        test_x="""
        import torch

        def test_ours(edgeq):
            edgeq.quantize(torch.nn.ReLU().eval(), (torch.ones(1, 4),), quantizer="no " * 70)

        def test_theirs():
            raise ValueError("word " * 70)
        """
    )
    lines = run_here(option, "-p", "no:xdist").stdout.lines
    ours = [line for line in lines if line.startswith("E ") and "no no" in line]
    assert len(ours) > 1
    # A line of a traceback is indented as the code that raised.
    assert all(len(line[1:].strip()) <= WIDTH + len("ValueError: ") for line in ours)
    (theirs,) = [line for line in lines if line.startswith("E ") and "word word" in line]
    assert len(theirs) > 300
