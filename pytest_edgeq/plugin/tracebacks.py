"""Shorten tracebacks of pytest-edgeq's errors to the user's line."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import pytest

_PACKAGE = Path(__file__).parents[1]
_PLUGIN = Path(__file__).parent


def shows_all(config: pytest.Config) -> bool:
    """Return whether the user wants whole tracebacks, or a debugger."""
    style = config.getoption("tbstyle")
    return style in ("long", "native") or bool(
        config.getoption("fulltrace") or config.getoption("usepdb")
    )


def frames_of_user(excinfo: pytest.ExceptionInfo[BaseException]) -> list[TracebackType] | None:
    """Return the frames that called this package; None if it did not raise the error itself."""
    entries: list[TracebackType] = []
    traceback: TracebackType | None = excinfo.tb
    while traceback is not None:
        entries.append(traceback)
        traceback = traceback.tb_next
    paths = [Path(entry.tb_frame.f_code.co_filename) for entry in entries]
    is_own = [each.is_relative_to(_PACKAGE) and not each.is_relative_to(_PLUGIN) for each in paths]
    return entries[: is_own.index(True)] if is_own[-1] else None


def hide_other_frames(
    excinfo: pytest.ExceptionInfo[BaseException], shown: list[TracebackType]
) -> bool:
    """Remove all other frames and causes; return whether another library's error was one."""
    if shown:
        # pytest 9.2 makes `ExceptionInfo.traceback` anew from this chain, but not for unittest.
        shown[-1].tb_next = None
        excinfo.traceback = type(excinfo.traceback)(excinfo.tb)
    error = excinfo.value
    hidden = error.__cause__ is not None
    error.__cause__ = None
    error.__suppress_context__ = True
    return hidden
