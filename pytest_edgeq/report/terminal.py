"""The table of models at the end of a run, as lines of text."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_edgeq.report.model_rows import HEADINGS, LEFT_ALIGNED, cells, model_rows
from pytest_edgeq.report.run import Run


def table_lines(run: Run) -> list[tuple[str, bool]]:
    """Return the table."""
    rows = model_rows(run)
    if not rows:
        return []
    texts = [cells(row) for row in rows]
    lines = _laid_out([HEADINGS, *texts])
    failed = [False, *(row.verdict == "failed" for row in rows)]
    return list(zip(lines, failed, strict=True))


def _laid_out(rows: Sequence[Sequence[str]]) -> list[str]:
    # A column in which no row has anything is left out.
    shown = [
        i for i in range(len(HEADINGS)) if i < 2 or any(row[i] not in ("–", "") for row in rows[1:])
    ]
    widths = {i: max(len(row[i]) for row in rows) for i in shown}
    return [
        "  ".join(
            row[i].ljust(widths[i]) if i in LEFT_ALIGNED else row[i].rjust(widths[i]) for i in shown
        ).rstrip()
        for row in rows
    ]
