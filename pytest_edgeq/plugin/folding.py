"""Fold the lines of failures to the width of a terminal."""

from __future__ import annotations

import textwrap

WIDTH = 160
"""Greatest length of a line, in characters."""

_PASTED = ("update:", "file:")
"""Lines that hold a command or a path are never folded."""


def fold(error: BaseException) -> None:
    """Fold the message of an error in place."""
    if len(error.args) == 1 and isinstance(error.args[0], str):
        error.args = (folded(error.args[0]),)


def folded(text: str) -> str:
    """Fold lines of more than 160 characters at blanks, and indent the rest."""
    return "\n".join(_folded_line(line) for line in text.split("\n"))


def _folded_line(line: str) -> str:
    stripped = line.lstrip()
    if len(line) <= WIDTH or stripped.startswith(_PASTED):
        return line
    indent = line[: len(line) - len(stripped)]
    return textwrap.fill(
        stripped,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
