"""`edgeq docs`: the pages in the terminal and as HTML."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_edgeq.cli.commands import docs_command
from pytest_edgeq.cli.pages import pages
from tests.cli.conftest import Run


def test_pages_are_listed(run: Run) -> None:
    """With their titles."""
    listed = [line.split(maxsplit=1) for line in run("docs").stdout.splitlines()]
    assert listed == [[page.name, page.title] for page in pages()]


def test_a_part_of_a_name_is_enough(run: Run) -> None:
    """If one page alone begins with it, or has it; several are listed."""
    assert run("docs", "ci").stdout == run("docs", "ci-and-xdist").stdout != ""
    assert run("docs", "xdist").stdout == run("docs", "ci-and-xdist").stdout
    done = run("docs", "a-")
    assert done.exit_code == 0
    done = run("docs", "in")
    assert done.exit_code == 2
    assert "'in' is the name of 2 pages (did you mean index or reference/index?)" in done.stderr


def test_a_page_for_sphinx_is_shown_with_signatures_and_docstrings(run: Run) -> None:
    """Its directives mean nothing in a terminal."""
    for page in pages():
        assert "eval-rst" not in run("docs", page.name).stdout
    text = run("docs", "reference/edgeq").stdout
    assert "### Edgeq.quantize(self, model: " in text
    assert "Args:\n    model: " in text
    assert "Op dtypes" in text
    text = run("docs", "reference/assertions").stdout
    assert "### assert_within_budget(" in text
    assert ":members:" not in text


def test_an_unknown_page_is_named_with_the_nearest(run: Run) -> None:
    """A sentence and exit code 2."""
    done = run("docs", "tutoral")
    assert done.exit_code == 2
    assert "there is no page 'tutoral' (did you mean tutorial?)" in done.stderr
    assert run("docs", "tutorial", "--html", "out").exit_code == 2


def test_the_extra_is_named(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where Sphinx is missing."""
    monkeypatch.setattr(docs_command, "_NEEDED", ("sphinx_that_is_not_there",))
    done = run("docs", "--html", tmp_path)
    assert done.exit_code == 2
    assert "pip install 'pytest-edgeq[docs]'" in done.stderr
