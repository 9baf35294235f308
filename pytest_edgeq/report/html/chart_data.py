"""
The figures that charts draw: noise by stage, errors by layer, plans, distributions of values.

dB do not add up; powers do, up to the part in which the errors of two stages agree or cancel. So a
stage's share is its noise power (mean squared error) over the sum of all stages'.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pytest_edgeq.report.model_rows import number_of
from pytest_edgeq.tflite.boundary import code_range

_STAGES = ("conversion", "quantization", "lowering")
"""In the order of the pipeline. A flow has at most two of them."""


class OutputNoise(NamedTuple):
    """The noise of one output by stage."""

    name: str  # the output's
    shares: Mapping[str, float]  # of each stage, 0 to 1; they sum to 1
    rmse: Mapping[str, float]  # of each stage
    decibels: Mapping[str, str]  # the SQNR of each stage and of `total`, as text
    # noise power from end to end over the sum of the stages'; below 1 their errors cancel in part,
    # above 1 they agree
    total_over_sum: float
    total_db: float  # the SQNR from end to end


def noise_by_output(stages: Mapping[str, Mapping[str, Any]]) -> list[OutputNoise]:
    """Return the noise of each output that has any, the worst first."""
    parts = [stage for stage in _STAGES if stage in stages]
    if len(parts) < 2:
        return []
    found = []
    for name, total in stages["total"]["outputs"].items():
        errors = {stage: stages[stage]["outputs"][name] for stage in parts}
        rmse = {stage: float(each["rmse"]) for stage, each in errors.items()}
        powers = {stage: value**2 for stage, value in rmse.items()}
        whole = sum(powers.values())
        if not (math.isfinite(whole) and whole > 0):
            continue
        found.append(
            OutputNoise(
                name=name,
                shares={stage: power / whole for stage, power in powers.items()},
                rmse=rmse,
                decibels={
                    stage: decibels(float(each["sqnr_db"]))
                    for stage, each in {**errors, "total": total}.items()
                },
                total_over_sum=float(total["rmse"]) ** 2 / whole,
                total_db=float(total["sqnr_db"]),
            )
        )
    return sorted(found, key=lambda output: output.total_db)


def stage_sentence(worst: OutputNoise) -> str:
    """Return the figures behind the bar of an output, for its caption."""
    figures = ", ".join(f"{stage} {text}" for stage, text in worst.decibels.items())
    percent = 100 * worst.total_over_sum
    if worst.total_over_sum < _CANCELS:
        how = f"The errors of the stages cancel in part: the total noise is {percent:.0f} % of"
    elif worst.total_over_sum > 1 / _CANCELS:
        how = f"The errors of the stages agree in part: the total noise is {percent:.0f} % of"
    else:
        how = f"The total noise is {percent:.0f} % of"
    return f"SQNR of {worst.name}: {figures}. {how} the sum over the stages."


_CANCELS = 0.9


def decibels(value: float | None) -> str:
    """Return an SQNR as text: `42.1 dB`, `∞ dB` for no error, `–` where there is none."""
    if value is None:
        return "–"
    if math.isnan(value):
        return "not a number"
    return f"{value:.1f} dB".replace("-", "−").replace("inf", "∞")


_MARGIN = 4.0  # dB between the finite errors and the marks of those that are not


class Columns(NamedTuple):
    """The data of a chart of SQNR; values that are not finite are at the edge of its axis."""

    columns: Mapping[str, Any]  # of the chart's source
    range: tuple[float, float]  # least and greatest value of the axis of dB


def layer_points(layers: Mapping[str, Any]) -> Columns | None:
    """
    Return the ops of a file in execution order; None where no op was measured.

    Unmatched ops have NaN for an error, and the markers of infinite errors are triangles.
    """
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
        "local_text": [_figures(row, "local") for row in rows],
        "cumulative_text": [_figures(row, "cumulative") for row in rows],
        "clipped": [
            "–" if (c := number_of(row["clipped"])) is None else f"{100 * c:.3g} %" for row in rows
        ],
        "local_marker": [_marker(value, "circle") for value in local],
        "cumulative_marker": [_marker(value, "square") for value in cumulative],
        "alpha": np.array([_EMPHASIS.get(row["verdict"], 0.0) for row in rows]),
    }
    return Columns(columns, (bounds[0] - _MARGIN, bounds[1] + _MARGIN))


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
    return decibels(value) if lsb is None else f"{decibels(value)}, {lsb:.3g} LSB"


_MOST_BARS = 20  # layers of the chart of sensitivities


def layer_bars(sensitivity: Mapping[str, Any]) -> Columns | None:
    """Return the layers with the lowest SQNR when quantized alone; None without such layers."""
    rows = sensitivity["rows"][:_MOST_BARS]
    if not rows:
        return None
    quantized = [float(row["quantized_db"]) for row in rows]
    gain = [float(row["gain_db"]) for row in rows]
    finite = [0.0, *filter(math.isfinite, (*quantized, *gain))]
    low, high = min(finite), max(finite)
    span = high - low or 1.0
    bounds = low, high + 0.05 * span
    columns = {
        "module": [row["module"] for row in rows],
        "ops": [", ".join(row["ops"]) for row in rows],
        "weights": [f"{row['weights']:,}" for row in rows],
        "readers": [", ".join(row["readers"]) or "–" for row in rows],
        "in_float": [decibels(float(row["in_float_db"])) for row in rows],
        "quantized": _placed(quantized, bounds),
        "gain": _placed(gain, bounds),
        "quantized_text": [decibels(value) for value in quantized],
        "gain_text": [_gain(value) for value in gain],
    }
    # The figures are written right of the bars.
    return Columns(columns, (low, high + 0.3 * span))


def _gain(value: float) -> str:
    # Two infinite SQNR have no difference.
    return "–" if math.isnan(value) else f"{value:+.2f} dB".replace("-", "−").replace("inf", "∞")


def plan_curve(plan: Mapping[str, Any]) -> Columns | None:
    """
    Return the choices of layers by file size, and last the plan; None if none was measured.

    `best` is the highest SQNR up to a size.
    """
    steps = sorted(plan["steps"], key=lambda step: step["size_bytes"])
    if not steps:
        return None
    values = [float(each["sqnr_db"]) for each in (*steps, plan)]
    finite = list(filter(math.isfinite, values)) or [0.0]
    low, high = min(finite) - _MARGIN, max(finite) + _MARGIN
    placed = _placed(values, (low + _MARGIN / 2, high - _MARGIN / 2))
    counts = [*(step["layers"] for step in steps), len(plan["layers"])]
    columns: dict[str, Any] = {
        "size": np.array([each["size_bytes"] / 1000 for each in (*steps, plan)]),
        "sqnr": placed,
        "best": np.maximum.accumulate(placed),
        "text": [decibels(value) for value in values],
        "layers": counts,
        "marker": [*(_marker(each, "circle") for each in values[:-1]), _marker(values[-1], "star")],
    }
    return Columns(columns, (low, high))


_BINS = 64
_GREATEST = np.finfo(np.float32).max
_SIDES = ("float", "float_tflite", "simulated", "edge")  # in the order of the pipeline


class Points(NamedTuple):
    """Values of the same elements of one output on all sides."""

    sides: Mapping[str, npt.NDArray[np.float64]]  # finite values by side
    dropped: int  # how many elements are not finite on some side

    def thinned(self, most: int) -> dict[str, npt.NDArray[np.float64]]:
        """Return at most so many elements of each side, chosen evenly."""
        size = len(next(iter(self.sides.values())))
        chosen = np.linspace(0, size - 1, min(size, most), dtype=np.intp)
        return {side: values[chosen] for side, values in self.sides.items()}


def points_of(recorded: Mapping[str, Sequence[float | str]]) -> Points | None:
    """Return the points of an output; None where no element is of float32 on all sides."""
    sides = {
        side: np.array(recorded[side], dtype=np.float64) for side in _SIDES if side in recorded
    }
    if not sides:
        return None
    finite = np.logical_and.reduce([np.abs(values) <= _GREATEST for values in sides.values()])
    if not finite.any():
        return None
    return Points({side: values[finite] for side, values in sides.items()}, int((~finite).sum()))


class Distribution(NamedTuple):
    """Counts of an output's values in the same bins on all sides."""

    edges: npt.NDArray[np.floating[Any]]  # of the bins, ascending; one more than there are bins
    counts: Mapping[str, npt.NDArray[np.int64]]  # by side
    # the values of qmin and qmax; empty for an output that is not quantized
    limits: tuple[float, ...]


