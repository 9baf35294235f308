"""Whether an error is one of the package's own, with a sentence."""

from __future__ import annotations

import linecache
from pathlib import Path
from types import TracebackType

import pytest_edgeq

_PACKAGE = str(Path(pytest_edgeq.__file__).parent)


def is_sentence(error: BaseException) -> bool:
    """Whether an error was raised by a `raise` of the package with a text of some words."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    file = trace.tb_frame.f_code.co_filename
    line = linecache.getline(file, trace.tb_lineno).strip()
    ours = file.startswith(_PACKAGE) and line.startswith("raise ")
    return ours and len(str(error).split()) >= 3
