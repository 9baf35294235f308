"""The error for a question that does not fit the model it is put to."""

from __future__ import annotations

from pytest_edgeq.errors import attach
from pytest_edgeq.numerics.findings import FILE, UNMATCHED, Finding


class UnmatchedError(AssertionError, ValueError):
    """
    A name that matches nothing in the model, or a bound on what the model does not have.

    It fails a test as any assertion does (the op may have vanished with a change of the model), and
    it is a ValueError to code that asks (the name may be a slip).
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        attach(self, [Finding(kind=UNMATCHED, place=FILE, headline=text)])
