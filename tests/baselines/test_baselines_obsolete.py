from __future__ import annotations

from pathlib import Path

import pytest

from pytest_edgeq.baselines import store
from pytest_edgeq.baselines.claims import Owner
from pytest_edgeq.baselines.obsolete import (
    CollectedModule,
    LoggedTest,
    RunLog,
    Survey,
    prune,
    survey,
)
from pytest_edgeq.baselines.paths import Layout
from pytest_edgeq.baselines.session import SnapshotSession
from pytest_edgeq.baselines.summary import Outcome, summarize
from tests.baselines.op_maps import residual

PHASES = ("setup", "call", "teardown")
COLLECTED: list[list[CollectedModule]] = [
    [{"module": "test_x.py", "tests": {"test_x.py::test_y": "test_y"}, "gap": ""}]
]


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    """A root folder."""
    return Layout(tmp_path)


@pytest.fixture
def owner(tmp_path: Path) -> Owner:
    """A test."""
    (tmp_path / "test_x.py").touch()
    return Owner(tmp_path / "test_x.py", "test_y")


@pytest.fixture
def file(layout: Layout, owner: Owner) -> Path:
    """What that test remembered once."""
    memory = SnapshotSession(layout, update=["new"])
    with memory.running(owner, "call"):
        memory.check("op_dtype_map", "op_dtypes", residual())
    return layout.path(owner, "op_dtypes")


def logged(layout: Layout, owner: Owner, *runs: tuple[str, str]) -> RunLog:
    """Log the reports of a test that claims nothing: phase and outcome."""
    outcome = next((outcome for _, outcome in runs if outcome != "passed"), "passed")
    claims = SnapshotSession(layout).record(owner)
    run = LoggedTest("test_x.py::test_y", outcome, {phase for phase, _ in runs}, claims)
    return RunLog([run] if runs else [])


def test_a_folder_that_is_gone_or_a_file(layout: Layout, owner: Owner, file: Path) -> None:
    """Another process may delete it while the run ends: there is nothing to judge."""
    log = logged(layout, owner, *((phase, "passed") for phase in PHASES))
    store.delete(file)

    assert survey(layout, log, COLLECTED) == Survey()

    file.parents[1].write_text("")
    assert survey(layout, log, COLLECTED) == Survey()


def test_a_folder_that_cannot_be_looked_through(layout: Layout, owner: Owner) -> None:
    """The run ends with a warning that names the folder and the reason."""
    log = logged(layout, owner, *((phase, "passed") for phase in PHASES))
    folder = layout.folder(owner.module).parent
    folder.symlink_to(folder.name)

    found = survey(layout, log, COLLECTED)

    assert found.obsolete == {}
    assert folder in found.unreadable
    assert all("cannot be looked through: Too many " in why for why in found.unreadable.values())


@pytest.mark.parametrize(
    "runs",
    [
        [("setup", "passed"), ("call", "passed")],
        [("setup", "passed"), ("call", "passed"), ("???", "failed")],
        [("setup", "passed"), ("call", "rerun"), ("teardown", "passed")],
    ],
    ids=["interrupted", "crashed", "about-to-rerun"],
)
def test_anything_else(
    layout: Layout, owner: Owner, file: Path, runs: list[tuple[str, str]]
) -> None:
    """A phase that is missing, or any report that is not passed: nothing is known."""
    assert not survey(layout, logged(layout, owner, *runs), COLLECTED).obsolete


def test_what_did_not_run_to_the_end_is_named(layout: Layout, owner: Owner, file: Path) -> None:
    """One test of the module, and how many more."""
    tests = {f"test_x.py::test_{i}": f"test_{i}" for i in range(3)}
    collected: CollectedModule = {"module": "test_x.py", "tests": tests, "gap": ""}

    found = survey(layout, logged(layout, owner), [[collected]])

    assert found.not_judged == {"test_x.py": "test_0 and 2 more did not run to the end"}


def test_a_file_that_cannot_be_deleted_is_reported(
    layout: Layout, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends as it should, says so, and counts the file as still obsolete."""

    def refuse(path: Path) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(store, "delete", refuse)
    kept = prune([file])
    outcome = Outcome(
        Survey({file: "there is no test test_x.py::test_y"}), kept=kept, obsolete_is_error=True
    )

    lines = [line.text for line in summarize(layout, RunLog([]), outcome)]

    assert lines[0].startswith("Error: 1 baseline is obsolete")
    shown = "__edgeq__/test_x/test_y.op_dtypes.json"
    assert lines[-1] == f"Error: {shown} could not be deleted: read-only"
    assert outcome.fails
