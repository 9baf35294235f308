"""The change of an op-dtype map against its baseline, line by line."""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

Kind = Literal["added", "removed", "changed", "heading", "plain"]
PartKind = Literal["old", "new", "same"]

_SECTIONS: tuple[tuple[str, Kind], ...] = (
    ("appeared", "added"),
    ("disappeared", "removed"),
    ("moved", "changed"),
    ("changed ops", "changed"),
    ("inputs and outputs", "changed"),
)
"""Beginnings of the lines that head a list, and what the lines of the list are."""


@dataclasses.dataclass(frozen=True)
class DiffLine:
    """
    A line of the text.

    Attributes:
        kind: What it tells of.
        sign: `+`, `-`, `~`, or a blank.
        parts: Its text in pieces, each with what it is.
    """

    kind: Kind
    sign: str
    parts: tuple[tuple[str, PartKind], ...]


def diff_lines(change: str) -> list[DiffLine]:
    """Return the lines of a change with what each tells of."""
    lines: list[DiffLine] = []
    section: Kind = "plain"
    for text in change.splitlines():
        if not text.startswith("  "):
            heads = text.endswith(":")
            found = [kind for start, kind in _SECTIONS if heads and text.startswith(start)]
            section = found[0] if found else "plain"
            kind: Kind = "heading" if found else "plain"
            lines.append(DiffLine(kind, " ", ((text, "same"),)))
        elif text.split()[0] == "op":
            lines.append(DiffLine("plain", " ", ((text, "same"),)))
        else:
            lines.append(DiffLine(section, _SIGNS[section], _parts(text)))
    return lines


_SIGNS: dict[Kind, str] = {
    "added": "+",
    "removed": "-",
    "changed": "~",
    "heading": " ",
    "plain": " ",
}

# `scheme int8 → float; inputs int8, int8 → float32, float32`: a field's name, then two values.
_FIELD = re.compile(r"(?P<old>[^\s;,]+(?:, [^\s;,]+)*) → (?P<new>[^;\s,]+(?:, [^\s;,]+)*)")


def _parts(text: str) -> tuple[tuple[str, PartKind], ...]:
    parts: list[tuple[str, PartKind]] = []
    end = 0
    for found in _FIELD.finditer(text):
        parts.append((text[end : found.start()], "same"))
        parts.append((found["old"], "old"))
        parts.append((" → ", "same"))
        parts.append((found["new"], "new"))
        end = found.end()
    parts.append((text[end:], "same"))
    return tuple((piece, kind) for piece, kind in parts if piece)
