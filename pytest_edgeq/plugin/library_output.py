"""
Separate the libraries' log from a test's own output to stderr.

Nothing is redirected: the lines are recognized in the finished report, so that no output of the
test can be lost, and `-s` shows all of it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pytest_edgeq.numerics.findings import counted

# ai-edge-litert 2.3.0, litert-torch 0.10.0, torch 2.13, tensorflow 2.21. Errors are not included:
# they stay in the test's own output.
_LOGGED = re.compile(
    # absl, in the converter, TensorFlow and LiteRT; torch's Python writes in the same form
    r"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR"
    r"|[VDIW]\d{4} [\d:.]+ +\d+ (?:\S+\.(?:cc|cpp|h)|torch/\S+\.py):\d+\] "
    # LiteRT and its kernels
    r"|(?:VERBOSE|DEBUG|INFO|WARNING): \[\w+\.(?:cc|cpp|h):\d+\] "
    r"|(?:VERBOSE|INFO|WARNING): .*(?:TensorFlow Lite|LiteRT|XNNPACK)"
    # torch's native code
    r"|\[[VIW]\d{4} [\d:.]+ \S+\.(?:cc|cpp|h):\d+\] "
    # TensorFlow's log of older releases, and its second line about the CPU
    r"|\d{4}-\d\d-\d\d [\d:.]+: [IW] \S+\.cc:\d+\] "
    r"|To enable the following instructions: "
)

_CAPTURED = "Captured stderr "


def separated(sections: Sequence[tuple[str, str]], *, is_shown: bool) -> list[tuple[str, str]]:
    """Return the sections of a report, with the libraries' log in sections of its own."""
    found = []
    for title, content in sections:
        captured = title.startswith(_CAPTURED)
        rest, logged = split_output(content) if captured else (content, [])
        if rest or not logged:
            found.append((title, rest))
        if logged:
            # pytest selects sections by the words `stderr` and `teardown` in the title.
            header = f"edgeq: stderr of the libraries, {title.removeprefix(_CAPTURED)}"
            count = f"{counted(len(logged), 'line')}, shown by -v"
            found.append((header, "".join(logged) if is_shown else count))
    return found


def split_output(content: str) -> tuple[str, list[str]]:
    """Return captured output without the libraries' log, and the lines of the log."""
    lines = content.splitlines(keepends=True)
    rest = (line for line in lines if not _LOGGED.match(line))
    return "".join(rest), [line for line in lines if _LOGGED.match(line)]
