"""Return the lines on baselines for the summary of a run; may be empty."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from pytest_edgeq.baselines.obsolete import RunLog, Survey
from pytest_edgeq.baselines.paths import Layout
from pytest_edgeq.numerics.findings import counted

Severity = Literal["error", "warning", "info"]


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of the summary; a severity colours it."""

    text: str
    severity: Severity | None = None


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome for the baselines that no test claimed."""

    survey: Survey  # what was found
    pruned: Sequence[Path] = ()  # obsolete baselines that were deleted
    # obsolete baselines that could not be deleted, with the reason
    kept: dict[Path, str] = dataclasses.field(default_factory=dict)
    obsolete_is_error: bool = False  # whether an obsolete baseline fails the run
    shows_not_judged: bool = False  # whether to list modules that were not searched

    @property
    def left(self) -> list[Path]:
        """Return the obsolete baselines that are still there."""
        return [path for path in self.survey.obsolete if path not in self.pruned]

    @property
    def fails(self) -> bool:
        """Whether the run must not pass."""
        return self.obsolete_is_error and bool(self.left)


def summarize(layout: Layout, log: RunLog, outcome: Outcome) -> list[Line]:
    """Make the lines of the section; no lines, no section."""
    lines: list[Line] = []
    for category, verb in (("new", "stored"), ("changed", "rewritten"), ("tighten", "tightened")):
        written = _paths(
            f"{claim['path']}: {claim['stored']}"
            for claim in log.claims()
            if claim["written"] and claim["category"] == category
        )
        if written:
            lines += _listing(f"{_baselines(written)} {_was(written)} {verb}:", "info", written)
    if outcome.pruned:
        pruned = [layout.shown(path) for path in outcome.pruned]
        lines += _listing(f"{_baselines(pruned)} {_was(pruned)} deleted:", "info", pruned)
    for category, text in (
        (
            "changed",
            "changed: see in the failures above what changed and why; if all of it is meant, "
            "--edgeq-update=changed",
        ),
        (
            "new",
            "no baseline yet: see above what would be stored, and store it with --edgeq-update=new",
        ),
    ):
        refused = (each for each in log.claims(of_failed=True) if not each["written"])
        if paths := _paths(each["path"] for each in refused if each["category"] == category):
            has = "1 check has" if len(paths) == 1 else f"{len(paths)} checks have"
            lines.append(Line(f"Error: {has} {text}", "error"))
    unwritten = _paths(claim["path"] for claim in log.claims() if claim["category"] == "unwritable")
    if unwritten:
        text = f"Error: {_baselines(unwritten)} could not be written: see in the failures above why"
        lines.append(Line(text, "error"))
    if left := [f"{layout.shown(path)}: {outcome.survey.obsolete[path]}" for path in outcome.left]:
        severity: Severity = "error" if outcome.obsolete_is_error else "info"
        head = f"{_baselines(left)} {_is(left)} obsolete; delete with --edgeq-update=prune:"
        lines += _listing(f"{severity.capitalize()}: {head}", severity, left)
    if outcome.shows_not_judged and outcome.survey.not_judged:
        named = [f"{module}: {why}" for module, why in outcome.survey.not_judged.items()]
        lines += _listing(
            "Warning: no obsolete baselines were looked for in "
            f"{counted(len(named), 'module')} that did not run completely:",
            "warning",
            named,
        )
    lines += [
        Line(f"Error: {layout.shown(path)} could not be deleted: {reason}", "error")
        for path, reason in outcome.kept.items()
    ]
    lines += [Line(f"Warning: {text}", "warning") for text in outcome.survey.unreadable.values()]
    older = [claim for claim in log.claims() if claim["since"]]
    if older:
        paths = _paths(claim["path"] for claim in older)
        bumps = dict.fromkeys(bump for claim in older for bump in claim["since"])
        text = (
            f"Info: {_baselines(paths)} {_is(paths)} of other versions or options: "
            f"{', '.join(bumps)}; --edgeq-update=changed writes these down"
        )
        lines.append(Line(text, "info"))
    claims = [
        *log.claims(of_failed=False),
        # What is better in a model that failed is nothing to accept.
        *(claim for claim in log.claims(of_failed=True) if claim["category"] != "tighten"),
    ]
    notes = _paths(note for claim in claims for note in (claim["note"], *claim["remarks"]) if note)
    lines += [Line(f"Info: {note}", "info") for note in notes]
    return lines


def _paths(paths: Iterable[str]) -> list[str]:
    return sorted(set(paths))


def _listing(head: str, severity: Severity, paths: Sequence[str]) -> list[Line]:
    return [Line(head, severity), *(Line(f"  {path}") for path in paths)]


def _baselines(paths: Sequence[str]) -> str:
    return counted(len(paths), "baseline")


def _is(paths: Sequence[str]) -> str:
    return "is" if len(paths) == 1 else "are"


def _was(paths: Sequence[str]) -> str:
    return "was" if len(paths) == 1 else "were"
