"""
Findings: one record for each defect, created where it is detected.

Order, merging and what is said are decided on these records; texts are rendered from them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any, Final, Literal, NamedTuple

# Kinds of findings: docs/reference/failures.md says what each one means.
NONFINITE = "nonfinite"
CONSTANT_OUTPUT = "constant_output"
ZERO_OUTPUT = "zero_output"
CLIPPED_OUTPUT = "clipped_output"
SATURATED_OUTPUT = "saturated_output"
CLIPPED_INPUT = "clipped_input"
COARSE_INPUT = "coarse_input"
BIAS_AT_INT32_LIMIT = "bias_at_int32_limit"
BAD_SCALE = "bad_scale"
UNCALIBRATED_ACTIVATION = "uncalibrated_activation"
CALIBRATION_OVERLAP = "calibration_overlap"
CALIBRATION_REPEATED = "calibration_repeated"
# Of a calibration by other inputs: it spoils all that comes behind, and explains it.
INPUT_KINDS = (CALIBRATION_REPEATED, CLIPPED_INPUT, COARSE_INPUT, UNCALIBRATED_ACTIVATION)
UNSAFE_OP = "unsafe_op"
PARTLY_ON_CPU: Final = "partly_on_cpu"
STATEFUL_REFERENCE = "stateful_reference"
OTHER_FILE: Final = "other_file"
MISFIT: Final = "misfit"
CANNOT_RUN: Final = "cannot_run"
RUNTIMES_DIFFER: Final = "runtimes_differ"
STATE_MISMATCH: Final = "state_mismatch"
PREFILL_DIFFERS: Final = "prefill_differs"
STATE_KEPT: Final = "state_kept"
CACHE_OVERRUN: Final = "cache_overrun"
MISSING_SIGNATURE: Final = "missing_signature"
OTHER_START_TOKEN: Final = "other_start_token"
LOST_INPUT: Final = "lost_input"
CLIPPED_ACTIVATION: Final = "clipped_activation"
LOST_OUTPUT: Final = "lost_output"
WRONG_OUTPUT: Final = "wrong_output"
WRONG_OP: Final = "wrong_op"
WRONG_RESULT: Final = "wrong_result"
WRONG_QPARAMS: Final = "wrong_qparams"
LOSSY_OP: Final = "lossy_op"
LOSSY_EVERYWHERE: Final = "lossy_everywhere"
ACCUMULATED_LOSS: Final = "accumulated_loss"
OP_IN_FLOAT: Final = "op_in_float"
NOT_LOCALIZED: Final = "not_localized"
OP_DTYPES_CHANGED: Final = "op_dtypes_changed"
ERRORS_REGRESSED: Final = "errors_regressed"
BUILD_CHANGED: Final = "build_changed"
NOT_COMPARED: Final = "not_compared"
OTHER_DATA: Final = "other_data"
NOT_STORED: Final = "not_stored"
OVER_BUDGET: Final = "over_budget"
UNEXPECTED_DTYPE: Final = "unexpected_dtype"
UNEXPECTED_COUNT: Final = "unexpected_count"
UNEXPECTED_QPARAMS: Final = "unexpected_qparams"
UNMATCHED: Final = "unmatched"
NO_BASELINE: Final = "no_baseline"


class Level(IntEnum):
    """The unit of a harm; each level is worse than those before."""

    UNKNOWN = 0  # nothing is lost, or it is not known how much
    SHARE = 1  # of the elements, 0 to 1
    DB = 2  # decibels lost
    USELESS = 3  # not finite, constant, or less than one bit is left
    CANNOT_RUN = 4  # nothing can be computed or compared


@dataclass(frozen=True, slots=True, order=True)
class Harm:
    """How much a finding matters; harms are ordered."""

    level: Level = Level.UNKNOWN
    amount: float = 0.0  # a share (0 to 1) or decibels; 0 of levels without one

    @staticmethod
    def share(count: float, elements: float) -> Harm:
        """Return the harm of `count` of `elements` wrong elements."""
        return Harm(Level.SHARE, count / elements if elements else 0.0)

    @staticmethod
    def decibels(lost: float) -> Harm:
        """Return the harm of a loss in dB; of a useless output if it is not finite."""
        return Harm(Level.DB, max(lost, 0.0)) if math.isfinite(lost) else USELESS

    @staticmethod
    def of_rms(lsb: float) -> Harm:
        """Return the harm of a root mean square error in LSB, relative to one ideal rounding's."""
        return Harm.decibels(20 * math.log10(max(lsb, _IDEAL) / _IDEAL))


