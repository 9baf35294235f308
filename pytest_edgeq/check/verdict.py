"""The findings of `edgeq.check` on a model, and the text of its failure."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from pytest_edgeq.localize.rows import SPREAD, LayerErrors
from pytest_edgeq.snapshots.errors import REGRESSED, is_explained
from pytest_edgeq.snapshots.session import is_change, is_missing, without_command

__all__ = ["Finding", "Rank", "Verdict"]


class Rank(IntEnum):
    """The order in which findings are told: those that explain others come first."""

    ORIGIN = 0
    """The file is not the one that the flow made."""
    FIT = 1
    """A sample does not fit the file or the reference."""
    INPUTS = 2
    """The range of an input does not fit its samples."""
    LAYERS = 3
    """An op is to blame."""
    RUNS = 4
    """A runtime cannot run the file."""
    RUNTIMES = 5
    """Runtimes differ."""
    DATA = 6
    """The evaluation samples were calibrated with."""
    HEALTH = 7
    """An output is wrong, whatever made it so."""
    MEMORY = 8
    """A baseline differs."""


@dataclass(frozen=True, slots=True)
class Finding:
    """
    Something that is wrong.

    Attributes:
        rank: Its place among the others.
        text: One or more lines; the first says what, where, expected and got.
    """

    rank: Rank
    text: str


@dataclass(slots=True, eq=False)
class Verdict:
    """
    Findings on a model, and what is said of them.

    Attributes:
        findings: In the order in which they were found.
        notes: What could not be judged, and why.
        layers: The errors of each op; None where they could not be measured.
    """

    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    layers: LayerErrors | None = None

    def add(self, rank: Rank, *texts: str) -> None:
        """Add findings of one rank."""
        self.findings += [Finding(rank, text) for text in texts]

    def tells(self, rank: Rank) -> bool:
        """Whether there is a finding of this rank."""
        return any(each.rank == rank for each in self.findings)

    def texts(self) -> list[str]:
        """Return the texts of the findings in the order of their ranks, each once."""
        ordered = sorted(self.findings, key=lambda each: each.rank)
        return list(dict.fromkeys(each.text for each in ordered))

    def text(self, name: str, *, unwritten: bool) -> str:
        """
        Return the text of the failure: all findings, the layer to blame, the notes.

        Args:
            name: Of the model.
            unwritten: Whether baselines were to be written, and were not because of the findings.
        """
        texts = self.texts()
        if not all(map(is_missing, texts)):
            # What is to be accepted must be sound first: its numbers are none to read now.
            texts = [_put_off(each) if is_missing(each) else each for each in texts]
        if any(each.rank != Rank.MEMORY for each in self.findings):
            texts = [_not_yet(each) for each in texts]
        first, *lines = texts[0].splitlines()
        if len(texts) > 1:
            first += f" [1 of {len(texts)} findings on {name}]"
        if cause := self._cause():
            cause = f"layer to blame: {cause}"
            place = self._explained(texts)
            texts[place] = _under_the_first_line(texts[place], cause)
            lines = [*([] if place else [cause]), *lines]
        told = [first, *lines]
        for number, text in enumerate(texts[1:], 2):
            told += ["", *textwrap.indent(f"[{number}] {text}", "    ").lstrip().splitlines()]
        if self.layers is not None and self._leaves_errors_unexplained():
            told += ["", self.layers.overview]
        if self.notes:
            told += ["", *(f"note: {note}" for note in dict.fromkeys(self.notes))]
        if unwritten:
            told += ["", "no baseline was stored: a model must be sound first"]
        return "\n".join(told)

    def _explained(self, texts: Sequence[str]) -> int:
        """Which text the layers explain: the first one, or that of errors where no layer does."""
        if self.layers is not None and self.layers.culprit is None:
            ranks = {each.text: each.rank for each in self.findings}
            for place, text in enumerate(texts):
                if text.startswith(REGRESSED) or ranks.get(text) == Rank.HEALTH:
                    return place
        return 0

    def _cause(self) -> str:
        """Return the localizer's cause for errors without a cause, or for a changed op."""
        if self.layers is None or self.tells(Rank.INPUTS):
            return ""
        if not (self._leaves_errors_unexplained() or self.layers.culprit):
            return ""
        unexplained = any(
            each.rank == Rank.HEALTH or (each.rank == Rank.MEMORY and is_change(each.text))
            for each in self.findings
        )
        return self.layers.cause if unexplained and not self.tells(Rank.LAYERS) else ""

    def _leaves_errors_unexplained(self) -> bool:
        """Whether findings tell of errors, and none of them tells what makes these."""
        if self.tells(Rank.LAYERS) or self.tells(Rank.INPUTS):
            return False
        explained = any(is_explained(each.text) for each in self.findings)
        if explained and self.layers is not None and self.layers.cause == SPREAD:
            return False
        regressed = any(each.text.startswith(REGRESSED) for each in self.findings)
        return regressed or self.tells(Rank.HEALTH)


def _under_the_first_line(text: str, sentence: str) -> str:
    first, *lines = text.splitlines()
    return "\n".join([first, sentence, *lines])


def _put_off(missing: str) -> str:
    return f"{missing.partition(chr(10))[0]}; update it once the other findings are fixed"


def _not_yet(text: str) -> str:
    """Leave out the command that accepts a change, as the other findings come first."""
    kept = without_command(text)
    return text if kept == text else f"{kept}\nupdate: once the other findings are fixed"
