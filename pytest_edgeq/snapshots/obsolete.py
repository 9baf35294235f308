"""
Which remembered files no test claims any more.

A file is obsolete if the test that owns it, as the file itself says, was collected, ran to the
end and did not claim it. Whatever else may have happened to the owner (not collected, deselected,
skipped, failed, lost with its worker), nothing is known, and the file is left alone.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from pytest_edgeq.snapshots import store
from pytest_edgeq.snapshots.paths import Layout
from pytest_edgeq.snapshots.record import ClaimRecord, Owner, TestRecord

_PHASES = frozenset({"setup", "call", "teardown"})


@dataclasses.dataclass
class _Run:
    """One run of one test, as far as its reports have come in."""

    phases: set[str] = dataclasses.field(default_factory=set)
    clean: bool = True
    record: TestRecord | None = None
    failed: bool = False


class RunLog:
    """
    What became of the tests of a run, from their reports.

    Under pytest-xdist it fills on the controller; reports of a worker that crashed later are kept.
    """

    def __init__(self) -> None:
        self._runs: dict[str, dict[str, _Run]] = defaultdict(dict)

    def add(
        self, nodeid: str, worker: str, phase: str, outcome: str, record: TestRecord | None
    ) -> None:
        """
        Take one report.

        Args:
            nodeid: The test.
            worker: Where it ran: with `--dist=each` a test has a run on each.
            phase: `setup`, `call` or `teardown`; anything else is a crash.
            outcome: `passed`, or whatever else.
            record: What it claimed, on the report of its call.
        """
        runs = self._runs[nodeid]
        # A set-up begins a new run, for instance after a plugin's "rerun".
        run = runs.setdefault(worker, _Run())
        if phase == "setup":
            run = runs[worker] = _Run()
        run.phases.add(phase)
        run.clean &= outcome == "passed" and phase in _PHASES
        run.failed |= outcome == "failed"
        if record is not None:
            run.record = record

    def claims(self, *, of_failed: bool | None = None) -> Iterator[ClaimRecord]:
        """Tell all claims; or only those of tests that failed, or that did not."""
        for runs in self._runs.values():
            for run in runs.values():
                if run.record is not None and of_failed in (None, run.failed):
                    yield from run.record["claims"]

    def finished(self, layout: Layout) -> set[Owner]:
        """Tell the tests that ran to the end everywhere."""
        return {
            layout.unpack(run.record["owner"])
            for runs in self._runs.values()
            if all(run.clean and run.phases == _PHASES for run in runs.values())
            for run in runs.values()
            if run.record is not None
        }


@dataclasses.dataclass(frozen=True)
class Survey:
    """
    What was found in the folders of the tests that ran to the end.

    Attributes:
        obsolete: Files that their owner does not claim any more.
        unreadable: Files that nobody claimed and that cannot be read, with the reason.
    """

    obsolete: list[Path]
    unreadable: Mapping[Path, str]


def survey(layout: Layout, log: RunLog) -> Survey:
    """Look through the folders of the tests that ran to the end."""
    finished = log.finished(layout)
    modules = {layout.module_in_file(owner.module): owner.module for owner in finished}
    folders = {layout.folder(owner.module) for owner in finished}
    claimed = {layout.rootdir / claim["path"] for claim in log.claims()}
    obsolete: list[Path] = []
    unreadable: dict[Path, str] = {}
    for folder in sorted(folders):
        for path in sorted(set(folder.glob("*.json")) - claimed):
            try:
                document = store.read(path, layout.shown(path))
            except (OSError, ValueError) as error:
                unreadable[path] = str(error)
                continue
            module = modules.get(document.module)
            if module is None:
                continue
            owner = Owner(module, document.test)
            # A file that was copied to another test's place names its first owner still.
            if owner in finished and path == layout.path(owner, document.name):
                obsolete.append(path)
    return Survey(obsolete, unreadable)


def prune(paths: list[Path]) -> dict[Path, str]:
    """
    Delete obsolete files.

    Returns:
        The files that could not be deleted, with the reason.
    """
    kept = {}
    for path in paths:
        try:
            store.delete(path)
        except OSError as error:
            kept[path] = str(error)
    return kept
