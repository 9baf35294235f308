"""The code blocks of README.md, as the tests and the pipeline run them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

README = Path(__file__).parent.parent / "README.md"


class Block(NamedTuple):
    """A fenced block: its language and its text."""

    language: str
    text: str


def blocks() -> list[Block]:
    """Every fenced block of the README, in order."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", README.read_text("utf-8"), re.M | re.S)
    return [Block(*fence) for fence in fences]


def commands() -> list[str]:
    """The commands that do everything on a fresh machine."""
    return [line for b in blocks() if b.language == "console" for line in b.text.splitlines()]


if __name__ == "__main__":
    sys.stdout.write("".join(f"{command}\n" for command in commands()))
