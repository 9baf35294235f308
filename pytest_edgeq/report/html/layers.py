"""Errors by layer, as columns of a chart."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.report.html.stages import decibels
from pytest_edgeq.report.model_rows import number_of

_MARGIN = 4.0
"""dB between the finite errors and the marks of those that are not."""


@dataclasses.dataclass(frozen=True)
class LayerPoints:
    """
    The ops of a file in execution order, a column each; unmatched ops have NaN for an error.

    Attributes:
        index: Of the op.
        ops: Names of the ops.
        modules: Paths of the torch modules; `–` where not known.
        verdicts: Of localizing.
        local: SQNR in dB of the op by itself; an infinite one lies at the edge of the chart.
        cumulative: SQNR in dB up to the op.
        local_told: The same as text, with the error in LSB.
        cumulative_told: The same as text, with the error in LSB.
        local_markers: Marker of each point: a triangle where it is infinite.
        cumulative_markers: The same of the cumulative error.
        clipped: Share of the codes at qmin or qmax, as text.
        emphasis: Opacity of the op's strip: above 0 for an op that is not sound.
        culprit: Index of the op to blame.
        range: Least and greatest value of the axis, in dB.
    """

    index: npt.NDArray[np.int64]
    ops: Sequence[str]
    modules: Sequence[str]
    verdicts: Sequence[str]
    local: npt.NDArray[np.float64]
    cumulative: npt.NDArray[np.float64]
    local_told: Sequence[str]
    cumulative_told: Sequence[str]
    local_markers: Sequence[str]
    cumulative_markers: Sequence[str]
    clipped: Sequence[str]
    emphasis: npt.NDArray[np.float64]
    culprit: int | None
    range: tuple[float, float]


def layer_points(layers: Mapping[str, Any]) -> LayerPoints | None:
    """Return the columns of a chart; None where no op was measured."""
    rows = layers["rows"]
    local = [number_of(row["local_sqnr_db"]) for row in rows]
    cumulative = [number_of(row["cumulative_sqnr_db"]) for row in rows]
    measured = [value for value in (*local, *cumulative) if value is not None]
    if not measured:
        return None
    finite = [value for value in measured if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    bounds = low - _MARGIN, high + _MARGIN
    return LayerPoints(
        index=np.array([row["index"] for row in rows]),
        ops=[row["op"] for row in rows],
        modules=[row["module"] or "–" for row in rows],
        verdicts=[row["verdict"] for row in rows],
        local=_placed(local, bounds),
        cumulative=_placed(cumulative, bounds),
        local_told=[_told(row, "local") for row in rows],
        cumulative_told=[_told(row, "cumulative") for row in rows],
        local_markers=[_marker(value, "circle") for value in local],
        cumulative_markers=[_marker(value, "square") for value in cumulative],
        clipped=[_percent(number_of(row["clipped"])) for row in rows],
        emphasis=np.array([_EMPHASIS.get(row["verdict"], 0.0) for row in rows]),
        culprit=layers["culprit"],
        range=(bounds[0] - _MARGIN, bounds[1] + _MARGIN),
    )


_EMPHASIS = {"lowering": 0.22, "quantization": 0.12}


def _placed(values: Sequence[float | None], bounds: tuple[float, float]) -> npt.NDArray[np.float64]:
    low, high = bounds
    # NaN is as bad as no signal at all, and must not vanish as an unmatched op does.
    placed = [
        math.nan if value is None else low if math.isnan(value) else min(max(value, low), high)
        for value in values
    ]
    return np.array(placed)


def _marker(value: float | None, finite: str) -> str:
    if value is None or math.isfinite(value):
        return finite
    return "triangle" if value == math.inf else "inverted_triangle"


def _told(row: Mapping[str, Any], kind: str) -> str:
    value, lsb = number_of(row[f"{kind}_sqnr_db"]), number_of(row[f"{kind}_lsb_error"])
    if value is None:
        return "not measured"
    text = "not a number" if math.isnan(value) else decibels(value)
    return text if lsb is None else f"{text}, {lsb:.3g} LSB"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.3g} %"
