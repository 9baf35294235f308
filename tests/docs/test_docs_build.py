"""The pages are rendered by one command, in which a warning is an error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pytest_edgeq.cli.pages import FOLDER, pages

# Sphinx imports the package and renders all pages.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def _render(source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    return subprocess.run(
        [*command, source, out], capture_output=True, text=True, check=False, timeout=600
    )


def test_all_pages_are_rendered_without_a_warning(tmp_path: Path) -> None:
    """Headings, links, docstrings; and every page is reached from the first one."""
    done = _render(FOLDER, tmp_path)

    assert (done.returncode, done.stderr) == (0, "")
    for page in pages():
        html = tmp_path.joinpath(f"{page.name}.html").read_text("utf-8")
        assert page.title.replace("`", "").split()[0] in html
    api = tmp_path.joinpath("reference", "edgeq.html").read_text("utf-8")
    assert "pytest_edgeq.Edgeq.localize" in api


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[there](missing.md)", "missing.md"),
        ("[there](index.md#missing)", "missing"),
        ("```{eval-rst}\n.. autofunction:: pytest_edgeq.missing\n```", "'missing' from module"),
    ],
    ids=["page", "heading", "name"],
)
def test_a_reference_that_leads_nowhere_fails(tmp_path: Path, line: str, said: str) -> None:
    """To a page, to a heading of one, to a name of the package."""
    source = tmp_path / "source"
    source.mkdir()
    source.joinpath("conf.py").write_text(FOLDER.joinpath("conf.py").read_text())
    source.joinpath("index.md").write_text(f"# A page\n\n{line}\n")

    done = _render(source, tmp_path / "out")

    assert done.returncode == 1
    assert said in done.stderr
