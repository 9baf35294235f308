"""Hooks of the controller, the process that receives the reports of all tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pytest

from pytest_edgeq.plugin.collection import OUTPUT, collected_in
from pytest_edgeq.plugin.state import CacheMessage, collected_key, memory_of, settings_key

if TYPE_CHECKING:
    from pytest_edgeq.snapshots.collected import CollectedModule
    from pytest_edgeq.snapshots.obsolete import RunLog
    from pytest_edgeq.snapshots.summary import Outcome, Severity

_MARKUP: Mapping[Severity | None, dict[str, bool]] = {
    "error": {"red": True},
    "warning": {"yellow": True},
    "info": {},
    None: {},
}


class Controller:
    """Collects reports, looks for obsolete baselines and prints the summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._log: RunLog | None = None
        self._outcome: Outcome | None = None
        self._cache_messages: dict[CacheMessage, None] = {}
        self._collected: list[list[CollectedModule]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take one report, of this process or of a worker."""
        if self._log is None:
            from pytest_edgeq.snapshots.obsolete import RunLog

            self._log = RunLog()
        self._log.add(
            report.nodeid,
            getattr(report, "worker_id", ""),
            report.when or "",
            report.outcome,
            getattr(report, "edgeq", None),
        )
        told = getattr(report, "edgeq_cache", ())
        self._cache_messages.update(dict.fromkeys((kind, text) for kind, text in told))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take what a worker collected; one that crashed has sent nothing."""
        output = getattr(node, "workeroutput", {})
        if OUTPUT in output:
            self._collected.append(output[OUTPUT])

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Look for obsolete baselines; delete them if asked to."""
        if self._log is None:
            return  # no test ran, so that nothing is known
        from pytest_edgeq.snapshots.obsolete import prune, survey
        from pytest_edgeq.snapshots.summary import Outcome

        settings = self._config.stash[settings_key]
        if self._config.stash[collected_key]:
            self._collected.append(collected_in(session))
        found = survey(memory_of(self._config).layout, self._log, self._collected)
        is_error, prunes = settings.obsolete == "error", "prune" in settings.update
        outcome = Outcome(
            found,
            obsolete_is_error=is_error,
            tells_not_judged=is_error or prunes or self._config.get_verbosity() > 0,
        )
        if prunes:
            kept = prune(found.obsolete)
            pruned = [path for path in found.obsolete if path not in kept]
            outcome = dataclasses.replace(outcome, pruned=pruned, kept=kept)
        self._outcome = outcome
        if outcome.fails and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the baselines that were written, that differ and that are obsolete."""
        if self._outcome is None or self._log is None:
            return
        from pytest_edgeq.snapshots.summary import Line, summarize

        lines = summarize(memory_of(self._config).layout, self._log, self._outcome)
        verbose = self._config.get_verbosity() > 0
        lines += [
            Line(f"{kind.capitalize()}: {text}", kind)
            for kind, text in self._cache_messages
            if verbose or kind == "warning"
        ]
        if lines:
            terminalreporter.section("edgeq")
        for line in lines:
            terminalreporter.write_line(line.text, **_MARKUP[line.severity])
