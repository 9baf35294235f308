"""A reader who does what a page says: writes its files, runs its commands, compares the output."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests import projects
from tests.docs.blocks import FILES, Block
from tests.shared_cache import shared_cache
from tests.waiting import output_of, running

# Plugins of our own tests, which a reader does not have, take half of the time of pytest's start.
# What comes with the converter's own dependencies warns when pytest loads it; and pytest's own
# plugin collects garbage five times in the end, 2 s among the objects of torch and jax.
_WITHOUT = (
    *("datadir", "hypothesispytest", "jaxtyping", "randomly", "regressions", "syrupy"),
    *("anyio", "unraisableexception"),
)

_NUMBER = re.compile(r"[-−]?(?<![\w.#])\d+(\.\d+)?(e[-+]?\d+)?s?(?!\w|\.\w)|\binf\b")
_CLOCK = re.compile(r"(?<=\ds) \(\d+:\d\d:\d\d\)")
"""pytest adds it to durations of a minute and more: `83.23s (0:01:23)`."""
_RULE = re.compile(r"([_=\-─])\1+")


def environment(*folders: str) -> dict[str, str]:
    """Return the variables of a reader's shell: no CI, nothing of the pytest around it."""
    options = [f"-p no:{plugin}" for plugin in _WITHOUT]
    if directory := shared_cache():
        options.append(f"--edgeq-cache-dir={directory}")
    return {
        **projects.environment(),
        "PATH": os.pathsep.join([*folders, str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTEST_ADDOPTS": " ".join(options),
        "COLUMNS": "100",
        # A reader commits, and has told git the name.
        **{f"GIT_{who}_{what}": "reader" for who in ("AUTHOR", "COMMITTER") for what in _GIT},
    }


_GIT = ("NAME", "EMAIL")


class Session:
    """A folder in which the blocks of a page are done, one after another."""

    def __init__(self, folder: Path, variables: Mapping[str, str]) -> None:
        self._folder = folder
        self._variables = variables
        self._output: str | None = None

    def do(self, block: Block) -> None:
        """Write the file, change it, run the commands, or compare the text with the output."""
        where = f"line {block.line}"
        if block.why_not_run or block.language.startswith("{"):
            return
        if block.language in FILES:
            self._write(block, where)
        elif block.language == "diff":
            self._change(block, where)
        elif block.language == "console":
            self._run(block, where)
        else:
            assert block.language == "text", f"{where}: blocks of {block.language!r} are not run"
            assert self._output is not None, f"{where}: no command has printed it"
            compare(block.text, self._output, where, loosely=block.note == "figures vary")

    def _write(self, block: Block, where: str) -> None:
        assert block.file is not None, f"{where}: the first line says no file name"
        name, goes_on = block.file
        path = self._folder / name
        assert path.exists() or not goes_on, f"{where}: there is no {name} yet to go on with"
        before = f"{path.read_text('utf-8')}\n\n" if goes_on else ""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(before + block.text, encoding="utf-8")

    def _change(self, block: Block, where: str) -> None:
        first, *lines = block.text.splitlines()
        path = self._folder / first.removeprefix("--- ")
        old = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "+")
        new = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "-")
        text = path.read_text("utf-8")
        count = text.count(old)
        assert count == 1, f"{where}: {count} places of {path.name} have the lines to change"
        path.write_text(text.replace(old, new), encoding="utf-8")

    def _run(self, block: Block, where: str) -> None:
        assert block.commands, f"{where}: no line begins with '$ '"
        for number, command in enumerate(block.commands, 1):
            with running(
                ["bash", "-c", command],
                cwd=self._folder,
                env=self._variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                encoding="utf-8",
            ) as process:
                self._output = output_of(process, 600)
            fails = block.note == "fails" and number == len(block.commands)
            assert (process.returncode != 0) == fails, (
                f"{where}: {command}: expected {'a failure' if fails else 'exit status 0'}, got "
                f"{process.returncode}\n{self._output}"
            )


def compare(shown: str, printed: str, where: str, *, loosely: bool) -> None:
    """
    Assert that each line shown was printed, in this order.

    Decimal fractions and the widths of columns differ from machine to machine and are not compared;
    `loosely`, no numbers that stand alone. `…` stands for what is left out.
    """
    left = iter([_plain(line, loosely) for line in printed.splitlines()])
    for line in shown.splitlines():
        if line.strip() in ("", "…"):
            continue
        parts = _plain(line, loosely).split("…")
        pattern = re.compile(".*".join(map(re.escape, parts)))
        found = any(pattern.fullmatch(each) for each in left)
        assert found, f"{where}: not printed, or not in this place: {line}\n{printed}"


def _plain(line: str, loosely: bool) -> str:
    def number(match: re.Match[str]) -> str:
        return "0" if loosely or "." in match[0] or "e" in match[0] else match[0]

    line = _CLOCK.sub("", line)
    return " ".join(_NUMBER.sub(number, _RULE.sub(r"\1", line)).split())
