"""Failure texts, parted into prose and tables."""

from __future__ import annotations

import itertools
import re

_TWO_GAPS = re.compile(r"\S {2,}\S.* {2,}\S")


def text_blocks(text: str) -> list[tuple[bool, str]]:
    """
    Part a text into runs of lines.

    A line with two gaps of two blanks or more is a row of a table, which a narrow screen must
    not wrap.

    Returns:
        Whether each run is a table, and its lines; the runs in order make up the text.
    """
    runs = itertools.groupby(text.splitlines(), lambda line: _TWO_GAPS.search(line) is not None)
    return [(is_table, "\n".join(lines)) for is_table, lines in runs]
