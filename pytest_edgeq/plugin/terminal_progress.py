"""
The line that shows on a terminal how far a long step is.

It is written below pytest's current line, and each time the cursor returns to where pytest has left
it, so that pytest's own output does not change.
"""

from __future__ import annotations

import os
import threading
import time

import pytest

from pytest_edgeq.plugin.options.values import ci_variable
from pytest_edgeq.progress import Progress, Step

_DELAY = 0.5  # seconds before a step is shown: those that are over by then would flicker
_INTERVAL = 0.1  # seconds between two updates


def progress_of(config: pytest.Config) -> Progress:
    """Return the progress display of this run; it shows nothing where it would be in the way."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if (
        reporter is None
        # Public as pytest.TerminalReporter only in later releases than the oldest.
        or type(reporter).__module__ != "_pytest.terminal"
        # A property in pytest 8, a method in pytest 9.
        or not (reporter.isatty() if callable(reporter.isatty) else reporter.isatty)
        or not os.isatty(1)
        or hasattr(config, "workerinput")
        or ci_variable() is not None
        or os.environ.get("TERM") == "dumb"
        or _has_live_logs(config)
    ):
        return Progress()
    # pytest captures nothing yet, so this is the terminal, and stays so.
    terminal = os.dup(1)
    config.add_cleanup(lambda: os.close(terminal))
    return _TerminalProgress(terminal, config)


def _has_live_logs(config: pytest.Config) -> bool:
    if not config.pluginmanager.hasplugin("logging-plugin"):
        return False
    return config.getoption("log_cli_level") is not None or bool(config.getini("log_cli"))


class _TerminalProgress(Progress):
    """Writes the innermost step; rich's live displays own the line that is pytest's here."""

    def __init__(self, terminal: int, config: pytest.Config) -> None:
        self._terminal = terminal
        self._writer = config.get_terminal_writer()
        self._lock = threading.Lock()
        self._running: list[tuple[Step, float]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread()
        self._shown = ""

    def begin(self, step: Step) -> None:
        """Start a step, which is shown once it has run for a while."""
        with self._lock:
            self._running.append((step, time.monotonic()))
            if len(self._running) == 1:
                self._ended = threading.Event()
                self._thread = threading.Thread(
                    target=self._update, args=(self._ended,), daemon=True
                )
                self._thread.start()

    def end(self, step: Step) -> None:
        """Erase the line behind the outermost step."""
        with self._lock:
            self._running = [each for each in self._running if each[0] is not step]
            if self._running:
                return
            ended, thread = self._ended, self._thread
        ended.set()
        thread.join()
        if self._shown:
            self._show("")

    def _update(self, ended: threading.Event) -> None:
        pause = _DELAY
        while not ended.wait(pause):
            pause = _INTERVAL
            with self._lock:
                running = self._running[-1:]
            for step, start in running:
                seconds = time.monotonic() - start
                if self._shown or seconds >= _DELAY:
                    self._show(_progress_line(step, seconds))

    def _show(self, text: str) -> None:
        # Where pytest does not capture both, or not now, a test's own output is on the terminal.
        if text == self._shown or os.isatty(1) or os.isatty(2):
            return
        width = os.get_terminal_size(self._terminal).columns
        written = self._writer.width_of_current_line
        if not width or (written and written % width == 0):
            return  # the cursor is behind the last column, where no sequence brings it back
        column = written % width
        back = f"\x1b[{column}C" if column else ""
        line = f"\r\n\x1b[2K{text[: width - 1]}\r\x1b[A{back}"
        os.write(self._terminal, line.encode("ascii"))
        self._shown = text


def _progress_line(step: Step, seconds: float) -> str:
    of = "" if step.total is None else f" of {step.total}"
    count = f" {step.done}{of}" if step.done or step.total else ""
    # The width in columns of any other character is unknown.
    model = "".join(each if " " <= each <= "~" else "?" for each in step.model)
    rate = ""
    if step.in_flight is not None:
        rate = f", {step.done / max(seconds, 1e-3):.1f}/s, {step.in_flight} in flight"
    return f"edgeq: {step.what}{count}, {seconds:.0f} s{rate}, {model}"
