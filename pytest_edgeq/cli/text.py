"""Tables, paragraphs and JSON documents for a terminal."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from pytest_edgeq.numerics.findings import aligned

if TYPE_CHECKING:
    from pytest_edgeq.numerics.results import OutputErrors, StageErrors

WIDTH = 100  # columns that texts keep to where their words allow it

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document instead of text."
)


def print_json(document: Mapping[str, Any]) -> None:
    """Print a document with sorted keys; NaN and infinity must be in it as text."""
    text = json.dumps(document, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False)
    click.echo(text)


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[str] = ()
) -> list[str]:
    """Return the lines of a table; columns that are empty in all rows are left out."""
    cells = [tuple(row) for row in rows]
    shown = [at for at in range(len(head)) if any(row[at] for row in cells)]
    return aligned(
        [[row[at] for at in shown] for row in (tuple(head), *cells)],
        numeric=[i for i, at in enumerate(shown) if head[at] in numbers],
    )


def indented(lines: Iterable[str]) -> list[str]:
    """Return the lines, two columns further to the right."""
    return [f"  {line}" for line in lines]


def wrapped(line: str) -> list[str]:
    """Wrap a line to `WIDTH` columns; later lines are indented by four more."""
    if len(line) <= WIDTH:
        return [line]
    return _wrap(line, "", line[: len(line) - len(line.lstrip())] + "    ")


def hanging(text: str) -> list[str]:
    """Return a paragraph indented by two columns, its second and later lines by four."""
    return _wrap(text, "  ", "    ")


def _wrap(text: str, first: str, later: str) -> list[str]:
    wrapper = textwrap.TextWrapper(WIDTH, first, later)
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    return wrapper.wrap(text)


def metric_tables(stage: StageErrors) -> list[str]:
    """Return a row for each metric and a column for each output, in tables of `WIDTH` columns."""
    from pytest_edgeq.numerics.results import measured_metrics, metric_cell

    metrics = measured_metrics(stage.outputs.values())
    first = max(map(len, metrics))
    groups: list[list[OutputErrors]] = [[]]
    used = first
    for output in stage.outputs.values():
        width = 2 + max(len(output.name), *(len(metric_cell(output, metric)) for metric in metrics))
        if groups[-1] and used + width > WIDTH:
            groups.append([])
            used = first
        groups[-1].append(output)
        used += width
    lines = []
    for group in groups:
        names = [output.name for output in group]
        rows = [(metric, *(metric_cell(output, metric) for output in group)) for metric in metrics]
        lines += table(("output", *names), rows, numbers=names)
    return lines
