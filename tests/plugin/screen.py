"""A pseudo terminal that pytest runs on, and the screen that a user would see."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pyte

from tests.waiting import SECONDS, readable, rounds, running

_LINE = re.compile(rb"\r\r\n\x1b\[2K([^\r]*)\r\x1b\[A(?:\x1b\[\d+C)?")
"""What writes the line of a step, or erases it, behind the first `\\r` the terminal's own."""


class Recording(NamedTuple):
    """
    A run of pytest on a terminal.

    Attributes:
        written: All bytes.
        seen: Lines of steps that were on the screen at some time.
        columns: Of the terminal.
        rows: Of the terminal.
    """

    written: bytes
    seen: list[str]
    columns: int
    rows: int

    @property
    def steps(self) -> list[str]:
        """Return the lines that were written for steps, in order."""
        return [text.decode() for text in _LINE.findall(self.written) if text]

    def screen(self) -> tuple[list[str], tuple[int, int]]:
        """Return the lines of the terminal in the end, also those above it, and the cursor."""
        return self._rendered(self.written)

    def screen_of_pytest_alone(self) -> tuple[list[str], tuple[int, int]]:
        """Return what the same run would look like without the lines of steps."""
        return self._rendered(_LINE.sub(b"", self.written))

    def _rendered(self, written: bytes) -> tuple[list[str], tuple[int, int]]:
        screen = pyte.HistoryScreen(self.columns, self.rows, history=1000)
        pyte.ByteStream(screen).feed(written)
        above = [
            "".join(line[column].data for column in range(self.columns))
            for line in screen.history.top
        ]
        lines = [line.rstrip() for line in [*above, *screen.display]]
        while not lines[-1]:
            lines.pop()
        return lines, (len(above) + screen.cursor.y, screen.cursor.x)


def record(
    folder: Path,
    *arguments: str,
    columns: int = 80,
    rows: int = 24,
    environment: Mapping[str, str] | None = None,
) -> Recording:
    """
    Run pytest on a terminal.

    A file `seen` in the folder tells tests that the screen shows a line of a step.
    """
    terminal, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    screen, written, seen = pyte.Screen(columns, rows), b"", dict[str, None]()
    stream = pyte.ByteStream(screen)
    with running(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=folder,
        env={**os.environ, "TERM": "xterm", **(environment or {})},
        stdin=inner,
        stdout=inner,
        stderr=inner,
        start_new_session=True,
    ) as process:
        os.close(inner)
        for _ in rounds(100):
            assert readable(terminal), f"nothing more is written behind {written[-500:]!r}"
            try:
                read = os.read(terminal, 1 << 16)
            except OSError:  # Linux's way to say that the other side is closed
                break
            if not read:
                break
            written += read
            stream.feed(read)
            lines = [line.rstrip() for line in screen.display if _STEP.match(line)]
            if lines:
                seen.update(dict.fromkeys(lines))
                (folder / "seen").touch()
        process.wait(SECONDS)
    os.close(terminal)
    return Recording(written, list(seen), columns, rows)


_STEP = re.compile(r"edgeq: .*, \d+ s, ")
