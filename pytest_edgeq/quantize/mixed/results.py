"""Results of the search for layers to leave in float."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from pytest_edgeq.numerics.findings import aligned, counted
from pytest_edgeq.numerics.metrics import json_number

if TYPE_CHECKING:
    from pytest_edgeq.compare.quantized import QuantizedModel
    from pytest_edgeq.numerics.comparison import Comparison

_SHOWN = 20  # rows of a table


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSensitivity:
    """
    What one layer costs.

    Attributes:
        module: Its path.
        ops: Its quantized ops.
        weights: How many of its weights are quantized.
        readers: The quantized ops of other modules that read its results: such a tensor is
            rounded until both are in float.
        in_float_db: SQNR of the model's worst output with this layer alone in float, in dB.
        quantized_db: The same with this layer alone quantized: its weights and its results, and
            operands that no other layer rounds.
        gain_db: `in_float_db` less the SQNR of the quantized model.
    """

    module: str
    ops: tuple[str, ...]
    weights: int
    readers: tuple[str, ...]
    in_float_db: float
    quantized_db: float
    gain_db: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain, JSON-able data."""
        return dict(_plain(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSensitivity:
    """
    What layers gain together.

    Attributes:
        name: `layer3.*` for those inside a module, `conv + pool` or `first + … + last` for those
            whose results have one scale.
        layers: Their paths.
        weights: How many of their weights are quantized.
        in_float_db: SQNR of the model's worst output with these layers alone in float, in dB.
        gain_db: `in_float_db` less the SQNR of the quantized model.
    """

    name: str
    layers: tuple[str, ...]
    weights: int
    in_float_db: float
    gain_db: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """
    Errors of a model with each layer toggled.

    Attributes:
        name: The model.
        sqnr_db: SQNR of the worst output of the quantized model, in dB.
        n_samples: How many samples were measured.
        rows: A row a layer, the layer that costs most first.
        groups: A row for layers that are also measured together, those that gain most first.
    """

    name: str
    sqnr_db: float
    n_samples: int
    rows: tuple[LayerSensitivity, ...]
    groups: tuple[GroupSensitivity, ...]

    def __str__(self) -> str:
        """Return tables of the layers that cost most, and of those that gain most together."""
        lines = [
            f"{self.name}: {self.sqnr_db:.4g} dB SQNR over {counted(self.n_samples, 'sample')}",
            "",
            *_table(
                ("layer", "alone quantized", *_GAIN, "read by"),
                [
                    (row.module, _decibels(row.quantized_db), *_gain(row), ", ".join(row.readers))
                    for row in self.rows
                ],
            ),
        ]
        if self.groups:
            together = [(row.name, *_gain(row)) for row in self.groups]
            lines += ["", *_table(("layers together", *_GAIN), together)]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return plain, JSON-able data."""
        return dict(_plain(self))


_GAIN = ("alone in float", "gain", "weights")


def _gain(row: LayerSensitivity | GroupSensitivity) -> tuple[str, str, str]:
    """Return the cells below `_GAIN`."""
    return _decibels(row.in_float_db), f"{row.gain_db:+.2f} dB", f"{row.weights:,}"


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    left = len(rows) - _SHOWN
    lines = aligned([heads, *rows[:_SHOWN]], numeric=range(1, 5))
    return [*lines, *([f"… and {left} more"] if left > 0 else [])]


@dataclass(frozen=True, slots=True)
class PlannedLayer:
    """
    A layer of a plan.

    Attributes:
        module: Its path.
        gain_db: SQNR that is lost if this layer is quantized after all, in dB: measured on the
            file without it if the search has converted that, or else in the simulation.
        weights: How many weights it has.
    """

    module: str
    gain_db: float
    weights: int


@dataclass(frozen=True, slots=True)
class SearchStep:
    """
    One choice of layers that the search measured, before any conversion.

    Attributes:
        layers: How many layers.
        size_bytes: Size of the file, estimated.
        sqnr_db: SQNR of the worst output.
    """

    layers: int
    size_bytes: int
    sqnr_db: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPrecisionPlan:
    """
    Layers to leave in float, or in 16 bits, and the file that results.

    Attributes:
        name: The model.
        goal: What the file must keep, as text.
        is_met: Whether the file keeps it on the samples.
        precision: `float`, or `int16x8`: int16 activations, which recipes have.
        layers: The layers, the one that gains most first.
        code: What makes the quantizer, to paste.
        quantized: The converted file.
        comparison: Its errors, measured.
        before: Those of the model as it was quantized.
        sensitivity: What each layer costs.
        steps: The choices that the search measured.
        limits: Layers that cannot be left in float, and why; whether the time was over; and what
            limits the file if the goal is not met.
        seconds: How long it took.
    """

    name: str
    goal: str
    is_met: bool
    precision: str
    layers: tuple[PlannedLayer, ...]
    code: str
    quantized: QuantizedModel
    comparison: Comparison
    before: Comparison
    sensitivity: Sensitivity
    steps: tuple[SearchStep, ...]
    limits: tuple[str, ...]
    seconds: float

    @property
    def share_of_weights(self) -> float:
        """The share of the quantized weights that the layers hold."""
        total = sum(row.weights for row in self.sensitivity.rows)
        return sum(layer.weights for layer in self.layers) / total if total else 0.0

    @property
    def ops_in_float(self) -> int:
        """How many ops of the file compute in float."""
        return sum(entry.scheme == "float" for entry in self.quantized.op_dtypes)

    @property
    def summary(self) -> str:
        """One sentence: what the plan reaches and costs."""
        precision = "in float" if self.precision == "float" else "with int16 activations"
        total, size = self.comparison.total, self.quantized.size_bytes
        before = self.before.quantized.size_bytes
        top1 = total.top1_agreement
        agreement = "" if top1 is None else f", top-1 agreement {top1:.3g}"
        return (
            f"{'meets' if self.is_met else 'does not meet'} {self.goal} with "
            f"{counted(len(self.layers), 'layer')} {precision}: {total.sqnr_db:.4g} dB SQNR"
            f"{agreement} (before {self.before.total.sqnr_db:.4g} dB), {size:,} bytes "
            f"({size / before:.3g} × {before:,}), {self.share_of_weights:.1%} of the weights"
        )

    def __str__(self) -> str:
        """Return layers, file and code."""
        table = aligned(
            [
                ("layer", "lost without it", "weights"),
                *(
                    (each.module, _decibels(each.gain_db), f"{each.weights:,}")
                    for each in self.layers
                ),
            ],
            numeric=(1, 2),
        )
        counts = self.quantized.op_dtypes.counts()
        n_qdq = counts.get("QUANTIZE", 0) + counts.get("DEQUANTIZE", 0)
        stages = (
            f"{stage} {errors.sqnr_db:.4g} dB" for stage, errors in self.comparison.stages.items()
        )
        lines = [
            f"{self.name}: {self.summary}",
            *(f"limit: {each}" for each in self.limits),
            f"file: {self.ops_in_float} ops in float, {n_qdq} QUANTIZE and DEQUANTIZE; "
            f"{', '.join(stages)}; {self.comparison.total.n_samples} samples, {self.seconds:.0f} s",
            "",
            *([*table, ""] if self.layers else ()),
            self.code,
        ]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return plain, JSON-able data."""
        return {
            "code": self.code,
            "goal": self.goal,
            "is_met": self.is_met,
            "layers": _plain(self.layers),
            "limits": _plain(self.limits),
            "name": self.name,
            "precision": self.precision,
            "sensitivity": _plain(self.sensitivity),
            "size_bytes": self.quantized.size_bytes,
            "sqnr_db": json_number(self.comparison.total.sqnr_db),
            "steps": _plain(self.steps),
            "summary": self.summary,
        }


def _plain(value: Any) -> Any:
    """Return a result as JSON can hold it."""
    if is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, float):
        return json_number(value)
    return list(map(_plain, value)) if isinstance(value, tuple) else value


def _decibels(value: float) -> str:
    if math.isnan(value):
        return ""
    return "exact" if value == math.inf else f"{value:.2f} dB"
