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


_REFUSED = {
    "changed": "changed: see in the failures above what changed and why; if all of it is meant, "
    "--edgeq-update=changed",
    "new": "not stored yet: see above what would be stored, and store it with --edgeq-update=new",
}


def summarize(layout: Layout, log: RunLog, outcome: Outcome) -> list[Line]:
    """Make the lines of the section; no lines, no section."""
    lines: list[Line] = []

    def add(severity: Severity, head: str, items: Iterable[str] = ()) -> None:
        lines.append(Line(head, severity))
        lines.extend(Line(f"  {each}") for each in items)

    for category, verb in (("new", "stored"), ("changed", "rewritten"), ("tighten", "tightened")):
        claims = (each for each in log.claims() if each["written"] and each["category"] == category)
        if written := _once(f"{each['path']}: {each['stored']}" for each in claims):
            add("info", f"{_baselines(written, 'was', 'were')} {verb}:", written)
    if pruned := [layout.shown(path) for path in outcome.pruned]:
        add("info", f"{_baselines(pruned, 'was', 'were')} deleted:", pruned)
    for category, text in _REFUSED.items():
        refused = (each for each in log.claims(of_failed=True) if not each["written"])
        if paths := _once(each["path"] for each in refused if each["category"] == category):
            verbs = ("has", "have") if category == "changed" else ("is", "are")
            add("error", f"Error: {_baselines(paths, *verbs)} {text}")
    if paths := _once(each["path"] for each in log.claims() if each["category"] == "unwritable"):
        count = counted(len(paths), "baseline")
        add("error", f"Error: {count} could not be written: see in the failures above why")
    if left := [f"{layout.shown(path)}: {outcome.survey.obsolete[path]}" for path in outcome.left]:
        severity: Severity = "error" if outcome.obsolete_is_error else "info"
        head = f"{_baselines(left)} obsolete; delete with --edgeq-update=prune:"
        add(severity, f"{severity.capitalize()}: {head}", left)
    if outcome.shows_not_judged and outcome.survey.not_judged:
        named = [f"{module}: {why}" for module, why in outcome.survey.not_judged.items()]
        modules = f"{counted(len(named), 'module')} that did not run completely"
        add("warning", f"Warning: no obsolete baselines were looked for in {modules}:", named)
    for path, reason in outcome.kept.items():
        add("error", f"Error: {layout.shown(path)} could not be deleted: {reason}")
    for text in outcome.survey.unreadable.values():
        add("warning", f"Warning: {text}")
    if older := [claim for claim in log.claims() if claim["since"]]:
        paths = _once(claim["path"] for claim in older)
        bumps = ", ".join(dict.fromkeys(bump for claim in older for bump in claim["since"]))
        text = f"of other versions or options: {bumps}; --edgeq-update=changed records these"
        add("info", f"Info: {_baselines(paths)} {text}")
    # Better values of a test that failed are not offered.
    failed = (each for each in log.claims(of_failed=True) if each["category"] != "tighten")
    shown = [*log.claims(of_failed=False), *failed]
    for note in _once(note for each in shown for note in (each["note"], *each["remarks"]) if note):
        add("info", f"Info: {note}")
    return lines


def _once(texts: Iterable[str]) -> list[str]:
    return sorted(set(texts))


def _baselines(paths: Sequence[str], one: str = "is", several: str = "are") -> str:
    return f"{counted(len(paths), 'baseline')} {one if len(paths) == 1 else several}"
