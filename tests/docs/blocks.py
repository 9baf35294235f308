"""
The fenced blocks of README and of the pages; the standard library alone, as the pipeline needs it.

What a block is for stands in its first line, or in an HTML comment directly above it:

- Python, TOML and INI blocks are files: the first line is `# name.py`, or `# name.py, continued`
  for lines that are appended to a file of an earlier block.
- A diff block changes such a file: `--- name.py`, then its lines with ` `, `-` and `+`.
- The lines of a console block that begin with `$ ` are run, in order, in the folder of the files.
  Below `<!-- fails -->` the last of them has to fail, all others have to pass.
- A text block is what the last command printed. Below `<!-- figures vary -->` its numbers are those
  of another machine.
- Anything below `<!-- not run: REASON -->` is not run; its syntax is checked.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
README = ROOT / "README.md"
PAGES = ROOT / "pytest_edgeq" / "docs"

FILES = ("python", "toml", "ini")
"""Languages of blocks that are files."""

_FENCE = re.compile(r"^(?:<!-- ([^\n]*) -->\n)?```(\S*)\n(.*?)^```$", re.M | re.S)
_FILE = re.compile(r"# ([\w./-]+\.\w+)(, continued)?")


class Block(NamedTuple):
    """A fenced block."""

    language: str  # what stands behind the fence
    text: str  # all lines between the fences
    note: str  # the HTML comment above, or nothing
    line: int  # where it stands, from 1

    @property
    def file(self) -> tuple[str, bool] | None:
        """The name of the file that it is, and whether it goes on; None where it is no file."""
        match = _FILE.fullmatch(self.text.partition("\n")[0])
        if self.language not in FILES or match is None:
            return None
        return match[1], match[2] is not None

    @property
    def commands(self) -> list[str]:
        """The commands that a reader types in the folder of the files."""
        return [line[2:] for line in self.text.splitlines() if line.startswith("$ ")]

    @property
    def why_not_run(self) -> str:
        """The reason; nothing where it is run."""
        return self.note.removeprefix("not run: ") if self.note.startswith("not run: ") else ""


def blocks(page: Path = README) -> list[Block]:
    """Every fenced block of a page, in order."""
    text = page.read_text("utf-8")
    return [
        Block(match[2], match[3], match[1] or "", text.count("\n", 0, match.start(2)) + 1)
        for match in _FENCE.finditer(text)
    ]


def commands() -> list[str]:
    """README's commands for a fresh machine, which the pipeline runs: those without a prompt."""
    return [
        line
        for block in blocks()
        if block.language == "console" and not block.commands
        for line in block.text.replace("\\\n", "").splitlines()
    ]
