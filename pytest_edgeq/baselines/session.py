"""
The memory of one pytest run.

What the running test claims is looked up, compared and, where the user asked for it, written.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pytest_edgeq.baselines import store
from pytest_edgeq.baselines.build import UNDO, is_known, option_changes
from pytest_edgeq.baselines.claims import Claim, ClaimRecord, Judge, Owner, Phase, RunningTest
from pytest_edgeq.baselines.kinds import KINDS
from pytest_edgeq.baselines.paths import Layout
from pytest_edgeq.errors import failure
from pytest_edgeq.numerics.findings import NO_BASELINE, Finding, Place, first_of
from pytest_edgeq.versions import producer, version_changes

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
    return (
        f"baseline not stored: {shown}: {error.strerror}\n"
        "cause: the file system refused the write; what was stored before is as it was\n"
        "fix: let this user write there, or free space, then run the same command again"
    )


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
        self._test.phase = phase
        try:
            yield
        finally:
            if phase == "teardown":
                self._test = None

    def record(self, owner: Owner) -> list[ClaimRecord]:
        """Return the claims of a test so far, as plain data."""
        claims = self._test.claims if self._test is not None and self._test.owner == owner else {}
        return [
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
        ]

    def check(
        self,
        kind: str,
        name: str,
        data: dict[str, Any],
        explain: Explain | None = None,
        judge: Judge | None = None,
        options: Mapping[str, str] | None = None,
    ) -> None:
        """
        Compare a measurement with its baseline, or store it if asked to.

        An AssertionError carries the finding (`errors.findings_of`). If the file cannot be written,
        what was stored before is as it was.
        """
        test = self._body(kind, name)
        if not name:
            raise ValueError("a claim needs a name: what it is remembered as, within its test")
        known = KINDS[kind]
        claim = self._claim(test, kind, name, store.plain(data), options, judge)
        earlier = test.claims.get(claim.path)
        if earlier is not None and self.update & {"new", "changed", "tighten"}:
            self._refuse_second(earlier, claim)
            if earlier.written:
                return
        test.claims[claim.path] = claim
        claim.remarks += () if judge is None else judge.notes
        try:
            stored = self._read(claim)
        except FileNotFoundError:
            stored = None
        if stored is None:
            claim.category = "new"
        else:
            self._compare(claim, stored)
        if claim.category in ("unchanged", "tighten") or claim.written:
            return
        if claim.category in self.update:
            self._write(claim, claim.data)
            return
        shown, command = self.layout.shown(claim.path), self._command(claim, claim.category)
        refusal = None if judge is None else judge.refusal(claim.data)
        if stored is None or claim.change is None:
            self._refuse(claim, refusal)
            what, summary = f'{known.title} "{name}"', known.summarize(claim.data)
            found = Finding(
                kind=NO_BASELINE,
                place=Place("baseline", shown),
                symptom=what,
                got=summary,
                headline=f"no baseline is stored yet: {what} ({summary})",
                command=f"to store it and commit the file (on CI nothing is written): {command}",
            )
        else:
            accept = f"if the change is meant: {command}"
            change = self._with_origin(claim.change, stored, claim)
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
        """Return the changes since a baseline that is not comparable with the measurement."""
        claim = self._claim(self._body(kind, name), kind, name, data, options)
        try:
            return self._since(self._read(claim), claim)
        except FileNotFoundError:
            return ()

    def _claim(
        self,
        test: RunningTest,
        kind: str,
        name: str,
        data: dict[str, Any],
        options: Mapping[str, str] | None,
        judge: Judge | None = None,
    ) -> Claim:
        path = self.layout.path(test.owner, name)
        return Claim(path, kind, name, test.owner, data, dict(options or {}), judge)

    def _since(self, stored: store.Document, claim: Claim) -> tuple[str, ...]:
        """Return what changed since the baseline: options, what the kind depends on, versions."""
        others = KINDS[claim.kind].changes(stored.data, claim.data)
        versions = version_changes(stored.producer, self._versions)
        options = option_changes(stored.options, claim.options)
        return (*options, *filter(None, others.values()), *versions)

    def _with_origin(self, change: Finding, stored: store.Document, claim: Claim) -> Finding:
        """Add to a change what differs from the baseline; else which causes remain."""
        if (since := self._since(stored, claim)) or change.fix:
            return replace(change, since=since, fix=change.fix or UNDO)
        known = KINDS[claim.kind]
        others = known.changes(stored.data, claim.data)
        has_options = bool(stored.options) and is_known(claim.options)
        same = ["options", *(name for name, other in others.items() if other == "")]
        left = [] if has_options else ["the quantizer and its settings"]
        left += (f"the {name}" for name, other in others.items() if other is None)
        suspects = (*left, *known.depends_on)
        return replace(change, suspects=suspects, unchanged=tuple(same) if has_options else ())

    def _compare(self, claim: Claim, stored: store.Document) -> None:
        """Find the change; else tighten or rewrite the baseline, and note a refusal."""
        claim.change = KINDS[claim.kind].describe_change(stored.data, claim.data)
        is_changed = claim.change or (claim.note and "changed" in self.update)
        claim.category = "changed" if is_changed else "unchanged"
        options = option_changes(stored.options, claim.options)
        claim.since = [*options, *version_changes(stored.producer, self._versions)]
        if is_changed:
            return
        self._tighten(claim, stored)
        is_older = claim.since or claim.options not in ({}, stored.options)
        if claim.category == "unchanged" and is_older and "changed" in self.update:
            claim.category = "changed"
            self._write(claim, stored.data)
        if claim.judge is None or claim.written:
            return
        if (refusal := claim.judge.refusal(stored.data)) is not None:
            claim.remarks.append(
                f"{self.layout.shown(claim.path)} would be refused today: "
                f"{'; '.join(filter(None, (refusal.title, refusal.fix)))}; then update it with "
                "--edgeq-update=changed"
            )

    def _tighten(self, claim: Claim, stored: store.Document) -> None:
        """Report results better than the baseline; store them if asked to."""
        known = KINDS[claim.kind]
        if known.loose is None or not (better := known.loose(stored.data, claim.data)):
            return
        assert known.tightened is not None, "unreachable, because the kind has a better"
        claim.category = "tighten"
        if "tighten" in self.update:
            self._write(claim, known.tightened(stored.data, claim.data))
            return
        claim.note = (
            f"{self.layout.shown(claim.path)} is loose: {first_of(better)}; "
            "--edgeq-update=tighten stores the better values"
        )

    def _refuse(self, claim: Claim, refusal: Finding | None) -> None:
        """Raise if the claimed value must not be stored."""
        if refusal is None:
            return
        claim.category = "refused"
        assert self._test is not None, "unreachable, because a test's body is running"
        others = self._test.claims.items()
        stored = [f"stored: {self.layout.shown(at)}" for at, each in others if each.written]
        place = Place("baseline", self.layout.shown(claim.path))
        raise failure([replace(refusal, place=place, evidence=(*refusal.evidence, *stored))])

    def _body(self, kind: str, name: str) -> RunningTest:
        """Return the test whose body is running."""
        if self._test is not None and self._test.phase == "call":
            return self._test
        when = "while no test was running"
        if self._test is not None:
            when = f"{_PHASES[self._test.phase]} {self._test.owner}"
        raise RuntimeError(
            f"the {KINDS[kind].title} {name!r} was checked {when}: check it in the body of a test, "
            "because a baseline belongs to one test, and outside of its body that is ambiguous"
        )

    def _refuse_second(self, earlier: Claim, claim: Claim) -> None:
        """Raise if the test has claimed another value by this name; restore the earlier file."""
        is_same_kind, known = earlier.kind == claim.kind, KINDS[earlier.kind]
        change = known.describe_change(earlier.data, claim.data) if is_same_kind else None
        if is_same_kind and change is None:
            return
        if earlier.written:
            try:
                if earlier.before is None:
                    store.delete(claim.path)
                else:
                    store.write(claim.path, earlier.before)
            except OSError as error:
                raise OSError(_unwritable(self.layout.shown(claim.path), error)) from error
            earlier.written = False
        first = f"its kind, {claim.kind}" if change is None else change.title
        raise ValueError(_TWICE.format(title=known.title, name=claim.name, change=first))

    def _read(self, claim: Claim) -> store.Document:
        """Read the file of a claim, and check that it is one."""
        shown, known, owner = self.layout.shown(claim.path), KINDS[claim.kind], claim.owner
        stored = store.read(claim.path, shown)
        if stored.kind != claim.kind:
            raise ValueError(
                f"{shown} holds a {stored.kind!r}, but a {claim.kind!r} is claimed as "
                f"{claim.name!r}: two claims of one test share a name; give each its own (name=…)"
            )
        if problem := known.problem(stored.data):
            raise ValueError(
                f"{shown} is no whole {known.title}: {problem}. Restore it from version control, "
                f"or delete it and store it anew with {self._command(claim, 'new')}"
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
                "--edgeq-update=changed records the new owner"
            )
        return stored

    def _write(self, claim: Claim, data: dict[str, Any]) -> None:
        if claim.judge is not None:
            self._refuse(claim, claim.judge.refusal(data))
        document = store.Document(
            kind=claim.kind,
            module=self.layout.module_in_file(claim.owner.module),
            test=claim.owner.test,
            name=claim.name,
            producer=self._versions,
            data=data,
            options=claim.options,
        )
        try:
            before = claim.path.read_bytes() if claim.path.exists() else None
            store.write(claim.path, store.render(document).encode("utf-8"))
        except OSError as error:
            claim.category = "unwritable"
            raise OSError(_unwritable(self.layout.shown(claim.path), error)) from error
        claim.written, claim.before, claim.note, claim.since = True, before, "", []
        claim.stored = KINDS[claim.kind].summarize(data)
        if claim.judge is not None and (remark := claim.judge.remark(data)):
            claim.stored += f"; {remark}"

    def _command(self, claim: Claim, category: str) -> str:
        """Make the command that accepts a claim, ready to paste where pytest was started."""
        test = f"{os.path.relpath(claim.owner.module, self._invocation_dir)}::{claim.owner.test}"
        return f"pytest {shlex.quote(test)} --edgeq-update={category}"
