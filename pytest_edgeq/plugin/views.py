"""Write the views of a run's record to their files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_edgeq.plugin.options import Settings

if TYPE_CHECKING:
    from pytest_edgeq.report.run import Run

SUMMARY = "GITHUB_STEP_SUMMARY"
"""The environment variable that names the file of a step's summary."""


def write_views(run: Run, settings: Settings) -> list[str]:
    """
    Write all requested views.

    Returns:
        Messages for views that could not be written; the others are written nevertheless.
    """
    views: list[tuple[str, Path, Callable[[Path], None]]] = []
    if settings.json is not None:
        views.append(("--edgeq-json", settings.json, run.write))
    if settings.html is not None:
        from pytest_edgeq.report.html.page import write_html

        views.append(("--edgeq-html", settings.html, lambda path: write_html(run, path)))
    summary = os.environ.get(SUMMARY) if run.tests else None
    if settings.markdown is not None or summary:
        from pytest_edgeq.report.markdown import markdown_page
        from pytest_edgeq.report.whole_files import write_whole

        page = markdown_page(run)
        if settings.markdown is not None:
            views.append(
                ("--edgeq-markdown", settings.markdown, lambda path: write_whole(path, page))
            )
        if summary:
            views.append((SUMMARY, Path(summary), lambda path: _append(path, page)))
    messages = []
    for name, path, write in views:
        try:
            write(path)
        except OSError as error:
            messages.append(f"{name}: {path} could not be written: {error.strerror or error}")
    return messages


def _append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)
