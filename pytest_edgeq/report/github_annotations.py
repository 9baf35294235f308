"""Failures as workflow commands of GitHub Actions, which shows them beside the changed lines."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytest_edgeq.report.run import Run, findings_in

_LIMIT = 4_000
"""Characters of a message: GitHub shows a few lines, and the log has the whole."""


def annotation_lines(run: Run, rootdir: Path, workspace: Path | None) -> list[str]:
    """
    Return one command a failed test.

    The form is that of
    https://docs.github.com/actions/reference/workflows-and-actions/workflow-commands.
    """
    lines = []
    for test in run.tests:
        if (failure := test["failure"]) is None:
            continue
        options = {"title": test["test"]}
        if failure["path"] is not None:
            options = {
                "file": _in_workspace(rootdir / failure["path"], workspace),
                "line": str(failure["line"]),
                **options,
            }
        told = ",".join(f"{name}={_option(value)}" for name, value in options.items())
        lines.append(f"::error {told}::{_message(_text(failure))}")
    return lines


def _text(failure: Mapping[str, Any]) -> str:
    """Return titles, causes and advice of the findings; their tables are in the log."""
    if not failure.get("records"):
        return str(failure["message"])
    return "\n".join(
        line
        for each in findings_in(failure)
        for line in (each.title, *each.reasons, *each.acceptance)
    )


def _in_workspace(path: Path, workspace: Path | None) -> str:
    folder = Path.cwd() if workspace is None else workspace
    return Path(os.path.relpath(path, folder)).as_posix()


def _message(text: str) -> str:
    if len(text) > _LIMIT:
        text = text[:_LIMIT].rpartition("\n")[0] + "\n…"
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _option(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")
