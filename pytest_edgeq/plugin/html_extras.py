"""Pictures of the worst samples as extras in the report of pytest-html."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from pytest_edgeq.names import NEEDS_REPORT

if TYPE_CHECKING:
    from pytest_edgeq.report.journal import PhaseJournal


def writes_html(config: pytest.Config) -> bool:
    """Return whether pytest-html is installed and writes a report."""
    is_there = config.pluginmanager.hasplugin("html")
    return is_there and config.getoption("htmlpath", None) is not None


def add_extras(report: pytest.TestReport, journal: PhaseJournal) -> None:
    """Add the pictures of a phase's comparisons to its report."""
    extras = list(_extras(journal))
    if extras:
        report.__dict__["extras"] = [*getattr(report, "extras", []), *extras]


def _extras(journal: PhaseJournal) -> Iterator[dict[str, Any]]:
    from pytest_html import extras

    for event in journal["events"]:
        for sample in event.get("comparison", {}).get("worst_samples", ()):
            for position, picture in sample["pictures"].items():
                if importlib.util.find_spec("PIL") is None:
                    yield extras.html(f"<p>{NEEDS_REPORT}</p>")
                    return
                from pytest_edgeq.report.html.view import png_url

                sqnr_db = float(sample["sqnr_db"])
                caption = f"sample {sample['index']}, input {position}: {sqnr_db:.1f} dB"
                # No `extras.png`: pytest-html 4.2 encodes the extras of a rerun test twice, and
                # warns of the result.
                yield extras.html(
                    f'<figure><img src="{png_url(picture)}" alt="{caption}">'
                    f"<figcaption>{caption}</figcaption></figure>"
                )
