"""
Find baselines that no test owns any more.

Of a module that ran completely, a baseline is obsolete whose owner was not collected, or passed
without checking it. Of a module that ran in part, was skipped, or lost a test with its worker,
nothing is known: its baselines are left alone.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TypedDict

from pytest_edgeq.baselines import store
from pytest_edgeq.baselines.claims import ClaimRecord, Owner
from pytest_edgeq.baselines.paths import Layout
from pytest_edgeq.numerics.findings import counted, first_of


class CollectedModule(TypedDict):
    """The tests of a module that one process collected, as plain data for xdist."""

    module: str  # its path, relative to rootdir where it is below
    tests: dict[str, str]  # the part of each test's name behind the module, by node id
    gap: str  # why the run did not select all of its tests; empty where it did


def collected_modules(
    layout: Layout,
    collected: Mapping[Path, Mapping[str, str]],
    selected: AbstractSet[str],
    *,
    named: Collection[Path],
    absent: Mapping[Path, str],
    narrowed: str,
) -> list[CollectedModule]:
    """Describe the modules that have baselines."""
    found: list[CollectedModule] = []
    for module, names in collected.items():
        gap = narrowed
        if module in named:
            gap = "only tests named on the command line were collected"
        elif gone := len(names.keys() - selected):
            were = "was" if gone == 1 else "were"
            gap = f"{gone} of {counted(len(names), 'test')} {were} deselected"
        found.append({"module": layout.shown(module), "tests": dict(names), "gap": gap})
    found += [
        {"module": layout.shown(module), "tests": {}, "gap": gap}
        for module, gap in absent.items()
        if layout.has_baselines(module)
    ]
    return found


def _merged(reports: Iterable[Iterable[CollectedModule]]) -> list[CollectedModule]:
    """Merge the collections of several processes; a gap in one is a gap."""
    modules: dict[str, CollectedModule] = {}
    for each in (each for report in reports for each in report):
        known = modules.setdefault(each["module"], {**each, "tests": {}, "gap": ""})
        known["tests"] |= each["tests"]
        known["gap"] = known["gap"] or each["gap"]
    return [modules[name] for name in sorted(modules)]


_PHASES = frozenset({"setup", "call", "teardown"})


@dataclasses.dataclass
class LoggedTest:
    """One run of one test in one process, as far as its reports have come in."""

    nodeid: str
    outcome: str = "passed"  # `failed` if any phase failed, else that of the first not to pass
    phases: set[str] = dataclasses.field(default_factory=set)
    claims: Sequence[ClaimRecord] = ()


class RunLog:
    """The runs of the tests of a session, one a process that ran the test."""

    def __init__(self, runs: Iterable[LoggedTest]) -> None:
        self._runs: dict[str, list[LoggedTest]] = defaultdict(list)
        for run in runs:
            self._runs[run.nodeid].append(run)

    def claims(self, *, of_failed: bool | None = None) -> Iterator[ClaimRecord]:
        """Yield all claims, or only those of tests that failed (or did not)."""
        for run in itertools.chain.from_iterable(self._runs.values()):
            if of_failed in (None, run.outcome == "failed"):
                yield from run.claims

    def modules(self) -> set[str]:
        """Return the modules of all tests that a report came from, relative to rootdir."""
        return {nodeid.partition("::")[0] for nodeid in self._runs}

    def has_ended(self, nodeid: str) -> bool:
        """Whether a test ran to its end in every process."""
        runs = self._runs.get(nodeid, ())
        return bool(runs) and all({"setup", "teardown"} <= run.phases <= _PHASES for run in runs)

    def has_passed(self, nodeid: str) -> bool:
        """Whether a test passed in every process."""
        runs = self._runs.get(nodeid, ())
        return bool(runs) and all(run.outcome == "passed" and run.phases == _PHASES for run in runs)


@dataclasses.dataclass(frozen=True)
class Survey:
    """The baselines in the folders of the modules that ran."""

    # baselines without an owner, and why each is without one
    obsolete: Mapping[Path, str] = dataclasses.field(default_factory=dict)
    # files that nobody claimed, and folders, that cannot be read, with the reason
    unreadable: Mapping[Path, str] = dataclasses.field(default_factory=dict)
    # modules with unclaimed baselines that did not run completely, with the reason
    not_judged: Mapping[str, str] = dataclasses.field(default_factory=dict)


def survey(layout: Layout, log: RunLog, reports: Iterable[Iterable[CollectedModule]]) -> Survey:
    """
    Look through the folders of the modules that ran.

    Temporary files of killed writers are deleted.
    """
    obsolete: dict[Path, str] = {}
    unreadable: dict[Path, str] = {}
    not_judged: dict[str, str] = {}
    claimed = {layout.rootdir / claim["path"] for claim in log.claims()}
    modules = {layout.rootdir / each["module"]: each for each in _merged(reports)}
    for name in sorted(log.modules()):
        # Tests ran, but their worker did not report what else it collected.
        module = layout.rootdir / name
        if module not in modules and layout.has_baselines(module):
            not_judged[name] = "its worker did not finish"
    for module, collected in modules.items():
        store.sweep(layout.folder(module))
        unclaimed = set(_baselines(layout.folder(module), unreadable)) - claimed
        gap = collected["gap"] or _unfinished(collected, log)
        if gap and unclaimed:
            not_judged[collected["module"]] = gap
            continue
        for path, owner in _owners(layout, unclaimed, module, unreadable):
            if why := _why_obsolete(owner, collected, log):
                obsolete[path] = why
    # Also in folders of modules without baselines, as a renamed one has none yet.
    ran = (layout.rootdir / name for name in log.modules())
    for parent in {layout.folder(module).parent for module in (*modules, *ran)}:
        for folder in _listed(parent, unreadable):
            for path, owner in _owners(layout, _baselines(folder, unreadable), None, {}):
                if owner.module.exists():
                    break
                obsolete[path] = f"there is no module {layout.shown(owner.module)}"
    return Survey(dict(sorted(obsolete.items())), unreadable, not_judged)


def _baselines(folder: Path, unreadable: dict[Path, str]) -> list[Path]:
    return [path for path in _listed(folder, unreadable) if path.suffix == ".json"]


def _listed(folder: Path, unreadable: dict[Path, str]) -> list[Path]:
    """Return the entries of a folder; empty if it does not exist."""
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        unreadable[folder] = f"{folder} cannot be looked through: {error.strerror}"
        return []


def _owners(
    layout: Layout, paths: Iterable[Path], module: Path | None, unreadable: dict[Path, str]
) -> Iterator[tuple[Path, Owner]]:
    """
    Return baselines whose path is that of the owner that they name.

    A file that was copied to another test's path still names its first owner.
    """
    for path in sorted(paths):
        try:
            document = store.read(path, layout.shown(path))
        except (OSError, ValueError) as error:
            unreadable[path] = str(error)
            continue
        named = layout.module_of(document.module, path)
        owner = Owner(named, document.test)
        if module in (None, named) and path == layout.path(owner, document.name):
            yield path, owner


def _unfinished(collected: CollectedModule, log: RunLog) -> str:
    """Return why a module did not run completely though all its tests were selected, or ""."""
    lost = [test for nodeid, test in collected["tests"].items() if not log.has_ended(nodeid)]
    return f"{first_of(lost)} did not run to the end" if lost else ""


def _why_obsolete(owner: Owner, collected: CollectedModule, log: RunLog) -> str:
    nodeids = [nodeid for nodeid, test in collected["tests"].items() if test == owner.test]
    if not nodeids:
        return f"there is no test {owner}"
    if all(map(log.has_passed, nodeids)):
        return f"{owner} passed without checking it"
    return ""


def prune(paths: Iterable[Path]) -> dict[Path, str]:
    """Delete obsolete baselines; return those that could not be deleted, with the reason."""
    kept = {}
    for path in paths:
        try:
            store.delete(path)
        except OSError as error:
            kept[path] = str(error)
    return kept