def distribution(
    points: Points, limits: tuple[float, float] | None, scale: float | None
) -> Distribution:
    """
    Count values in bins.

    Bins are whole steps of the scale wide and centred on codes: others would hold one code more or
    less than their neighbours, and draw a comb that is not in the values.
    """
    low = min(float(values.min()) for values in points.sides.values())
    high = max(float(values.max()) for values in points.sides.values())
    if limits is not None and scale:
        zero = limits[0]
        first, last = round((low - zero) / scale), round((high - zero) / scale)
        width = max(1, math.ceil((last - first + 1) / _BINS))
        count = math.ceil((last - first + 1) / width)
        steps = first - 0.5 + float(width) * np.arange(count + 1)
        edges = zero + scale * steps
    else:
        edges = np.histogram_bin_edges(np.array([low, high]), _BINS)
    counts = {side: np.histogram(values, edges)[0] for side, values in points.sides.items()}
    return Distribution(edges, counts, limits or ())


def limits_of(entry: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the values of qmin and qmax of an input or output; None if it is not quantized."""
    if "int" not in entry["dtype"] or not entry["scale"]:
        return None
    low, high = code_range(entry["dtype"])
    scale, zero_point = entry["scale"], entry["zero_point"] or 0
    return (low - zero_point) * scale, (high - zero_point) * scale
