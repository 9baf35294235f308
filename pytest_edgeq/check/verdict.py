"""Collect the findings of `edgeq.check` on a model and format its failure."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field, replace

from pytest_edgeq.baselines.build import UNDO
from pytest_edgeq.localize.rows import LayerErrors
from pytest_edgeq.numerics.findings import (
    ACCUMULATED_LOSS,
    ERRORS_REGRESSED,
    INPUT_KINDS,
    LOSSES,
    NO_BASELINE,
    NO_HARM,
    NOT_STORED,
    OP_IN_FLOAT,
    Finding,
    explains,
    ordered,
)


@dataclass(slots=True, eq=False)
class Verdict:
    """Findings and notes on a model."""

    findings: list[Finding] = field(default_factory=list)  # in the order in which they were found
    notes: list[str] = field(default_factory=list)  # what could not be judged, and why
    layers: LayerErrors | None = None  # the errors of each op, to explain losses; None if unknown

    def add(self, *findings: Finding) -> None:
        """Add findings."""
        self.findings += findings

    def has(self, kind: str) -> bool:
        """Whether there is a finding of this kind."""
        return any(each.kind == kind for each in self.findings)

    def merged(self) -> list[Finding]:
        """
        Return the findings as they are reported: the most harmful first, each cause once.

        Changes since the baselines come first. A finding that another one explains refers to it. A
        loss without an explanation has the layer to blame as its cause. The command to accept a
        change is left out while anything else is wrong.
        """
        found = _with_changes_first(_with_one_missing(ordered(self.findings)))
        only_baselines = all(each.place.kind == "baseline" for each in found)
        reported: set[str] = set()
        merged = []
        for number, each in enumerate(self._with_layers(found)):
            causes = tuple(cause for cause in each.causes if cause not in reported)
            kept = replace(each, causes=causes, fix="" if each.fix in reported else each.fix)
            behind = [place for place, one in enumerate(found[:number], 1) if explains(one, each)]
            if behind:
                known = f"explained by [{behind[0]}]"
                kept = replace(kept, causes=(*causes, known), explained_by=(), fix="")
            blamed = tuple(one for one in kept.explained_by if one.sentence not in reported)
            kept = replace(kept, explained_by=blamed)
            for one in (each, *each.explained_by):
                reported |= {*one.causes, one.fix, one.sentence}
            if each.command and each.kind != NO_BASELINE and not only_baselines:
                kept = replace(kept, command="once the other findings are fixed")
            merged.append(kept)
        return merged

    def text(self, name: str, *, unwritten: bool) -> str:
        """Return the text of the failure: all findings and the notes."""
        found = self.merged()
        title, *rest = found[0].lines
        if len(found) > 1:
            title += f" [1 of {len(found)} findings on {name}]"
        lines = [title, *rest]
        for number, each in enumerate(found[1:], 2):
            text = "\n".join(each.lines)
            lines += ["", *textwrap.indent(f"[{number}] {text}", "    ").lstrip().splitlines()]
        if self.notes:
            lines += ["", *(f"note: {note}" for note in dict.fromkeys(self.notes))]
        if unwritten:
            lines += ["", "no baseline was stored: a model must be sound first"]
        return "\n".join(lines)

    def explain(self) -> Finding:
        """Return the layer to blame, with its line of code and the errors of each op."""
        assert self.layers is not None, "only a check that measured layers asks for it"
        found = self.layers.with_source(self.layers.finding)
        return replace(found, evidence=(*found.evidence, *self.layers.overview.splitlines()))

    def _with_layers(self, found: list[Finding]) -> list[Finding]:
        """Explain the first unexplained loss by the measured layers."""
        if self.layers is None or self.layers.finding.kind == OP_IN_FLOAT:
            return found
        blamed = self.layers.finding
        for place, each in enumerate(found):
            is_known = bool(each.explained_by) or any(explains(one, each) for one in found)
            is_known = is_known or (blamed.kind == ACCUMULATED_LOSS and bool(each.causes))
            # For errors that regressed, the baseline has reported what differs.
            is_loss = each.kind in LOSSES and each.kind != ERRORS_REGRESSED
            if is_loss and not is_known and blamed not in found:
                each = replace(each, explained_by=(self.explain(),))
                return [*found[:place], each, *found[place + 1 :]]
        return found


def _with_changes_first(found: list[Finding]) -> list[Finding]:
    """State the changes since the baselines once, before the first finding, with the fix."""
    since = tuple(dict.fromkeys(change for each in found for change in each.since))
    if not since:
        return _with_one_suspicion(found)
    # Baselines are stored for sound models only, so the changes caused these.
    spoiled = {*INPUT_KINDS, *LOSSES}
    found = [replace(each, fix=UNDO) if each.kind in spoiled else each for each in found]
    return [replace(each, since=() if place else since) for place, each in enumerate(found)]


def _with_one_suspicion(found: list[Finding]) -> list[Finding]:
    """Keep suspected changes in the first finding only, from the most informative baseline."""
    suspicious = [each for each in found if each.suspects]
    if len(suspicious) < 2:
        return found
    knowing = max(suspicious, key=lambda each: len(each.unchanged))
    once = replace(suspicious[0], unchanged=knowing.unchanged, suspects=knowing.suspects)
    others = [replace(each, unchanged=(), suspects=()) for each in found]
    return [
        once if each is suspicious[0] else other for each, other in zip(found, others, strict=True)
    ]


def _with_one_missing(found: list[Finding]) -> list[Finding]:
    """Merge the findings on missing baselines, since one command stores them all."""
    missing = [each for each in found if each.kind == NO_BASELINE]
    others = [each for each in found if each.kind != NO_BASELINE]
    if not missing:
        return found
    is_next = all(each.kind == NOT_STORED and each.harm == NO_HARM for each in others)
    names = [f"{each.symptom} ({each.got})" if is_next else each.symptom for each in missing]
    title = f"no baseline is stored yet: {', '.join(names)}"
    files = missing[0].place._replace(name=", ".join(each.place.name for each in missing))
    if is_next:
        return [*others, replace(missing[0], headline=title, place=files)]
    title += "; update it once the other findings are fixed"
    return [*others, replace(missing[0], headline=title, place=files, command="")]
