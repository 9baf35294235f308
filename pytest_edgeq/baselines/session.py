"""
The memory of one pytest run.

What the running test claims is looked up, compared and, where the user asked for it, written.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pytest_edgeq.baselines import store
from pytest_edgeq.baselines.build import UNDO, is_known, option_changes
from pytest_edgeq.baselines.kinds import KINDS, Kind
from pytest_edgeq.baselines.paths import Layout
from pytest_edgeq.baselines.record import (
    Category,
    Claim,
    Judge,
    Owner,
    Phase,
    RunningTest,
    TestRecord,
)
from pytest_edgeq.errors import failure
from pytest_edgeq.numerics.findings import NO_BASELINE, Finding, Place
from pytest_edgeq.versions import producer, version_changes

Describe = Callable[[dict[str, Any], dict[str, Any]], Finding | None]
Explain = Callable[[Finding, dict[str, Any]], Iterable[Finding]]

_PHASES: dict[Phase, str] = {
    "setup": "while a fixture was set up for",
    "teardown": "while a fixture was torn down after",
}
_TWICE = (
    'this test claims two different values as {title} "{name}", so neither was stored; '
    "give each claim a name of its own (name=…)\n"
    "the second differs from the first by: {change}"
)


def _unwritable(shown: str, error: OSError) -> str:
    way_out = "let this user write there"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        way_out = "free space on its file system"
    elif error.errno in (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ELOOP):
        way_out = "move away what stands in the place of the file or of its folders"
    return (
        f"baseline not stored: {shown}: {error.strerror}\n"
        "cause: the file system refused the write; what was stored before is as it was\n"
        f"fix: {way_out}, then run the same command again"
    )


def _with_origin(
    change: Finding, known: Kind, stored: store.Document, claim: Claim, versions: Sequence[str]
) -> Finding:
    """Add to a change what differs from the baseline; else which causes remain."""
    others = known.changes(stored.data, claim.data)
    options = option_changes(stored.options, claim.options)
    since = (*options, *filter(None, others.values()), *versions)
    if since or change.fix:
        fix = change.fix or UNDO
        return replace(change, since=since, fix=fix)
    has_options = bool(stored.options) and is_known(claim.options)
    same = ["options", *(name for name, other in others.items() if other == "")]
    left = [] if has_options else ["the quantizer and its settings"]
    left += [*(f"the {name}" for name, other in others.items() if other is None), *known.depends_on]
    return replace(change, suspects=tuple(left), unchanged=tuple(same) if has_options else ())


class SnapshotSession:
    """The baselines of one run."""

    def __init__(
        self, layout: Layout, *, update: Collection[str] = (), invocation_dir: Path | None = None
    ) -> None:
        self.layout = layout
        self.update = frozenset(update)
        self._invocation_dir = layout.rootdir if invocation_dir is None else invocation_dir
        self._test: RunningTest | None = None

    @functools.cached_property
    def _versions(self) -> dict[str, str | None]:
        return producer()

    @contextlib.contextmanager
    def running(self, owner: Owner, phase: Phase) -> Iterator[None]:
        """Record claims for this test in the body; its set-up starts a new record."""
        if phase == "setup" or self._test is None or self._test.owner != owner:
            self._test = RunningTest(owner, phase)
        test = self._test
        test.phase = phase
        try:
            yield
        finally:
            if phase == "teardown":
                self._test = None

    def record(self, owner: Owner) -> TestRecord:
        """Return the claims of a test so far, as plain data."""
        claims = self._test.claims if self._test is not None and self._test.owner == owner else {}
        return {
            "owner": self.layout.pack(owner),
            "claims": [
                {
                    "path": self.layout.shown(path),
                    "kind": claim.kind,
                    "change": None if claim.change is None else claim.change.to_dict(),
                    "category": claim.category,
                    "written": claim.written,
                    "note": claim.note,
                    "since": claim.since,
                    "stored": claim.stored,
                    "remarks": claim.remarks,
                }
                for path, claim in claims.items()
            ],
        }

    def check(
        self,
        kind: str,
        name: str,
        data: dict[str, Any],
        describe_change: Describe | None = None,
        explain: Explain | None = None,
        judge: Judge | None = None,
        options: Mapping[str, str] | None = None,
    ) -> None:
        """
        Compare a measurement with its baseline, or store it if asked to.

        Raises:
            AssertionError: Nothing is remembered yet, or something else, or the data must not be
                stored; it carries the finding (`errors.findings_of`).
            ValueError: The file cannot be read, or this test claims two values under one name.
            RuntimeError: No test body is running, so that the file would have no owner.
            OSError: The file cannot be written; what was stored before is as it was.
        """
        __tracebackhide__ = True
        test = self._body(kind, name)
        if not name:
            raise ValueError("a claim needs a name: what it is remembered as, within its test")
        known = KINDS[kind]
        describe = known.describe_change if describe_change is None else describe_change
        data = store.plain(data)
        path = self.layout.path(test.owner, name)
        earlier = test.claims.get(path)
        if earlier is not None and self.update & {"new", "changed", "tighten"}:
            self._refuse_second(path, earlier, kind, name, data, describe)
            if earlier.written:
                return
        claim = test.claims[path] = Claim(kind, data, "unreadable", judge, dict(options or {}))
        claim.remarks += () if judge is None else judge.notes
        try:
            stored = self._read(path, kind, known, name, test.owner, claim)
        except FileNotFoundError:
            stored = None
        change = None if stored is None else describe(stored.data, data)
        claim.category = "new" if stored is None else "changed" if change else "unchanged"
        claim.change = change
        if claim.note and "changed" in self.update:
            claim.category = "changed"
        if stored is not None:
            versions = version_changes(stored.producer, self._versions)
            claim.since = [*option_changes(stored.options, claim.options), *versions]
            if claim.category == "unchanged" and known.loose is not None:
                self._tighten(path, claim, known, stored, name)
            is_older = claim.since or claim.options not in ({}, stored.options)
            if claim.category == "unchanged" and is_older and "changed" in self.update:
                claim.category = "changed"
                self._write(path, claim, test.owner, name, stored.data)
        if claim.category in ("unchanged", "tighten") and stored is not None and not claim.written:
            self._note_refusal(path, claim, stored.data)
        if claim.category in ("unchanged", "tighten") or claim.written:
            return
        if claim.category in self.update:
            self._write(path, claim, test.owner, name)
            return
        shown, command = self.layout.shown(path), self._command(test.owner, claim.category)
        refusal = None if judge is None else judge.refusal(data)
        if change is None:
            self._refuse(path, claim, refusal)
            what, summary = f'{known.title} "{name}"', known.summarize(data)
            found = Finding(
                kind=NO_BASELINE,
                place=Place("baseline", shown),
                symptom=what,
                got=summary,
                headline=f"no baseline is stored yet: {what} ({summary})",
                command=f"to store it and commit the file (on CI nothing is written): {command}",
            )
        else:
            assert stored is not None, "unreachable, because something changed"
            accept = f"if the change is meant: {command}"
            change = _with_origin(change, known, stored, claim, versions)
            found = replace(
                change,
                place=Place("baseline", shown),
                explained_by=() if explain is None else tuple(explain(change, stored.data)),
                command=f"would be refused: {refusal.title}" if refusal is not None else accept,
            )
            claim.found = found, stored.data
        raise failure([found])

    def claim(self, name: str) -> Claim | None:
        """Return the claim of the running test by this name, or None."""
        test = self._test
        return None if test is None else test.claims.get(self.layout.path(test.owner, name))

    def changes(
        self, kind: str, name: str, data: dict[str, Any], options: Mapping[str, str]
    ) -> tuple[str, ...]:
        """
        Return the changes since a baseline that is not comparable with the measurement.

        Raises:
            ValueError: The file cannot be read.
            RuntimeError: No test body is running.
        """
        owner = self._body(kind, name).owner
        path = self.layout.path(owner, name)
        try:
            stored = self._read(path, kind, KINDS[kind], name, owner, Claim(kind, {}, "unreadable"))
        except FileNotFoundError:
            return ()
        others = KINDS[kind].changes(stored.data, data)
        versions = version_changes(stored.producer, self._versions)
        since = (*option_changes(stored.options, options), *filter(None, others.values()))
        return (*since, *versions)

    def _refuse(self, path: Path, claim: Claim, refusal: Finding | None) -> None:
        """Raise if the claimed value must not be stored."""
        __tracebackhide__ = True
        if refusal is not None:
            claim.category = "refused"
            assert self._test is not None, "unreachable, because a test's body is running"
            others = self._test.claims.items()
            stored = [f"stored: {self.layout.shown(at)}" for at, each in others if each.written]
            place = Place("baseline", self.layout.shown(path))
            raise failure([replace(refusal, place=place, evidence=(*refusal.evidence, *stored))])

    def _note_refusal(self, path: Path, claim: Claim, data: Mapping[str, Any]) -> None:
        """Add a remark if the stored baseline would be refused today."""
        if claim.judge is None or (refusal := claim.judge.refusal(data)) is None:
            return
        claim.remarks.append(
            f"{self.layout.shown(path)} would be refused today: "
            f"{'; '.join(filter(None, (refusal.title, refusal.fix)))}; then update it with "
            "--edgeq-update=changed"
        )

    def _tighten(
        self, path: Path, claim: Claim, known: Kind, stored: store.Document, name: str
    ) -> None:
        """Report results better than the baseline; store them if asked to."""
        assert known.loose is not None and known.tightened is not None  # noqa: PT018
        if not (better := known.loose(stored.data, claim.data)):
            return
        claim.category = "tighten"
        if "tighten" in self.update:
            assert self._test is not None, "unreachable, because a test's body is running"
            self._write(
                path, claim, self._test.owner, name, known.tightened(stored.data, claim.data)
            )
            return
        more = f" and {len(better) - 1} more" if len(better) > 1 else ""
        claim.note = (
            f"{self.layout.shown(path)} is loose: {better[0]}{more}; --edgeq-update=tighten "
            "remembers the better"
        )

    def _body(self, kind: str, name: str) -> RunningTest:
        """Return the test whose body is running."""
        __tracebackhide__ = True
        if self._test is not None and self._test.phase == "call":
            return self._test
        when = (
            "while no test was running"
            if self._test is None
            else f"{_PHASES[self._test.phase]} {self._test.owner}"
        )
        raise RuntimeError(
            f"the {KINDS[kind].title} {name!r} was checked {when}: check it in the body of a test, "
            "because a baseline belongs to one test, and here it cannot be told which"
        )

    def _refuse_second(
        self,
        path: Path,
        earlier: Claim,
        kind: str,
        name: str,
        data: dict[str, Any],
        describe: Describe,
    ) -> None:
        """Raise if the test has claimed another value by this name; restore the earlier file."""
        __tracebackhide__ = True
        same_kind = earlier.kind == kind
        change = describe(earlier.data, data) if same_kind else None
        if same_kind and change is None:
            return
        if earlier.written:
            try:
                store.restore(path, earlier.before)
            except OSError as error:
                raise OSError(_unwritable(self.layout.shown(path), error)) from error
            earlier.written = False
        first = f"its kind, {kind}" if change is None else change.title
        raise ValueError(_TWICE.format(title=KINDS[earlier.kind].title, name=name, change=first))

    def _read(
        self, path: Path, kind: str, known: Kind, name: str, owner: Owner, claim: Claim
    ) -> store.Document:
        """Read the file of a claim, and hold it to be one."""
        __tracebackhide__ = True
        shown = self.layout.shown(path)
        stored = store.read(path, shown)
        if stored.kind != kind:
            raise ValueError(
                f"{shown} holds a {stored.kind!r}, but a {kind!r} is claimed as {name!r}: two "
                "claims of one test share a name; give each its own (name=…)"
            )
        if problem := known.problem(stored.data):
            raise ValueError(
                f"{shown} is no whole {known.title}: {problem}. Restore it from version control, "
                f"or delete it and store it anew with {self._command(owner, 'new')}"
            )
        module = self.layout.module_in_file(owner.module)
        if (stored.module, stored.test) != (module, owner.test):
            if (stored.module, stored.test.lower()) == (module, owner.test.lower()):
                raise ValueError(
                    f"{shown} belongs to the test {stored.test}, whose name differs from "
                    f"{owner.test} in upper and lower case only: rename one of the two, because "
                    "they share a file on Windows and macOS"
                )
            claim.note = (
                f"{shown} names {stored.module}::{stored.test} as its owner, but {owner} uses it; "
                "--edgeq-update=changed writes that down"
            )
        return stored

    def _write(
        self, path: Path, claim: Claim, owner: Owner, name: str, data: dict[str, Any] | None = None
    ) -> None:
        __tracebackhide__ = True
        stored = claim.data if data is None else data
        if claim.judge is not None:
            self._refuse(path, claim, claim.judge.refusal(stored))
        document = store.Document(
            kind=claim.kind,
            module=self.layout.module_in_file(owner.module),
            test=owner.test,
            name=name,
            producer=self._versions,
            data=stored,
            options=claim.options,
        )
        content = store.render(document).encode("utf-8")
        try:
            before = path.read_bytes() if path.exists() else None
            store.write(path, content)
        except OSError as error:
            claim.category = "unwritable"
            raise OSError(_unwritable(self.layout.shown(path), error)) from error
        claim.written, claim.before, claim.note, claim.since = True, before, "", []
        claim.stored = KINDS[claim.kind].summarize(document.data)
        if claim.judge is not None and (remark := claim.judge.remark(document.data)):
            claim.stored += f"; {remark}"

    def _command(self, owner: Owner, category: Category) -> str:
        """Make the command that accepts a claim, ready to paste where pytest was started."""
        test = f"{os.path.relpath(owner.module, self._invocation_dir)}::{owner.test}"
        return f"pytest {shlex.quote(test)} --edgeq-update={category}"
