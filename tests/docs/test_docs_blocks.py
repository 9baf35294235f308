"""The reader finds what is wrong with a page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.blocks import Block
from tests.docs.session import Session, environment


def test_output_that_is_not_as_shown_fails(tmp_path: Path) -> None:
    """A word, a count, an order: not a fraction, and not the width of a column."""
    session = Session(tmp_path, environment())

    def do(language: str, text: str, note: str = "") -> None:
        session.do(Block(language, text, note, 1))

    do("python", "# a.py\nprint('== 2 failed in 3.21s ==')\nprint('sqnr   36.5 dB,  9 ops')\n")
    do("console", "$ python a.py\n")

    # A run of a minute and more is printed with a clock.
    do("text", "======= 2 failed in 83.23s (0:01:23) ======\n…\nsqnr 36.1 dB, 9 ops\n")
    do("text", "sqnr 36 dB, 10 ops\n", "figures vary")
    do("text", "sqnr …, 9 ops\n")
    for wrong in ("sqnr 36.1 dB, 10 ops\n", "sqnr 36 dB, 9 ops\n", "mse 36.5 dB, 9 ops\n"):
        with pytest.raises(AssertionError, match="line 1: not printed"):
            do("text", wrong)
    with pytest.raises(AssertionError, match="not in this place: == 2 failed"):
        do("text", "sqnr 36.5 dB, 9 ops\n== 2 failed in 3.21s ==\n")
