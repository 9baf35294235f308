"""
The errors and warnings of this package.

AssertionErrors carry the findings that their text was rendered from; warnings point at the user's
own line, however deep in the package they arise.
"""

from __future__ import annotations

import builtins
import contextlib
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pytest_edgeq.numerics.findings import (
    BLOCKING,
    CANNOT_RUN,
    FILE,
    UNMATCHED,
    Finding,
    Place,
    text_of,
)

_ATTRIBUTE = "edgeq_findings"


def failure(findings: Iterable[Finding], text: str | None = None) -> AssertionError:
    """Return an AssertionError of these findings, of no class that pytest's summary would show."""
    found = tuple(findings)
    error = AssertionError(text_of(found) if text is None else text)
    attach(error, found)
    return error


def attach(error: BaseException, findings: Iterable[Finding]) -> None:
    """Attach findings to an error."""
    error.__dict__[_ATTRIBUTE] = tuple(findings)


def findings_of(error: BaseException) -> tuple[Finding, ...]:
    """Return the findings that an error carries; none of an error without."""
    found: tuple[Finding, ...] = vars(error).get(_ATTRIBUTE, ())
    return found


class UnmatchedError(AssertionError, ValueError):
    """
    A name that matches nothing in the model, or a bound on what the model does not have.

    It fails a test as any assertion does (the op may have vanished with a change of the model), and
    it is a ValueError to code that asks (the name may be a slip).
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        attach(self, [Finding(kind=UNMATCHED, place=FILE, headline=text)])


class UnrunnableError(RuntimeError):
    """
    A runtime cannot load or run a file.

    Attributes:
        runtime: Its name.
        text: What was refused and why, without the leading `the xnnpack runtime `.
        is_lacking: Whether the kernels lack an op of the file, or cannot take files of its kind;
            others can.
        broken: The rule of the kernels that the refused op does not keep, where there is one.
    """

    def __init__(
        self, runtime: str, text: str, *, is_lacking: bool = False, broken: Finding | None = None
    ) -> None:
        super().__init__(runtime, text)
        self.runtime, self.text, self.is_lacking = runtime, text, is_lacking
        self.broken = broken

    def __str__(self) -> str:
        """Return the text for this runtime alone."""
        first, *lines = self.text.splitlines()
        if self.broken is not None:
            lines = [f"cause: {'; '.join((self.broken.symptom, *self.broken.causes))}", *lines]
            lines.insert(1, f"fix: {self.broken.fix}")
        return "\n".join([f"the {self.runtime} runtime {first}", *lines])


class CrashedError(UnrunnableError):
    """A runtime crashed its process, or exceeded a bound on time or memory."""


class CopyError(RuntimeError):
    """A runtime cannot load or run a file that this package derived from the user's."""


class UnreadableError(ValueError):
    """The values of a constant of a file cannot be read."""


class CrashedConversionError(RuntimeError):
    """A library crashed the process of a conversion, or exceeded a bound."""


def grouped(refusals: Iterable[UnrunnableError]) -> list[Finding]:
    """Return findings on refusals, one for all runtimes that say the same."""
    names: dict[tuple[str, Finding | None], list[str]] = {}
    for each in refusals:
        known = names.setdefault((each.text, each.broken), [])
        known += [] if each.runtime in known else [each.runtime]
    found = []
    for (text, broken), known in names.items():
        *first, last = known
        who = f"{', '.join(first)} and {last} runtimes" if first else f"{last} runtime"
        title, *lines = f"the {who} {text}".splitlines()
        found.append(
            Finding(
                kind=CANNOT_RUN,
                place=Place("runtime", ", ".join(known)),
                headline=title,
                evidence=tuple(lines),
                explained_by=() if broken is None else (broken,),
                harm=BLOCKING,
            )
        )
    return found


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
    kept: list[Warned] = []
    caught: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield kept
    except BaseException:
        for each in _distinct(caught):
            each.repeat()
        raise
    kept += _distinct(caught)


def _distinct(caught: list[warnings.WarningMessage]) -> list[Warned]:
    kept = (Warned(str(w.message), w.category.__name__, w.filename, w.lineno) for w in caught)
    return list(dict.fromkeys(kept))


def warn_user(message: str) -> None:
    """Warn at the line that called into this package."""
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] == "pytest_edgeq":
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
