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

# Kinds of findings.

# an output has NaN or infinite elements
NONFINITE = "nonfinite"
# an output has one value in all elements of all samples, and the reference does not
CONSTANT_OUTPUT = "constant_output"
# an output is zero in all elements of all samples
ZERO_OUTPUT = "zero_output"
# the reference lies outside of what the codes can say in many elements: the range is too small
CLIPPED_OUTPUT = "clipped_output"
# many codes are at an end of the range though the reference lies well inside of it
SATURATED_OUTPUT = "saturated_output"
# many elements of an input lie outside of what its codes can say: the range is too small
CLIPPED_INPUT = "clipped_input"
# an input uses few of its codes: the range that it was calibrated with is too wide
COARSE_INPUT = "coarse_input"
# a bias did not fit int32 and was cut off
BIAS_AT_INT32_LIMIT = "bias_at_int32_limit"
# a scale is zero, subnormal, negative or not finite
BAD_SCALE = "bad_scale"
# an activation has scale 1.0 and zero point 0, which its values do not fill, or which an activation
# that is computed from it has, too: the observers that set them saw nothing
UNCALIBRATED_ACTIVATION = "uncalibrated_activation"
# samples of the calibration are met again among those evaluated: the errors look too small
CALIBRATION_OVERLAP = "calibration_overlap"
# all samples of the calibration are one and the same: ranges hold no other
CALIBRATION_REPEATED = "calibration_repeated"
# of a calibration by other inputs: it spoils all that comes behind, and explains it
INPUT_KINDS = (CALIBRATION_REPEATED, CLIPPED_INPUT, COARSE_INPUT, UNCALIBRATED_ACTIVATION)
# the kernels abort at an op, or compute it from memory outside of its tensors
UNSAFE_OP = "unsafe_op"
# the reference's forward changes its own buffers: outputs depend on the order of the samples
STATEFUL_REFERENCE = "stateful_reference"
# the file is not the one that the flow made
OTHER_FILE: Final = "other_file"
# a sample does not fit the file or the reference: nothing could be compared
MISFIT: Final = "misfit"
# a runtime refuses the file, or the reference fails
CANNOT_RUN: Final = "cannot_run"
# results differ between runtimes, or between runs on one
RUNTIMES_DIFFER: Final = "runtimes_differ"
# an output that is handed on to an input has another scale or zero point than this
STATE_MISMATCH: Final = "state_mismatch"
# less than one bit is left of what one of several inputs changes in an output
LOST_INPUT: Final = "lost_input"
# values between the ops lie beyond the range of their codes, which makes most of the loss
CLIPPED_ACTIVATION: Final = "clipped_activation"
# less than one bit of an output is left
LOST_OUTPUT: Final = "lost_output"
# an output of a file that quantizes nothing differs from the reference by more than rounding
WRONG_OUTPUT: Final = "wrong_output"
# an op, or one of its constants, is not the reference's
WRONG_OP: Final = "wrong_op"
# an op's result differs from the reference's on the same inputs by more than kernels round
WRONG_RESULT: Final = "wrong_result"
# the scale or zero point of an op's output is not the reference's
WRONG_QPARAMS: Final = "wrong_qparams"
# an op computes correctly, and its quantization loses far more than that of others
LOSSY_OP: Final = "lossy_op"
# one cause ails most ops: no single op is to blame
LOSSY_EVERYWHERE: Final = "lossy_everywhere"
# no op stands out, and no cause is known
ACCUMULATED_LOSS: Final = "accumulated_loss"
# an op computes in float where others of its kind are quantized: nothing is lost in it
OP_IN_FLOAT: Final = "op_in_float"
# which op is to blame is not known, as the ops could not be measured
NOT_LOCALIZED: Final = "not_localized"
# the op-dtype map differs from the baseline
OP_DTYPES_CHANGED: Final = "op_dtypes_changed"
# an error is worse than the limit of its baseline
ERRORS_REGRESSED: Final = "errors_regressed"
# errors are within their limits, but the build differs from the baseline's, or a metric left
BUILD_CHANGED: Final = "build_changed"
# the baseline's errors were measured in another flow, or its data were hashed in another way
NOT_COMPARED: Final = "not_compared"
# the evaluation samples are not those of the baseline
OTHER_DATA: Final = "other_data"
# the limits of a baseline could not fail, so it is not stored
NOT_STORED: Final = "not_stored"
# an error, the size of the file or a loss of accuracy is beyond its limit; of accuracy also where
# the samples are too few to show that it is not
OVER_BUDGET: Final = "over_budget"
# an input, an output or an op has another dtype, scheme or granularity than the test expects
UNEXPECTED_DTYPE: Final = "unexpected_dtype"
# there are more or fewer ops of a kind than the test expects
UNEXPECTED_COUNT: Final = "unexpected_count"
# an operand has other scales or zero points than the test expects, or none
UNEXPECTED_QPARAMS: Final = "unexpected_qparams"
# the test names, or bounds, what the model does not have: nothing would be tested
UNMATCHED: Final = "unmatched"
# no baseline is stored yet
NO_BASELINE: Final = "no_baseline"


class Level(IntEnum):
    """The unit of a harm; each level is worse than those before."""

    UNKNOWN = 0
    """Nothing is lost, or it is not known how much."""
    SHARE = 1
    """A share of the elements, 0 to 1."""
    DB = 2
    """Decibels lost."""
    USELESS = 3
    """Values that are not finite, constant, or of which less than one bit is left."""
    CANNOT_RUN = 4
    """Nothing can be computed or compared."""


@dataclass(frozen=True, slots=True, order=True)
class Harm:
    """
    How much a finding matters; harms are ordered.

    Attributes:
        level: What the amount is measured in.
        amount: A share (0 to 1) or decibels; 0 of levels without one.
    """

    level: Level = Level.UNKNOWN
    amount: float = 0.0

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
    """
    Where something is wrong.

    Attributes:
        kind: What stands there.
        name: Of the input or output; the op's type; what to call anything else in a sentence.
        op: Index of the op, where the place is one or belongs to one.
        module: Path of its torch module, where known.
        subgraph: Index of the op's subgraph.
    """

    kind: PlaceKind
    name: str
    op: int | None = None
    module: str | None = None
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
    """
    A piece of a line of a diff.

    Attributes:
        text: What it says.
        kind: Whether it is an old value, the new value in its place, or neither.
    """

    text: str
    kind: Literal["old", "new", "same"] = "same"


class DiffLine(NamedTuple):
    """
    A line of a diff.

    Attributes:
        parts: Its text.
        kind: What the line lists; `heading` of the line above a list.
    """

    parts: tuple[DiffPart, ...]
    kind: DiffKind = "plain"

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


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 op`, `1,200 ops`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
