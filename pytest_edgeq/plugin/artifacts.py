"""Write bundles that show the failures of tests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_edgeq.baselines.paths import Layout
from pytest_edgeq.plugin.state import fixture_values, journal_of, owner_of

if TYPE_CHECKING:
    from pytest_edgeq.report.bundle import Evidence
    from pytest_edgeq.report.run import RunRecorder, TestFailure


class Artifacts:
    """Writer of the bundle of each failed test."""

    def __init__(self, config: pytest.Config, directory: Path) -> None:
        self._rootdir = config.rootpath
        self._journal = journal_of(config)
        self._directory = directory
        self._recorder: RunRecorder | None = None  # of the running test
        self._failures: list[str] = []

    def begin(self, item: pytest.Item) -> None:
        """Remove the bundle that an earlier run of the test has left."""
        from pytest_edgeq.report.bundle import remove_bundle

        remove_bundle(self._folder(item))

    def take(
        self, item: pytest.Item, report: pytest.TestReport, error: BaseException | None
    ) -> None:
        """Add a report; write the bundle of a failure."""
        from pytest_edgeq.report.run import RunRecorder

        recorder = self._recorder = self._recorder or RunRecorder()
        failure = recorder.add(report, "", self._rootdir)
        if failure is not None:
            self._failures.append(_failure_text(report.nodeid, failure))
            self._keep(item, report, error, recorder)
        if report.when == "teardown":
            self._recorder, self._failures = None, []
            self._journal.calls.clear()

    def _folder(self, item: pytest.Item) -> Path:
        from pytest_edgeq.report.bundle import bundle_name

        owner = owner_of(item)
        module = Layout(self._rootdir).shown(owner.module)
        return self._directory / bundle_name(f"{module}::{owner.test}", self._rootdir)

    def _keep(
        self,
        item: pytest.Item,
        report: pytest.TestReport,
        error: BaseException | None,
        recorder: RunRecorder,
    ) -> None:
        evidence = self._evidence(item, error)
        if evidence.is_empty:
            return
        from pytest_edgeq.report.bundle import write_bundle

        folder = self._folder(item)
        shown = Layout(self._rootdir).shown(folder)
        try:
            text = "\n\n".join(self._failures)
            write_bundle(folder, evidence, recorder.run(), text, self._rootdir)
        except (OSError, ValueError) as error:
            _add_section(report, f"bundle: cannot be written: {error}")
            return
        report.__dict__["edgeq_bundle"] = shown
        _add_section(report, f"bundle: {shown}/ (python reproduce.py shows the failure)")

    def _evidence(self, item: pytest.Item, error: BaseException | None) -> Evidence:
        from pytest_edgeq.compare.failed_samples import attached_samples, compared_samples
        from pytest_edgeq.report.bundle import Evidence

        calls = self._journal.calls
        found = [call.comparison for call in calls if call.comparison is not None]
        found += fixture_values(item, "numerics.comparison", "Comparison")
        # A comparison may be both of a call and of a fixture.
        comparisons = {id(each): each for each in found if each.quantized is not None}
        samples = [compared_samples(each) for each in comparisons.values()]
        attached = None if error is None else attached_samples(error)
        models = [call.model for call in calls if call.model is not None]
        models += fixture_values(item, "compare.quantized", "QuantizedModel")
        return Evidence(
            models=models,
            samples=samples if attached is None else [attached, *samples],
            layers=[
                (call.model, call.layers)
                for call in calls
                if call.model is not None and call.layers is not None
            ],
        )


def _failure_text(nodeid: str, failure: TestFailure) -> str:
    path, line = failure["path"], failure["line"]
    place = "" if path is None else f" at {path}:{line}"
    return f"{nodeid} failed in its {failure['phase']}{place}\n{failure['message']}"


def _add_section(report: pytest.TestReport, text: str) -> None:
    """Add a line to the text of a failure."""
    add = getattr(report.longrepr, "addsection", None)
    if add is None:
        report.longrepr = f"{report.longrepr}\n{text}"
    else:
        add("edgeq", text)
