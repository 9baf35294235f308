"""Hooks of the controller, which receives the reports of all tests and writes the views."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_edgeq.plugin.state import layout_of, owner_of, state_key

if TYPE_CHECKING:
    from pytest_edgeq.baselines.obsolete import CollectedModule, RunLog
    from pytest_edgeq.baselines.summary import Line, Outcome, Severity
    from pytest_edgeq.plugin.options.declared import Settings
    from pytest_edgeq.report.run import Run

OUTPUT = "edgeq_collected"  # key of what a worker of pytest-xdist sends at its end

_ANNOTATOR = "pytest_github_actions_annotate_failures"  # the plugin that annotates every failure

_PHASES = ("setup", "call", "teardown")

_MARKUP: Mapping[Severity | None, dict[str, bool]] = {
    "error": {"red": True},
    "warning": {"yellow": True},
    "info": {"bold": True},
    None: {},
}


class Controller:
    """
    Receiver of all reports: finds obsolete baselines, writes the record and the summary.

    Nothing is imported for a run in which no test used this package and no baselines are stored.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._started = datetime.now(timezone.utc)
        # The terminal's reporter keeps them, too.
        self._reports: list[pytest.TestReport] = []
        self._lines: list[Line] = []  # of the summary, on baselines
        self._run: Run | None = None
        self._collected: list[list[CollectedModule]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add one report, of this process or of a worker."""
        self._reports.append(report)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Add the collected tests of a worker; one that crashed has sent none."""
        output = getattr(node, "workeroutput", {})
        if OUTPUT in output:
            self._collected.append(output[OUTPUT])

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Find obsolete baselines, delete them if requested, and write the record."""
        state = self._config.stash[state_key]
        settings = state.settings
        if state.collected and self._reports:
            self._collected.append(collected_in(session))
        # A later step of CI needs its file, even if no test could be collected. An editor that
        # only lists the tests must not replace the report of the last run.
        is_viewed = any((settings.json, settings.markdown, settings.html))
        is_viewed = is_viewed and not self._config.option.collectonly
        if not is_viewed and not (self._reports and self._is_of_interest()):
            return
        from pytest_edgeq.baselines.summary import summarize
        from pytest_edgeq.report.run import RunRecorder

        recorder = RunRecorder(self._started)
        for each in self._reports:
            recorder.add(each, getattr(each, "worker_id", ""), self._config.rootpath)
        layout, log = layout_of(self._config), recorder.log
        outcome = self._judge_baselines(log)
        self._lines = summarize(layout, log, outcome)
        left, pruned = (map(layout.shown, paths) for paths in (outcome.left, outcome.pruned))
        self._run = recorder.run(left, pruned, self._targets.values())
        unwritten = write_views(self._run, settings)
        self._lines += unwritten
        is_error = any(line.severity == "error" for line in unwritten)
        if (is_error or outcome.fails) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _is_of_interest(self) -> bool:
        """Return whether a test used this package or crashed, or baselines may be stored."""
        layout = layout_of(self._config)
        modules = {layout.rootdir / report.nodeid.partition("::")[0] for report in self._reports}
        return (
            any(self._collected)
            or any(layout.folder(module).parent.is_dir() for module in modules)
            or any(report.when not in _PHASES for report in self._reports)
            or any(name.startswith("edgeq") for each in self._reports for name in vars(each))
        )

    def _judge_baselines(self, log: RunLog) -> Outcome:
        from pytest_edgeq.baselines.obsolete import prune, survey
        from pytest_edgeq.baselines.summary import Outcome

        settings = self._config.stash[state_key].settings
        found = survey(layout_of(self._config), log, self._collected)
        is_error, prunes = settings.obsolete == "error", "prune" in settings.update
        left = prune(found.obsolete) if prunes else found.obsolete
        return Outcome(
            found,
            pruned=[path for path in found.obsolete if path not in left],
            kept=dict(left) if prunes else {},
            obsolete_is_error=is_error,
            shows_not_judged=is_error or prunes or self._config.option.verbose > 0,
        )

    def _attached(self, name: str) -> Iterator[Any]:
        """Yield what tests have attached to their reports."""
        return (each for report in self._reports for each in getattr(report, name, ()))

    @property
    def _targets(self) -> dict[str, Mapping[str, Any]]:
        """Return the machines that tests ran on, by target."""
        return {machine["target"]: machine for machine in self._attached("edgeq_targets")}

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the models, and new, different and obsolete baselines."""
        if self._run is None:
            return
        from pytest_edgeq.baselines.summary import Line
        from pytest_edgeq.numerics.target_machine import TargetMachine
        from pytest_edgeq.report.model_rows import table_lines
        from pytest_edgeq.versions import version_of

        verbosity = self._config.option.verbose
        lines = self._lines + [
            Line(f"{kind.capitalize()}: {text}", kind)
            for kind, text in dict.fromkeys(map(tuple, self._attached("edgeq_cache")))
            if verbosity > 0 or kind == "warning"
        ]
        for name, facts in self._targets.items():
            machine = TargetMachine.of(name, facts)
            here = version_of(machine.package)
            other = f"; here {machine.package} is {here}" if here != machine.release else ""
            lines.append(Line(f"ran on {name}: {machine}{other}", "warning" if other else None))
        table = table_lines(self._run) if verbosity >= 0 else []
        if table or lines:
            terminalreporter.section("edgeq")
        for text, failed in table:
            terminalreporter.line(text, red=failed)
        for line in lines:
            terminalreporter.line(line.text, **_MARKUP[line.severity])
        if self._annotates():
            from pytest_edgeq.report.markdown import annotation_lines

            workspace = os.environ.get("GITHUB_WORKSPACE")
            folder = None if workspace is None else Path(workspace)
            for text in annotation_lines(self._run, self._config.rootpath, folder):
                terminalreporter.line(text)

    def _annotates(self) -> bool:
        """Return whether GitHub reads the output, and no other plugin annotates it."""
        on_github = os.environ.get("GITHUB_ACTIONS") == "true"
        return on_github and not self._config.pluginmanager.hasplugin(_ANNOTATOR)


def collected_in(session: pytest.Session) -> list[CollectedModule]:
    """Return the collected tests of this process, for modules with baselines."""
    config, state = session.config, session.config.stash[state_key]
    layout = layout_of(config)
    items: dict[Path, list[pytest.Item]] = {}
    for item in state.collected:
        items.setdefault(item.path, []).append(item)
    absent = state.absent
    if not any(map(layout.has_baselines, (*items, *absent))):
        return []
    from pytest_edgeq.baselines.obsolete import collected_modules

    collected = {
        module: {item.nodeid: owner_of(item).test for item in its_items}
        for module, its_items in items.items()
        if layout.has_baselines(module)
    }
    files = [argument.partition("::")[0] for argument in config.args if "::" in argument]
    narrowed = ""
    if config.getoption("lf", False):
        narrowed = "--last-failed chose its tests"
    elif "quantizers" in state.settings.on_command_line:
        narrowed = "--edgeq-quantizers replaced the quantizers of its tests"
    return collected_modules(
        layout,
        collected,
        {item.nodeid for item in session.items},
        named={(config.invocation_params.dir / file).resolve() for file in files},
        absent=absent,
        narrowed=narrowed,
    )


SUMMARY = "GITHUB_STEP_SUMMARY"  # the environment variable that names its file


def write_views(run: Run, settings: Settings) -> list[Line]:
    """Write every view that was asked for; return a line for each that cannot be written."""
    from pytest_edgeq.baselines.summary import Line
    from pytest_edgeq.report.markdown import markdown_page
    from pytest_edgeq.report.whole_files import write_whole

    def html(path: Path) -> None:
        from pytest_edgeq.report.html.page import html_page

        write_whole(path, html_page(run))

    def append(path: Path) -> None:
        with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(markdown_page(run))

    summary = os.environ.get(SUMMARY) if run.tests else None
    views: tuple[tuple[str, Path | None, Callable[[Path], None]], ...] = (
        ("--edgeq-json", settings.json, run.write),
        ("--edgeq-html", settings.html, html),
        ("--edgeq-markdown", settings.markdown, lambda path: write_whole(path, markdown_page(run))),
        (SUMMARY, Path(summary) if summary else None, append),
    )
    lines = []
    for name, path, write in views:
        try:
            if path is not None:
                write(path)
        except OSError as error:
            # Nobody asked for the summary, whose file may not be mounted in a container.
            severity: Severity = "warning" if name == SUMMARY else "error"
            why = f"{name}: {path} could not be written: {error.strerror or error}"
            lines.append(Line(f"{severity.capitalize()}: {why}", severity))
    return lines