_IDEAL = 1 / math.sqrt(12)  # root mean square error of one rounding, in LSB

NO_HARM: Final = Harm()
USELESS: Final = Harm(Level.USELESS)
BLOCKING: Final = Harm(Level.CANNOT_RUN)

PlaceKind = Literal["input", "output", "op", "tensor", "runtime", "samples", "file", "baseline"]


class Place(NamedTuple):
    """Where something is wrong."""

    kind: PlaceKind
    name: str  # of the input or output; the op's type; what to call anything else in a sentence
    op: int | None = None  # its index, where the place is one or belongs to one
    module: str | None = None  # path of its torch module, where known
    subgraph: int = 0

    def __str__(self) -> str:
        """Return its name in a sentence: `output 'scores'`, `CONV_2D #3 (layer1.0.conv)`."""
        if self.kind in ("input", "output"):
            return f"{self.kind} {self.name!r}"
        if self.kind != "op" or self.op is None:
            return self.name
        at = f" ({self.module})" if self.module else ""
        return f"{self.name} {self.number}{at}"

    @property
    def number(self) -> str:
        """The op's position: `#3`, in subgraphs behind the first one `#1:3`."""
        return f"#{self.subgraph}:{self.op}" if self.subgraph else f"#{self.op}"

    @staticmethod
    def of_op(called: str) -> Place:
        """Parse the name of an op in a baseline; the place has no `op` if it is none."""
        if (found := _OP.fullmatch(called)) is None:
            return Place("op", called)
        name, subgraph, op, module = found.groups()
        return Place("op", name, int(op), module, int(subgraph or 0))


_OP = re.compile(r"(.+) #(?:(\d+):)?(\d+)(?: \((.+)\))?")


FILE: Final = Place("file", "")
SAMPLES: Final = Place("samples", "inputs")


DiffKind = Literal["added", "removed", "changed", "heading", "plain"]


class DiffPart(NamedTuple):
    """A piece of a line of a diff: an old value, the new value in its place, or neither."""

    text: str
    kind: Literal["old", "new", "same"] = "same"


