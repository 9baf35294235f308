"""Errors by layer, as columns of a chart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pytest_edgeq.report.html.stages import decibels
from pytest_edgeq.report.model_rows import number_of

_MARGIN = 4.0  # dB between the finite errors and the marks of those that are not


class LayerPoints(NamedTuple):
    """The ops of a file in execution order."""

    # of the chart's source. Unmatched ops have NaN for an error; an infinite error lies at the edge
    # of the chart, and its marker is a triangle
    columns: Mapping[str, Any]
    culprit: int | None  # index of the op to blame
    range: tuple[float, float]  # least and greatest value of the axis, in dB


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
    index = np.array([row["index"] for row in rows])
    columns = {
        "index": index,
        "left": index - 0.5,
        "right": index + 0.5,
        "op": [row["op"] for row in rows],
        "module": [row["module"] or "–" for row in rows],
        "verdict": [row["verdict"] for row in rows],
        "local": _placed(local, bounds),
        "cumulative": _placed(cumulative, bounds),
        "local_told": [_figures(row, "local") for row in rows],
        "cumulative_told": [_figures(row, "cumulative") for row in rows],
        "clipped": [
            "–" if (c := number_of(row["clipped"])) is None else f"{100 * c:.3g} %" for row in rows
        ],
        "local_marker": [_marker(value, "circle") for value in local],
        "cumulative_marker": [_marker(value, "square") for value in cumulative],
        "alpha": np.array([_EMPHASIS.get(row["verdict"], 0.0) for row in rows]),
    }
    return LayerPoints(columns, layers["culprit"], (bounds[0] - _MARGIN, bounds[1] + _MARGIN))


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


def _figures(row: Mapping[str, Any], kind: str) -> str:
    value, lsb = number_of(row[f"{kind}_sqnr_db"]), number_of(row[f"{kind}_lsb_error"])
    if value is None:
        return "not measured"
    text = "not a number" if math.isnan(value) else decibels(value)
    return text if lsb is None else f"{text}, {lsb:.3g} LSB"
