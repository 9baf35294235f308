"""The page of several runs: SQNR, size and top-1 agreement of each model over time."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

from pytest_edgeq.report.html.charts import history_chart
from pytest_edgeq.report.html.page import rendered
from pytest_edgeq.report.model_rows import ModelRow, model_rows
from pytest_edgeq.report.run import Run, showing


def read_runs(folder: Path) -> list[Run]:
    """Return the records `*.json` of a folder, the oldest first."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: there is no such folder")
    runs = []
    for path in sorted(folder.glob("*.json")):
        with showing(path) as run:
            datetime.fromisoformat(run.data["started"])
            model_rows(run)
            runs.append(run)
    if not runs:
        raise ValueError(
            f"{folder}: there is no record in it (pytest --edgeq-json={folder}/….json)"
        )
    return sorted(runs, key=_started)


def _started(run: Run) -> datetime:
    return datetime.fromisoformat(run.data["started"])


def history_page(runs: Iterable[Run]) -> str:
    """Return the page: a section for each model and quantizer."""
    known: dict[tuple[str, str], list[tuple[datetime, ModelRow]]] = {}
    for run in runs:
        for row in model_rows(run):
            known.setdefault((row.name, row.quantizer), []).append((_started(run), row))
    models = [
        {"name": name, "quantizer": quantizer, "runs": len(points), "charts": _charts(points)}
        for (name, quantizer), points in known.items()
    ]
    return rendered("history.html.jinja", models=models)


def _charts(points: list[tuple[datetime, ModelRow]]) -> list[Any]:
    times = [when for when, _ in points]
    verdicts = [row.verdict for _, row in points]
    figures: dict[str, list[float | None]] = {
        "SQNR, dB": [row.sqnr_db.get("total") for _, row in points],
        "size, KB": [row.size_bytes / 1000 for _, row in points],
        "top-1, %": [None if row.top1 is None else 100 * row.top1 for _, row in points],
    }
    return [
        history_chart(times, values, verdicts, name)
        for name, values in figures.items()
        if any(value is not None for value in values)
    ]
