"""The record of a run: built from test reports, written and read as JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from pytest_edgeq.baselines.obsolete import LoggedTest, RunLog
from pytest_edgeq.baselines.paths import Layout
from pytest_edgeq.numerics.findings import Finding
from pytest_edgeq.report.whole_files import write_json
from pytest_edgeq.versions import producer

if TYPE_CHECKING:
    from pytest_edgeq.runtimes.edge import EdgeFile

FORMAT = "pytest-edgeq run"
VERSION = 1  # of the schema in `run.schema.json`: a reader refuses what is newer


class TestFailure(TypedDict):
    """Why a test failed."""

    phase: str  # `setup`, `call`, `teardown`, or `crash` of the process that ran it
    message: str  # the text of the error
    path: str | None  # of the file that raised it, relative to rootdir where it can be
    line: int | None  # line in that file, from 1
    records: list[dict[str, Any]]  # of the findings that the error carries
    bundle: str | None  # folder of what was kept to show it


def failure_of(report: Any, rootdir: Path) -> TestFailure | None:
    """Return why a phase failed; None if it passed."""
    if not report.failed:
        return None
    crash = getattr(report.longrepr, "reprcrash", None)
    failure: TestFailure = {
        "phase": report.when if report.when in ("setup", "call", "teardown") else "crash",
        "message": str(report.longrepr),
        "path": None,
        "line": None,
        "records": getattr(report, "edgeq_findings", []),
        "bundle": getattr(report, "edgeq_bundle", None),
    }
    if crash is not None:
        path, line = getattr(report, "edgeq_line", (crash.path, crash.lineno))
        shown = Layout(rootdir).shown(Path(path))
        failure |= {"message": crash.message, "path": shown, "line": line}
    return failure


@dataclasses.dataclass
class _Test(LoggedTest):
    """A run of a test, with what the record has of it."""

    seconds: float = 0
    events: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    uses: dict[str, None] = dataclasses.field(default_factory=dict)
    failure: TestFailure | None = None
    raised: bool = False  # whether this package did, or a test with the fixture `edgeq`
    set_up: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def again(self) -> _Test:
        """Return the record of the next run of the same test, without events that recur."""
        return _Test(self.nodeid, events=list(self.set_up), set_up=list(self.set_up))

    @property
    def models(self) -> list[str]:
        """Keys of the models of its events and its fixtures."""
        named = (event["model"] for event in self.events)
        return list(dict.fromkeys([*(key for key in named if key is not None), *self.uses]))

    @property
    def is_of_interest(self) -> bool:
        if self.events or self.uses or self.claims:
            return True
        # What a test that crashed did with models is not known.
        return self.failure is not None and (self.raised or self.failure["phase"] == "crash")

    def add(self, report: Any, failure: TestFailure | None) -> None:
        self.phases.add(report.when)
        self.seconds += report.duration
        events = getattr(report, "edgeq_journal", {"events": []})["events"]
        if report.when == "setup":
            self.set_up = _not_repeated(self.set_up, events) + events
            self.events = list(self.set_up)
        else:
            self.events += events
        self.uses |= dict.fromkeys(getattr(report, "edgeq_uses", ()))
        if claims := getattr(report, "edgeq", None):
            self.claims = claims
        self.failure = self.failure or failure
        self.raised = self.raised or hasattr(report, "edgeq_findings")
        if report.outcome == "failed":
            self.outcome = "failed"
        elif report.outcome != "passed" and self.outcome == "passed":
            self.outcome = report.outcome

    def to_dict(self) -> dict[str, Any]:
        return {
            "test": self.nodeid,
            "outcome": self.outcome,
            "seconds": round(self.seconds, 3),
            "models": self.models,
            "events": self.events,
            "claims": list(self.claims),
            "failure": self.failure,
        }


def _not_repeated(
    earlier: Iterable[dict[str, Any]], later: Iterable[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the earlier events without one for each later event of the same kind and model."""
    repeated = Counter((event["event"], event["model"]) for event in later)
    kept = []
    # Fixtures of a wider scope are set up first: of equal events the last ones are repeated.
    for event in reversed(list(earlier)):
        kind = (event["event"], event["model"])
        if not repeated[kind]:
            kept.append(event)
        repeated[kind] -= bool(repeated[kind])
    return kept[::-1]


