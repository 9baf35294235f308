"""Tables, paragraphs and JSON documents for a terminal."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from pytest_edgeq.numerics.findings import aligned

if TYPE_CHECKING:
    from pytest_edgeq.numerics.results import StageErrors

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


def wrapped(line: str, hang: int = 4) -> list[str]:
    """Wrap a line to `WIDTH` columns; later lines are indented by so many more."""
    indent = line[: len(line) - len(line.lstrip())] + hang * " "
    wrapper = textwrap.TextWrapper(WIDTH, subsequent_indent=indent)
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    return wrapper.wrap(line) or [""]


def hanging(text: str) -> list[str]:
    """Return a paragraph indented by two columns, its second and later lines by four."""
    return wrapped(f"  {text}", 2)


def metric_tables(stage: StageErrors) -> list[str]:
    """Return a row for each metric and a column for each output, in tables of `WIDTH` columns."""
    from pytest_edgeq.numerics.results import measured_metrics, metric_cell

    metrics = measured_metrics(stage.outputs.values())
    columns = [
        (output.name, *(metric_cell(output, metric) for metric in metrics))
        for output in stage.outputs.values()
    ]
    widest = max(len(cell) for column in columns for cell in column)
    together = max(1, (WIDTH - max(map(len, metrics))) // (widest + 2))
    lines = []
    for first in range(0, len(columns), together):
        shown = [("output", *metrics), *columns[first : first + together]]
        lines += aligned(list(zip(*shown, strict=True)), numeric=range(1, len(shown)))
    return lines
