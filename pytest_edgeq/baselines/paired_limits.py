"""
Paired limits: margins derived from the same samples in the baseline and now.

Most of the variation between samples has nothing to do with a rebuild. Compared sample by sample it
cancels, and rounding differences average out. A loss that all samples share does not.

The statistic is log(Σb/Σa) of one sum a sample before (a) and now (b). Its standard error is that
of a paired bootstrap over the samples in the limit of infinitely many resamples (the infinitesimal
jackknife, Efron, Biometrika 68, 1981): √(n/(n−1) · Σ(bᵢ/Σb − aᵢ/Σa)²).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from pytest_edgeq.numerics.metric_table import LOWER_BOUNDED, METRICS, student

# How many samples must bear the error, by Kish's count (Σx)²/Σx²: one flipped code is one sample of
# however many, and shows no spread.
FEWEST_SAMPLES: Final = 5

# What a rebuild may lose at all samples alike, because its scales have moved, in dB. Measured by
# rebuilding with the calibration in another order: at most 1.04 dB under pt2e_static_int8.
FLOOR_DB: Final = 1.5

# In the stage lowering, where other scales flip other codes: 1.9 dB in SQNR, 3.6 in the mean error.
FLOOR_DB_LOWERING: Final = 5.0

# Where calibration is a moving average, which depends on the order of its samples: 3.5 dB.
FLOOR_DB_AVERAGED: Final = 4.0

# At the worst position of a language model: a bit. It is the least of many, often of few sequences,
# and with all codes rounded anew it moved by up to 4 dB.
FLOOR_DB_POSITION: Final = 20 * math.log10(2)

# On other kernels: a bit. Of a float input that is nowhere negative builtin's symmetric hybrid
# kernels use half of the codes (`SymmetricQuantizeFloats` in
# tensorflow/lite/kernels/internal/reference/portable_tensor_utils.cc), XNNPACK's all: 3.1 dB.
FLOOR_DB_KERNELS: Final = 20 * math.log10(2)

# SQNR above which an error is what float32 rounds, and may be anything up to here: its 24 bits are
# 144 dB, and sums of some hundred terms, whose order other machines change, leave 122 and more.
FLOAT_NOISE_DB: Final = 100.0

_Sums = Sequence[float]
_Row = Mapping[str, Any]


def floor_db(flow: str, stage: str, sqnr_db: float) -> float:
    """Return the loss in dB that a rebuild may have at all samples alike."""
    noise = sqnr_db - FLOAT_NOISE_DB if math.isfinite(sqnr_db) else 0.0
    if flow == "recipe":
        return max(FLOOR_DB_AVERAGED, noise)
    return max(FLOOR_DB_LOWERING if stage == "lowering" else FLOOR_DB, noise)


def at_least(row: _Row, floor: float) -> dict[str, Any]:
    """Widen the limits of a measured row to a margin; a value without a loss in dB is unchanged."""
    inner, outer = (min, max) if row["metric"] in LOWER_BOUNDED else (max, min)
    limits = _limits(row, floor, inner, outer)
    return {
        **row,
        **{key: limit if math.isfinite(limit) else str(limit) for key, limit in limits.items()},
    }


def _limits(
    row: _Row, margin: float, *combine: Callable[[float, float], float]
) -> dict[str, float]:
    """Combine the limits of a row with those of a margin; none for a value without a loss in dB."""
    if isinstance(row["value"], str):
        return {}
    found = {}
    for name, sign, choose in zip(("worst", "best"), (1, -1), combine, strict=True):
        limit = METRICS[row["metric"]].after_loss(row["value"], sign * margin)
        if limit is not None:
            found[name] = choose(limit, float(row[name]))
    return found


def narrowed(row: _Row, now: _Row, floor: float) -> _Row:
    """
    Narrow the limits of a stored row to the paired margin of its samples and those of now.

    A row without samples, or with too few, is unchanged. No limit becomes wider.
    """
    margin = margin_db(row["metric"], row.get("samples", ()), now.get("samples", ()), floor)
    if margin is None:
        return row
    inner, outer = (max, min) if row["metric"] in LOWER_BOUNDED else (min, max)
    return {**row, **_limits(row, margin, inner, outer)}


def on_other_kernels(row: _Row) -> _Row:
    """
    Widen the limits of a stored row for a result of other kernels.

    The stage lowering is the rounding of the kernels alone (sound ones differed by 11 dB), and a
    maximum depends on a single element: neither is limited. Another check compares kernels per op.
    """
    if row["stage"] != "lowering" and not METRICS[row["metric"]].is_maximum:
        return at_least(row, FLOOR_DB_KERNELS)
    worst, best = ("-inf", "inf") if row["metric"] in LOWER_BOUNDED else ("inf", "-inf")
    return {**row, "worst": worst, "best": best}


def margin_db(metric: str, before: _Sums, now: _Sums, floor: float) -> float | None:
    """
    Return how far a metric may move on these samples, in dB.

    None if there is no paired margin: too few or other samples, or no error at all.
    """
    n = len(before)
    if not METRICS[metric].by_sample or len(now) != n:
        return None
    bearing = min(_bearing(before), _bearing(now))
    if bearing < FEWEST_SAMPLES:
        return None
    all_before, all_now = math.fsum(before), math.fsum(now)
    squares = math.fsum(
        (b / all_now - a / all_before) ** 2 for a, b in zip(before, now, strict=True)
    )
    error = math.sqrt(squares * n / (n - 1)) * METRICS[metric].per_neper
    return max(floor, student(bearing - 1) * error)


def _bearing(sums: _Sums) -> float:
    """How many samples bear the error; 0 where there is none."""
    whole = math.fsum(sums)
    return 1 / math.fsum((each / whole) ** 2 for each in sums) if whole else 0.0
