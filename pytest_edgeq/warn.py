"""Warnings that point at the user's own line, however deep in the package they arise."""

from __future__ import annotations

import builtins
import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import NamedTuple


class Warned(NamedTuple):
    """A warning of a library, to be repeated where its result is used again."""

    text: str
    category: str
    filename: str
    line: int

    def repeat(self) -> None:
        """Warn again, from the same place."""
        category = getattr(builtins, self.category, UserWarning)
        warnings.warn_explicit(self.text, category, self.filename, self.line)


@contextlib.contextmanager
def warnings_kept() -> Iterator[list[Warned]]:
    """Collect the warnings of a block, without duplicates; issue them if the block raises."""
    told: list[Warned] = []
    caught: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield told
    except BaseException:
        for each in _distinct(caught):
            each.repeat()
        raise
    told += _distinct(caught)


def _distinct(caught: list[warnings.WarningMessage]) -> list[Warned]:
    kept = (Warned(str(w.message), w.category.__name__, w.filename, w.lineno) for w in caught)
    return list(dict.fromkeys(kept))


def warn_user(message: str) -> None:
    """Warn at the line that called into this package."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def _is_ours(module: str) -> bool:
    return module.split(".")[0] == "pytest_edgeq"
