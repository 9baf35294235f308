"""Distributions of an output's values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.tflite.boundary import code_range

_BINS = 64
_GREATEST = np.finfo(np.float32).max
_SIDES = ("float", "float_tflite", "simulated", "edge")  # in the order of the pipeline


@dataclasses.dataclass(frozen=True)
class Points:
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


@dataclasses.dataclass(frozen=True)
class Distribution:
    """Counts of an output's values in the same bins on all sides."""

    edges: npt.NDArray[np.floating[Any]]  # of the bins, ascending; one more than there are bins
    counts: Mapping[str, npt.NDArray[np.int64]]  # by side
    # the values of qmin and qmax; empty for an output that is not quantized
    limits: tuple[float, ...]

    @property
    def highest(self) -> int:
        """The greatest count."""
        return max(int(counts.max()) for counts in self.counts.values())


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
