"""
Records of a test run: the owner of each baseline, and the claims of each test.

A record is plain data, because the workers of pytest-xdist send it to the controller with the
test's report.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypedDict

from pytest_edgeq.numerics.findings import Finding

Phase = Literal["setup", "call", "teardown"]
Category = Literal["unchanged", "new", "changed", "tighten", "unreadable", "refused", "unwritable"]
"""
What a claim found: the same data; no file; other data; better data; a file that cannot be read;
data that must not be stored; a file that cannot be written.
"""


@dataclasses.dataclass(frozen=True)
class Owner:
    """The test that a baseline belongs to."""

    module: Path  # the test module's own path, absolute
    test: str  # the rest of the node id, such as `TestX::test_y[param]`

    def __str__(self) -> str:
        """Show it as pytest does, without the folders."""
        return f"{self.module.name}::{self.test}"


class ClaimRecord(TypedDict):
    """A claim, serialized; `path` is relative to rootdir where it can be."""

    path: str
    kind: str
    category: Category
    change: dict[str, Any] | None
    written: bool
    note: str
    since: list[str]
    stored: str
    remarks: list[str]


class Judge(Protocol):
    """Judges data before they are stored."""

    @property
    def notes(self) -> Sequence[str]:
        """Notes on the measurement, for the summary of the run."""

    def refusal(self, data: Mapping[str, Any]) -> Finding | None:
        """Return why data must not be stored; None where they may."""

    def remark(self, data: Mapping[str, Any]) -> str:
        """Return which of the stored limits cannot fail; empty if all can."""


@dataclasses.dataclass
class Claim:
    """One baseline that the running test asked for."""

    path: Path
    kind: str  # what sort of data it is
    name: str  # what it is remembered as, within its test
    owner: Owner
    data: dict[str, Any]  # the measured data
    options: dict[str, str] = dataclasses.field(default_factory=dict)  # of `quantize`, as text
    judge: Judge | None = None  # judges what is stored; None where anything may be
    category: Category = "unreadable"  # what was found
    written: bool = False  # whether the file was written
    before: bytes | None = None  # the file's bytes before it was written; None if there was no file
    note: str = ""  # something to tell the user that is no failure; may be empty
    # changes since the file was written, as `strict_export: True → False`, `torch 2.13 → 2.14`
    since: list[str] = dataclasses.field(default_factory=list)
    stored: str = ""  # what was written, in one line; empty if nothing was
    change: Finding | None = None  # what differs from the stored data; None if nothing does
    # notes on the measurement, whether or not it was stored
    remarks: list[str] = dataclasses.field(default_factory=list)
    # what failed, and the stored data from which it differs; None where nothing did
    found: tuple[Finding, dict[str, Any]] | None = None


@dataclasses.dataclass
class RunningTest:
    """The running test, its phase, and its claims by path."""

    owner: Owner
    phase: Phase
    claims: dict[Path, Claim] = dataclasses.field(default_factory=dict)