@dataclasses.dataclass(frozen=True)
class Run:
    """The record of a run."""

    data: Mapping[str, Any]  # plain data of the schema `run.schema.json`

    @property
    def models(self) -> Mapping[str, Mapping[str, Any]]:
        """The models by key, in the order of the tests that used them first."""
        models: Mapping[str, Mapping[str, Any]] = self.data["models"]
        return models

    @property
    def tests(self) -> list[Mapping[str, Any]]:
        """The tests that used a model or failed in this package, in the order in which they ran."""
        tests: list[Mapping[str, Any]] = self.data["tests"]
        return tests

    def tests_of(self, key: str) -> list[Mapping[str, Any]]:
        """Return the tests that used a model."""
        return [test for test in self.tests if key in test["models"]]

    def calls_of(self, key: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Return the events of a model in order, each with the node id of its test."""
        for test in self.tests_of(key):
            for event in test["events"]:
                if event["model"] == key:
                    yield test["test"], event

    def measured(self, key: str, part: str) -> list[tuple[str, Any]]:
        """Return a part of the events of a model that have it, each with the node id."""
        return [(test, event[part]) for test, event in self.calls_of(key) if part in event]

    def layers_of(self, edge: EdgeFile) -> dict[int, Mapping[str, Any]]:
        """Return the latest measurements of the ops of a file, by subgraph."""
        signatures = edge.graph.signatures
        found: dict[int, Mapping[str, Any]] = {}
        for key, model in self.models.items():
            if model["sha256"] != edge.graph.sha256:
                continue
            for _, layers in self.measured(key, "layers"):
                for signature in signatures:
                    # A model of several signatures is measured by each, as `name[signature]`.
                    if len(signatures) == 1 or model["name"].endswith(f"[{signature.key}]"):
                        found[signature.subgraph] = layers
        return found

    def write(self, path: Path) -> None:
        """Write the record as JSON, whole or not at all; missing folders are made."""
        write_json(path, self.data, separators=(",", ":"))


class RunRecorder:
    """Collects the reports of a run, those of a worker that crashed later, too."""

    def __init__(self, started: datetime | None = None) -> None:
        self._started = datetime.now(timezone.utc) if started is None else started
        self._models: dict[str, dict[str, Any]] = {}
        self._tests: dict[tuple[str, str], _Test] = {}

    def add(self, report: Any, worker: str, rootdir: Path) -> TestFailure | None:
        """
        Add a `TestReport` of a process, and return why it failed.

        A set-up restarts the test, as after a rerun.
        """
        key = (report.nodeid, worker)
        failure = failure_of(report, rootdir)
        if failure is not None and failure["phase"] == "crash":
            # The controller reports a crash, and does not say of which worker.
            started = [each for each in self._tests if each[0] == report.nodeid]
            key = started[-1] if started else key
        if report.when == "setup" or key not in self._tests:
            earlier = self._tests.get(key)
            self._tests[key] = _Test(report.nodeid) if earlier is None else earlier.again()
        self._models = {
            **getattr(report, "edgeq_journal", {"models": {}})["models"],
            **self._models,
        }
        self._tests[key].add(report, failure)
        return failure

    @property
    def log(self) -> RunLog:
        """The log of the tests, by which baselines are judged."""
        return RunLog(self._tests.values())

    def run(
        self,
        obsolete: Iterable[str] = (),
        pruned: Iterable[str] = (),
        targets: Iterable[Mapping[str, Any]] = (),
    ) -> Run:
        """Return the record."""
        tests = [test for test in self._tests.values() if test.is_of_interest]
        used = dict.fromkeys(key for test in tests for key in test.models)
        return Run(
            {
                "format": FORMAT,
                "version": VERSION,
                "started": self._started.isoformat(timespec="seconds"),
                "seconds": round((datetime.now(timezone.utc) - self._started).total_seconds(), 3),
                "python": platform.python_version(),
                "machine": platform.machine(),
                "versions": producer(),
                "targets": [dict(each) for each in targets],
                "models": {key: self._models[key] for key in used},
                "tests": [test.to_dict() for test in tests],
                "baselines": {"obsolete": list(obsolete), "pruned": list(pruned)},
            }
        )


def findings_in(part: Mapping[str, Any]) -> list[Finding]:
    """Return the findings of a failure or a check."""
    return [Finding.from_dict(each) for each in part.get("records", ())]


def read_run(path: Path) -> Run:
    """Read the record of a run; refuse another document, or one of a newer version."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise ValueError(
            f"{path}: expected the JSON of --edgeq-json, got a file that is no JSON"
        ) from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(
            f"{path}: expected the JSON of --edgeq-json, got another document "
            f'(there is no "format": "{FORMAT}")'
        )
    version = data.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version > VERSION:
        raise ValueError(
            f"{path}: expected version {VERSION} of the record or an older one, got {version}\n"
            "fix: read it with the pytest-edgeq that wrote it, or a newer one"
        )
    return Run(data)


@contextlib.contextmanager
def showing(path: Path) -> Iterator[Run]:
    """Read the record of a run that is then shown; one that is not whole is refused."""
    run = read_run(path)
    try:
        _check_whole(run)
        yield run
    # A record may come from anywhere, and views read it as the schema has it.
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: the record is not whole ({type(error).__name__}: {error})\n"
            "fix: write it anew (pytest --edgeq-json)"
        ) from error


def _check_whole(run: Run) -> None:
    """Raise if views would show fewer tests or baselines than the run had."""
    run.data["baselines"]
    if not isinstance(run.tests, list) or not isinstance(run.models, dict):
        raise TypeError("tests is no list, or models no object")
    for test in run.tests:
        for key in test["models"]:
            run.models[key]
