"""Results of `edgeq.localize`: one row per op, and the op to blame."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from pytest_edgeq.numerics.findings import (
    LOSSY_OP,
    NO_HARM,
    WRONG_KINDS,
    Finding,
    Harm,
    Place,
    aligned,
)
from pytest_edgeq.numerics.metrics import json_number
from pytest_edgeq.numerics.static_health import LEAST_SCALE, UNKNOWN, Calibration, Reason

SOUND = "sound"
"""The op computes the same as torch, up to rounding, and loses as much as others of its kind."""

LOWERING = "lowering"
"""The op is off by more than its kernel rounds, or its constants differ from the reference's."""

QUANTIZATION = "quantization"
"""The op is correct, but its parameters lose far more than those of others of its kind."""

UNMATCHED = "unmatched"
"""The float form has no counterpart of the op: nothing was measured."""

_SEVERITY = (LOWERING, QUANTIZATION, UNMATCHED, SOUND)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerError:
    """
    Errors of one op; an LSB is one step of its output scale.

    Attributes:
        index: The op's, in the order of the file.
        op: Its name, `CONV_2D`.
        module: The torch module's path; None if unknown.
        dtypes: By role: `input`, `weight`, `bias`, `output`; several of a role separated by commas.
        local_lsb_error: Greatest `|code of the reference, re-run on the op's own inputs − code of
            the file|`; None for an output without a scale or an op without a match. The reference
            has the file's own constants, which are compared separately.
        local_sqnr_db: Of the op's output to the float reference on the op's own inputs, in dB.
        local_rmse_lsb: √(mean squared difference of the same two), in LSB; 1/√12 = 0.289 is one
            ideal rounding.
        cumulative_lsb_error: Greatest difference from the float model run by itself, in LSB.
        cumulative_sqnr_db: Of the same two, in dB.
        cumulative_rmse_lsb: √(mean squared difference of the same two), in LSB.
        clipped: Share of the output's codes at qmin or qmax, 0 to 1; None without a scale.
        matched: Whether the op has a counterpart in the float form.
        excess_lsb: Distance of the reference's value, before rounding, from the code beyond what
            the kernel's own arithmetic explains, in LSB; above 0 it is not rounding. Of a float
            output: the difference over what float32's rounding explains, less 1. None if it was not
            measured, or if no bound is known.
        records: Findings on the op's constants and parameters.
        verdict: `sound`, `lowering`, `quantization` or `unmatched`.
        subgraph: Index of the subgraph.
    """

    index: int
    op: str
    module: str | None
    dtypes: Mapping[str, str]
    matched: bool
    local_lsb_error: float | None = None
    local_sqnr_db: float | None = None
    local_rmse_lsb: float | None = None
    cumulative_lsb_error: float | None = None
    cumulative_sqnr_db: float | None = None
    cumulative_rmse_lsb: float | None = None
    clipped: float | None = None
    excess_lsb: float | None = None
    records: tuple[Finding, ...] = ()
    verdict: str = SOUND
    subgraph: int = 0

    @property
    def findings(self) -> tuple[str, ...]:
        """The findings on the op's constants and parameters, one sentence each."""
        return tuple(each.message for each in self.records)

    @property
    def place(self) -> Place:
        """The op as a place."""
        return Place("op", self.op, self.index, self.module, self.subgraph)

    @property
    def name(self) -> str:
        """The name of the op in texts: `CONV_2D #3 (layer1.0.conv)`."""
        return str(self.place)

    def to_dict(self) -> dict[str, Any]:
        """Return plain, JSON-able data with sorted keys."""
        data = {each.name: getattr(self, each.name) for each in fields(self)}
        data["findings"] = data.pop("records") and self.findings
        return {key: _plain(data[key]) for key in sorted(data)}


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return json_number(value)
    if isinstance(value, Mapping):
        return {key: value[key] for key in sorted(value)}
    return list(value) if isinstance(value, tuple) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnostics:
    """Diagnostics of one op's error; fields are empty if unknown."""

    scale: float | None = None  # of the output, None if it is not quantized
    zero_point: int | None = None
    code_range: tuple[int, int] | None = None  # qmin and qmax of the output's dtype
    elements: int = 0  # how many output values were measured
    averaged: int = 0  # how many samples were measured, if ranges may be averages over samples
    codes: tuple[int, int] | None = None  # the least and the greatest code in use
    beyond: tuple[float, float] = (0.0, 0.0)
    reference: tuple[float, float] | None = None
    channel_noise: Sequence[float] = ()
    weight_maxima: Sequence[float] = ()  # the largest |w| of each output channel of the reference
    weight_granularity: str | None = None  # `per_tensor`, `per_channel`, … as the file stores it
    bias_limited: tuple[int, ...] = ()  # channels whose bias is at the INT32 limit
    nonfinite: int = 0  # how many output values are NaN or infinite, although torch's are not
    nonfinite_by_rounding: bool = False  # whether the float op returns the same on the op's inputs
    range_widened: Reason | None = None  # why the output has a wider range than its values
    range_narrowed: Reason | None = None  # why the values exceed a range that is another op's
    harm: Harm = NO_HARM  # the op's loss beyond that of its inputs and of one rounding
    unused: bool = False
    scheme: str | None = None  # as `OpDtypes.scheme`
    calibration: Calibration = UNKNOWN

    @property
    def why_too_wide(self) -> Reason:
        """Why the output's range is mostly unused, and the fix."""
        if self.range_widened is not None and self.scale != LEAST_SCALE:
            return self.range_widened
        return self.calibration.too_wide(self.scale)

    @property
    def reach(self) -> tuple[float, float] | None:
        """The least and the greatest value that the output's codes can represent."""
        return self._values(self.code_range)

    @property
    def observed(self) -> tuple[float, float] | None:
        """The least and the greatest value of the codes in use."""
        return self._values(self.codes)

    def _values(self, codes: tuple[int, int] | None) -> tuple[float, float] | None:
        if self.scale is None or self.zero_point is None or codes is None:
            return None
        low, high = ((code - self.zero_point) * self.scale for code in codes)
        return low, high


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerErrors:
    """
    The errors of every op of a file.

    Attributes:
        rows: One per op, in execution order.
        culprit: The row to blame; None if none stands out.
        refused: By index, why an op was not measured: kernels run it in the file, but refuse it in
            the copy that is written to compare it.
        reference: Name of the reference in texts.
        differing: Index of the op that differs from the reference even in float.
        finding: Why: of the culprit, of an input, or of all layers.
        others: Defects of other kinds or in other kinds of ops, the most harmful first.
        starved: Ops whose input range is almost nothing; a range of the values would fit the bias.
        source_of: Finds the line of the model's code that calls an op, if there is one.
    """

    rows: tuple[LayerError, ...]
    culprit: LayerError | None
    finding: Finding
    others: tuple[Finding, ...] = ()
    refused: Mapping[int, str] = field(default_factory=dict)
    reference: str = "torch"
    differing: int | None = None
    starved: frozenset[int] = frozenset()
    source_of: Callable[[Place], str] | None = field(default=None, compare=False, repr=False)

    def with_source(self, finding: Finding) -> Finding:
        """Add the line of the model's code to a finding that blames one op."""
        if self.source_of is None or finding.kind not in (*WRONG_KINDS, LOSSY_OP):
            return finding
        line = self.source_of(finding.place)
        return (
            replace(finding, evidence=(f"source: {line}", *finding.evidence)) if line else finding
        )

    @property
    def wrong(self) -> tuple[Finding, ...]:
        """The findings on ops that compute something else than torch."""
        return (self.finding, *self.others) if self.finding.kind in WRONG_KINDS else ()

    @property
    def cause(self) -> str:
        """A sentence that says why."""
        return self.finding.sentence

    @property
    def coverage(self) -> float:
        """Share of ops that were matched, 0 to 1."""
        return _share(self.rows)

    @property
    def weight_coverage(self) -> float:
        """The same of the ops with weights."""
        return _share([row for row in self.rows if "weight" in row.dtypes])

    @property
    def of_another_model(self) -> str:
        """A sentence if the reference has none of the layers' weights; else empty."""
        weighted = [row for row in self.rows if "weight" in row.dtypes]
        if len(weighted) < _OTHER_MODEL or not all(row.records for row in weighted):
            return ""
        return (
            f"all {len(weighted)} layers with weights differ from the reference's: it is another "
            "model or checkpoint than the file was made from"
        )

    def worst(self, n: int = 5) -> tuple[LayerError, ...]:
        """
        Return the worst rows: the culprit, then by verdict, then by error.

        Args:
            n: Maximum number of rows.
        """
        return tuple(sorted(self.rows, key=self._badness)[:n])

    def _badness(self, row: LayerError) -> tuple[Any, ...]:
        excess = row.excess_lsb if row.excess_lsb is not None else 0.0
        sqnr = row.local_sqnr_db
        return (
            self.culprit is None or row.index != self.culprit.index,
            _SEVERITY.index(row.verdict),
            not row.records,
            # NaN is beyond every bound.
            -max(excess, 0.0) if excess == excess else float("-inf"),
            float("inf") if sqnr is None else sqnr if sqnr == sqnr else float("-inf"),
            row.index,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain, JSON-able data with sorted keys; the culprit is an index."""
        return {
            "cause": self.cause,
            "coverage": self.coverage,
            "culprit": None if self.culprit is None else self.culprit.index,
            "finding": self.finding.to_dict(),
            "rows": [row.to_dict() for row in self.rows],
        }

    def table(self, n: int = 5) -> str:
        """
        Format the worst rows as a table.

        Args:
            n: Maximum number of rows.
        """
        lines = [_HEADINGS, *map(_cells, self.worst(n))]
        return "\n".join(aligned(lines, numeric=range(3, len(_HEADINGS))))

    @property
    def overview(self) -> str:
        """Number of matched ops, names of the others, and the worst rows."""
        matched = sum(row.matched for row in self.rows)
        text = f"{matched} of {len(self.rows)} ops matched with {self.reference}"
        missing = [row.name for row in self.rows if not row.matched]
        if missing:
            listed = ", ".join(missing[:5]) + (", …" if len(missing) > 5 else "")
            text += f" (not: {listed})"
        return f"{text}; the worst:\n{self.table()}"

    def __str__(self) -> str:
        """Return the sentence and the overview."""
        return "\n".join([self.cause, *self.finding.evidence, self.overview])


_OTHER_MODEL = 3
"""Minimum number of differing weighted layers to suspect another reference model."""

_HEADINGS = ("op", "module", "verdict", "LSB", "excess", "rmse/S", "SQNR dB", "total dB", "clipped")


def _share(rows: Sequence[LayerError]) -> float:
    return sum(row.matched for row in rows) / len(rows) if rows else 1.0


# Larger errors are shown without decimals: that of a mask of −inf has forty digits.
_LONG = 1e6


def _cells(row: LayerError) -> tuple[str, ...]:
    return (
        f"{row.op} {row.place.number}",
        row.module or "–",
        row.verdict,
        _number(row.local_lsb_error, "g"),
        _number(row.excess_lsb, ".2f") if (row.excess_lsb or 0) > 0 else "–",
        _number(row.local_rmse_lsb, ".3f" if (row.local_rmse_lsb or 0) < _LONG else ".3g"),
        _number(row.local_sqnr_db, ".1f"),
        _number(row.cumulative_sqnr_db, ".1f"),
        "–" if row.clipped is None else f"{100 * row.clipped:.3g} %",
    )


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form).replace("-", "−")
