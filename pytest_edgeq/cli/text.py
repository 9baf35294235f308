"""Tables and paragraphs for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

__all__ = ["WIDTH", "count", "hanging", "indented", "table", "wrapped"]

WIDTH = 100
"""Columns that texts keep to where their words allow it."""


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[str] = ()
) -> list[str]:
    """
    Return the lines of a table; columns that are empty in all rows are left out.

    Args:
        head: A title for each column.
        rows: As many cells each.
        numbers: Titles of the columns that are aligned to the right.
    """
    cells = [tuple(row) for row in rows]
    columns = [
        (title, [row[at] for row in cells])
        for at, title in enumerate(head)
        if any(row[at] for row in cells)
    ]
    padded = []
    for title, texts in columns:
        width = max(map(len, (title, *texts)))
        pad = str.rjust if title in numbers else str.ljust
        padded.append([pad(text, width) for text in (title, *texts)])
    return ["  ".join(line).rstrip() for line in zip(*padded, strict=True)]


def indented(lines: Iterable[str]) -> list[str]:
    """Return the lines, two columns further to the right."""
    return [f"  {line}" for line in lines]


def wrapped(line: str) -> list[str]:
    """Return a line in lines of `WIDTH` columns, the later ones indented by four more."""
    if len(line) <= WIDTH:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.wrap(
        line,
        WIDTH,
        subsequent_indent=f"{indent}    ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def hanging(text: str) -> list[str]:
    """Return a paragraph indented by two columns, its second and later lines by four."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent="  ",
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def count(number: int, noun: str) -> str:
    """Return a number with its noun: `1 op`, `1,200 ops`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