class DiffLine(NamedTuple):
    """A line of a diff."""

    parts: tuple[DiffPart, ...]
    kind: DiffKind = "plain"  # what it lists; `heading` of the line above a list

    def __str__(self) -> str:
        """Return the text."""
        return "".join(part.text for part in self.parts)

    def to_dict(self) -> dict[str, Any]:
        """Return plain, JSON-able data; `from_dict` reads it."""
        return {"kind": self.kind, "parts": [part._asdict() for part in self.parts]}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> DiffLine:
        """Return the line that `to_dict` serialized."""
        return DiffLine(tuple(DiffPart(**part) for part in data["parts"]), data["kind"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """
    One thing that is wrong.

    Attributes:
        kind: One of the constants of this module.
        place: Where.
        expected: What should be there.
        got: What is there.
        symptom: What is wrong in one clause, where "expected …, got …" does not say it.
        headline: The first line, where place and symptom do not make it.
        since: What changed since the baseline, `strict_export: True → False`; stands before the
            headline.
        harm: How much it matters.
        causes: What made it so, each looked up, a clause each.
        unchanged: What is the baseline's, of what it records of a build.
        suspects: What may have changed since, where nothing that is recorded did.
        explained_by: Findings that made it so.
        diff: What differs, line by line.
        evidence: Lines of details, such as a table.
        fix: What to change, or how to find out.
        command: What accepts the finding, or stores what is missing.
    """

    kind: str
    place: Place
    expected: str = ""
    got: str = ""
    symptom: str = ""
    headline: str = ""
    since: tuple[str, ...] = ()
    harm: Harm = NO_HARM
    causes: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()
    suspects: tuple[str, ...] = ()
    explained_by: tuple[Finding, ...] = ()
    diff: tuple[DiffLine, ...] = ()
    evidence: tuple[str, ...] = ()
    fix: str = ""
    command: str = ""

    @property
    def where(self) -> str:
        """The name of the place in a sentence."""
        return str(self.place)

    @property
    def summary(self) -> str:
        """The symptom in one clause."""
        return self.symptom or f"expected {self.expected}, got {self.got}"

    @property
    def message(self) -> str:
        """Symptom, causes and fix, without the place."""
        return "; ".join(filter(None, (self.summary, *self._all_causes, self._any_fix)))

    @property
    def sentence(self) -> str:
        """The place and the message."""
        return f"{self.place}: {self.message}" if self.where else self.message

    @property
    def title(self) -> str:
        """The first line: the change since the baseline, or place, expected and got."""
        headline = self.headline or ": ".join(filter(None, (self.where, self.summary)))
        left = len(self.since) - _SHOWN
        more = [f"{left} more changes"] if left > 1 else self.since[_SHOWN:]
        return "; ".join(filter(None, (", ".join([*self.since[:_SHOWN], *more]), headline)))

    @property
    def is_explained(self) -> bool:
        """Whether its cause is known."""
        return bool(self.since or self._all_causes or self.explained_by)

    @property
    def _all_causes(self) -> list[str]:
        """The causes, and the changes that remain possible."""
        if not self.unchanged:
            return list(self.causes)
        same = f"{', '.join(self.unchanged)} and versions are the baseline's"
        return [*self.causes, f"{same}: {self._any_suspect} changed"]

    @property
    def _any_fix(self) -> str:
        """The fix, else the advice to look for changes."""
        looked = f"look for what changed in {self._any_suspect}, and undo it"
        return self.fix or (looked if self.suspects else "")

    @property
    def _any_suspect(self) -> str:
        return " or ".join(filter(None, (", ".join(self.suspects[:-1]), *self.suspects[-1:])))

    @property
    def reasons(self) -> list[str]:
        """The lines of causes and fixes, each with its label."""
        found = [f"cause: {each}" for each in self._all_causes]
        found += [
            f"{'layer to blame' if each.kind in LAYER_KINDS else 'cause'}: {each.sentence}"
            for each in self.explained_by
        ]
        if len(self.since) > _SHOWN + 1:
            found.insert(0, f"changed since the baseline: {', '.join(self.since)}")
        return [*found, f"fix: {self._any_fix}"] if self._any_fix else found

    @property
    def acceptance(self) -> list[str]:
        """The lines on the baseline, and on how to accept the finding."""
        file = self.place.name if self.place.kind == "baseline" else ""
        labelled = [("file", file), ("update", self.command)]
        return [f"{label}: {text}" for label, text in labelled if text]

    @property
    def lines(self) -> list[str]:
        """The lines of a text: title, causes and fix, diff and evidence, acceptance."""
        behind = [line for each in self.explained_by for line in each.evidence]
        details = [*map(str, self.diff), *self.evidence, *behind]
        return [self.title, *self.reasons, *details, *self.acceptance]

    def to_dict(self) -> dict[str, Any]:
        """Return plain, JSON-able data with sorted keys; `from_dict` reads it."""
        data = {each.name: getattr(self, each.name) for each in fields(self)}
        data |= {"where": self.where, "message": self.message}
        data["place"] = dict(sorted(self.place._asdict().items()))
        data["harm"] = {"amount": self.harm.amount, "level": self.harm.level.name.lower()}
        data["explained_by"] = [each.to_dict() for each in self.explained_by]
        data["diff"] = [line.to_dict() for line in self.diff]
        data |= {name: list(data[name]) for name in _LISTS}
        return dict(sorted(data.items()))

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Finding:
        """Return the finding that `to_dict` serialized."""
        harm = data["harm"]
        known = {
            **{name: data[name] for name in _TEXTS},
            "place": Place(**data["place"]),
            "harm": Harm(Level[harm["level"].upper()], harm["amount"]),
            "explained_by": tuple(map(Finding.from_dict, data["explained_by"])),
            "diff": tuple(map(DiffLine.from_dict, data["diff"])),
            **{name: tuple(data[name]) for name in _LISTS},
        }
        return Finding(**known)

    def __str__(self) -> str:
        """Return one line."""
        return f"{self.kind}: {self.sentence}"


_TEXTS = ("kind", "expected", "got", "symptom", "headline", "fix", "command")
_LISTS = ("since", "causes", "unchanged", "suspects", "evidence")

_SHOWN = 2
"""How many changes since the baseline the first line names, if there are more than one more."""


def text_of(findings: Iterable[Finding]) -> str:
    """Return the text of findings, the first one first."""
    return "\n".join(line for each in findings for line in each.lines)


WRONG_KINDS: Final = (WRONG_OP, WRONG_RESULT, WRONG_QPARAMS)
"""An op computes something else than the reference."""

LOSS_KINDS: Final = (LOSSY_OP, LOSSY_EVERYWHERE, ACCUMULATED_LOSS)
"""Of layers that compute correctly, and lose by their quantization."""

UNEXPLAINED: Final = (ACCUMULATED_LOSS, OP_IN_FLOAT, NOT_LOCALIZED)
"""Of layers: none of these says why an error is as large as it is."""

LAYER_KINDS: Final = frozenset({*WRONG_KINDS, LOSSY_OP, LOSSY_EVERYWHERE, *UNEXPLAINED})
"""Of layers: `LayerErrors.finding` is one of these, or of an input."""

LOSSES: Final = frozenset(
    {
        NONFINITE,
        CONSTANT_OUTPUT,
        ZERO_OUTPUT,
        CLIPPED_OUTPUT,
        SATURATED_OUTPUT,
        LOST_OUTPUT,
        WRONG_OUTPUT,
        ERRORS_REGRESSED,
    }
)
"""What is lost at outputs."""

_EXPLAINED: Final[Mapping[str, frozenset[str]]] = {
    OTHER_FILE: LOSSES
    | LAYER_KINDS
    | {MISFIT, CANNOT_RUN, OP_DTYPES_CHANGED, BUILD_CHANGED, NOT_STORED},
    **dict.fromkeys(INPUT_KINDS, LOSSES | {*LOSS_KINDS}),
    **dict.fromkeys(WRONG_KINDS, LOSSES),
    CLIPPED_ACTIVATION: LOSSES | {LOSSY_OP, LOSSY_EVERYWHERE, ACCUMULATED_LOSS},
    OTHER_DATA: LOSSES | {*LOSS_KINDS, *INPUT_KINDS},
}
"""By kind, the kinds that it explains: what comes behind it in the model, or follows from it."""


def explains(one: Finding, other: Finding) -> bool:
    """Whether a finding explains another one of the same file: by its kind, or as it was found."""
    known = {(each.kind, each.place) for each in other.explained_by}
    return other.kind in _EXPLAINED.get(one.kind, ()) or (one.kind, one.place) in known


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """
    Return findings without duplicates, the greatest harm first; the sort is stable.

    A finding that explains others has their harm as well and precedes them: another file than the
    flow's, then samples that do not fit and runtimes that refuse the file, as these leave nothing
    to measure.
    """
    once = list(dict.fromkeys(findings))

    def weight(finding: Finding) -> tuple[Harm, int]:
        behind = [each.harm for each in once if explains(finding, each)]
        return max([finding.harm, *behind]), len(behind)

    # What is missing can be stored once all others are fixed.
    return sorted(once, key=lambda each: (each.kind != NO_BASELINE, weight(each)), reverse=True)


def input_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the findings on inputs, which explain errors downstream."""
    return tuple(each for each in findings if each.kind in INPUT_KINDS)


def aligned(
    rows: Sequence[Sequence[str]], numeric: Container[int] = (), indent: str = ""
) -> list[str]:
    """Return rows as lines: two blanks between columns, numeric columns right-aligned."""
    # Not by rich, which fits cells to the terminal: logs and golden texts have lines of any width.
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        indent
        + "  ".join(
            cell.rjust(width) if at in numeric else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def first_of(names: Sequence[str]) -> str:
    """Return the first of some names, and how many others there are."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 op`, `1,200 ops`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
