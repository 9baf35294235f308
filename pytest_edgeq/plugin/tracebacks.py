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


def is_own_error(excinfo: pytest.ExceptionInfo[BaseException]) -> bool:
    """Return whether this package raised the error, not a callback of the user."""
    return _is_own(Path(_entries(excinfo.tb)[-1].tb_frame.f_code.co_filename))


def hide_library_frames(excinfo: pytest.ExceptionInfo[BaseException]) -> bool:
    """Remove our frames and causes from a traceback; return whether another library's error was."""
    entries = _entries(excinfo.tb)
    is_own = [_is_own(Path(entry.tb_frame.f_code.co_filename)) for entry in entries]
    first = is_own.index(True)
    if first:
        # pytest 9.2 makes `ExceptionInfo.traceback` anew from this chain, but not for unittest.
        entries[first - 1].tb_next = None
        excinfo.traceback = type(excinfo.traceback)(excinfo.tb)
    error = excinfo.value
    hidden = error.__cause__ is not None
    error.__cause__ = None
    error.__suppress_context__ = True
    return hidden


def _entries(traceback: TracebackType | None) -> list[TracebackType]:
    entries = []
    while traceback is not None:
        entries.append(traceback)
        traceback = traceback.tb_next
    return entries


def _is_own(path: Path) -> bool:
    return path.is_relative_to(_PACKAGE) and not path.is_relative_to(_PLUGIN)
