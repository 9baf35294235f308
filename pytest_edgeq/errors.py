"""Assertion errors that carry the findings of which their text was rendered."""

from __future__ import annotations

from collections.abc import Iterable

from pytest_edgeq.numerics.findings import Finding, text_of

_ATTRIBUTE = "edgeq_findings"


def failure(findings: Iterable[Finding], text: str | None = None) -> AssertionError:
    """
    Return an AssertionError with these findings.

    It is no class of its own: pytest's summary would show the class before the first line.
    """
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
