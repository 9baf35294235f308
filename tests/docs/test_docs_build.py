"""The pages are rendered by `edgeq docs --html`, without a warning."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pytest_edgeq.cli.pages import pages

# Sphinx imports the package and renders all pages.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_all_pages_are_rendered_without_a_warning(tmp_path: Path) -> None:
    """Headings, links, docstrings; and every page is reached from the first one."""
    command = [sys.executable, "-m", "pytest_edgeq", "docs", "--no-open", "--html", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)

    # Sphinx writes warnings there.
    assert (done.returncode, done.stderr) == (0, "")
    for page in pages():
        html = tmp_path.joinpath(f"{page.name}.html").read_text("utf-8")
        assert page.title.replace("`", "").split()[0] in html
    api = tmp_path.joinpath("reference", "edgeq.html").read_text("utf-8")
    assert "pytest_edgeq.Edgeq.localize" in api
