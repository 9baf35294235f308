"""
Margins of the errors of a rebuilt model, derived from one measurement.

The same samples are measured then and now, so what is left to explain is the rounding: another
order of calibration or another kernel moves a scale by a hair, and every code is rounded anew. Each
sample's error is then drawn again, for the remembered build and for the new one.

- Sums over samples (SQNR, RMSE, mean, cosine, top-1): samples are drawn with replacement, reference
  and result together (a paired bootstrap), and the standard error of the metric's logarithm is
  taken. The difference of two builds has √2 times that error. Samples also differ for reasons that
  no rebuild changes, so this is too wide rather than too narrow.
- A handful of codes that flip by one step are counts, which a bootstrap cannot tell from none: the
  variance of √count is 1/4 (Anscombe 1948), so k flips may become (√(k + 3/8) + z/√2)².
- Greatest errors: resampling never exceeds the greatest that was seen. The maximum of Gumbel
  variables is Gumbel with the same spread, and the difference of two is logistic; so the
  spread of the samples' own maxima gives that of the greatest. Few samples may show too little of
  it, so it is widened as Student's t widens a normal quantile: by 1.31 for 16 samples. One LSB is
  added for the codes.
- float32 rounds at 2⁻²⁴, and errors below 2⁻¹⁷ of the output's RMS, some hundred such roundings,
  are not distinguished.

One sample has no spread: only counts, the LSB and float rounding are left.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Final

import numpy as np

from .confidence import LEVEL, student
from .metric_table import LOWER_BOUNDED, UPPER_BOUNDED
from .metrics import Array, json_number
from .results import OutputErrors, StageErrors

CHOICE_METRICS: Final = ("top1_agreement",)
"""Metrics that say something of an output that holds a choice."""

RESAMPLES: Final = 1000
SEED: Final = 0
_Z: Final = NormalDist().inv_cdf(LEVEL)
_LOGISTIC: Final = math.log(LEVEL / (1 - LEVEL)) * math.sqrt(6) / math.pi
_COUNT: Final = 3 / 8
_FLOAT_SHARE: Final = 2.0**-17
_DRAWN_AT_ONCE: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Limit:
    """One metric with the margin that a rebuild explains."""

    value: float  # what was measured
    worst: float  # what is still explained on the bad side
    best: float  # the same on the good side


def limits(
    errors: OutputErrors, times: int = 1, metrics: Collection[str] | None = None
) -> dict[str, Limit]:
    """
    Return every metric that this output has, with its margin.

    Raises:
        ValueError: The output is not finite, or nothing was tested.
    """
    if errors.nonfinite or errors.degenerate or not errors.samples:
        raise ValueError(f"output {errors.name!r} has no errors that a margin could be derived for")
    draws = _Draws(errors, times)
    found = {}
    for metric, derive in _DERIVATIONS.items():
        value = getattr(errors, metric)
        # Without any finite sample SQNR there is no worst sample.
        if value is None or math.isnan(value) or not (metrics is None or metric in metrics):
            continue
        worst, best = derive(draws, float(value))
        if metric in UPPER_BOUNDED:
            found[metric] = Limit(value, max(worst, value), min(best, value))
        else:
            found[metric] = Limit(value, min(worst, value), max(best, value))
    return found


def remembered(stages: dict[str, StageErrors]) -> list[dict[str, Any]]:
    """Return the limits of all stages and outputs as plain rows, in pipeline order."""
    return [
        {
            "stage": stage,
            "output": name,
            "metric": metric,
            "value": json_number(limit.value),
            "worst": json_number(limit.worst),
            "best": json_number(limit.best),
        }
        for stage, errors in stages.items()
        for name, output in errors.outputs.items()
        for metric, limit in limits(
            output, metrics=CHOICE_METRICS if output.chosen else None
        ).items()
    ]


class _Draws:
    """The sums of one output's samples, and statistics of their resamples."""

    def __init__(self, errors: OutputErrors, times: int) -> None:
        columns = np.tile(np.array(errors.samples, dtype=np.float64).T, times)
        (_, self.n, self.signal, self.noise, self.power, self.product) = columns[:6]
        (self.absolute, self.largest, self.agreeing, self.rows) = columns[6:10]
        self.size = columns.shape[1]
        self.different = len(errors.samples)
        self.scale = errors.scale or 0.0
        self.rms = math.sqrt(self.signal.sum() / self.n.sum())
        self.floor = _FLOAT_SHARE * self.rms
        self.floor_noise = self.floor**2 * self.n.sum()
        # float64 sums of squares cancel in 1 − cosine below this.
        self.distance = max(1 - errors.cosine_similarity, 0.0)

    def spread(self, statistic: Callable[[Array], Array], *columns: Array) -> float:
        """Standard error of log(statistic) of the resampled column sums, for two builds."""
        if self.size < 2:
            return 0.0
        table = np.stack(columns, axis=1)[: self.different]
        values = statistic(
            np.concatenate([drawn @ table for drawn in _resamples(self.size, self.different)])
        )
        # Resampling n values knows n − 1 of them.
        unbiased = math.sqrt(self.size / (self.size - 1))
        return float(np.std(np.log(values), ddof=1)) * unbiased * _Z * math.sqrt(2)

    def each(self) -> Iterator[tuple[float, float, float]]:
        """Signal, noise and number of elements of each different sample."""
        columns = (self.signal, self.noise, self.n)
        return zip(*(column[: self.different] for column in columns), strict=True)

    def noise_range(self) -> tuple[float, float]:
        """Σ(f−q)² at worst and at best."""
        noise = float(self.noise.sum())
        least = self.scale**2 * _COUNT + self.floor_noise or 1e-300
        growth = math.exp(
            self.spread(
                lambda sums: (sums[:, 0] + least) / (sums[:, 1] + least), self.noise, self.signal
            )
        )
        return _range(noise, growth, self.scale**2, self.floor_noise)


def _resamples(size: int, different: int) -> Iterable[Array]:
    """Draw the count of each sample in each resample, a block of resamples at a time."""
    if RESAMPLES * different <= _DRAWN_AT_ONCE:
        return _kept_resamples(size, different)
    return _drawn_resamples(size, different)


@functools.lru_cache(maxsize=1)
def _kept_resamples(size: int, different: int) -> tuple[Array, ...]:
    """Keep up to 8 MB: every metric of every output of a comparison draws the same."""
    return tuple(_drawn_resamples(size, different))


def _drawn_resamples(size: int, different: int) -> Iterator[Array]:
    rng = np.random.default_rng(SEED)
    step = max(1, _DRAWN_AT_ONCE // different)
    share = np.full(different, 1 / different)
    for start in range(0, RESAMPLES, step):
        block = rng.multinomial(size, share, size=min(step, RESAMPLES - start))
        yield block.astype(np.float64)


def _range(amount: float, growth: float, unit: float, floor: float) -> tuple[float, float]:
    """An amount of error with its variation: a factor, counts of a unit, and rounding."""
    more, less = _counts(amount, unit)
    return max(amount * growth, more, amount + floor), min(amount / growth, less)


def _counts(amount: float, unit: float) -> tuple[float, float]:
    if not unit:
        return amount, amount
    root = math.sqrt(amount / unit + _COUNT)
    step = _Z / math.sqrt(2)
    return (root + step) ** 2 * unit, max(root - step, 0.0) ** 2 * unit


def _decibels(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


def _sqnr(draws: _Draws, value: float) -> tuple[float, float]:
    signal = float(draws.signal.sum())
    most, least = draws.noise_range()
    return _decibels(signal, most), _decibels(signal, least)


def _rmse(draws: _Draws, value: float) -> tuple[float, float]:
    most, least = draws.noise_range()
    count = float(draws.n.sum())
    return math.sqrt(most / count), math.sqrt(least / count)


def _mean(draws: _Draws, value: float) -> tuple[float, float]:
    count = float(draws.n.sum())
    least = draws.scale * _COUNT + draws.floor * count or 1e-300
    growth = math.exp(
        draws.spread(lambda sums: (sums[:, 0] + least) / sums[:, 1], draws.absolute, draws.n)
    )
    most, less = _range(float(draws.absolute.sum()), growth, draws.scale, draws.floor * count)
    return most / count, less / count


def _largest(draws: _Draws, value: float) -> tuple[float, float]:
    spread = _gumbel(draws.largest) + draws.scale + draws.floor
    return value + spread, max(value - spread, 0.0)


def _largest_lsb(draws: _Draws, value: float) -> tuple[float, float]:
    spread = (_gumbel(draws.largest) + draws.scale + draws.floor) / draws.scale
    return value + spread, max(value - spread, 0.0)


def _worst_sample(draws: _Draws, value: float) -> tuple[float, float]:
    has_sqnr = (draws.noise > 0) & (draws.signal > 0)
    spread = _gumbel(10 * np.log10(draws.signal[has_sqnr] / draws.noise[has_sqnr]))
    # Any sample may be the one with the next few flips.
    flipped = [
        _decibels(signal, max(_counts(noise, draws.scale**2)[0], noise + draws.floor**2 * n))
        for signal, noise, n in draws.each()
        if signal
    ]
    worst = min(flipped, default=value)
    return min(value - spread, worst), max(value + spread, _without_flips(draws))


def _without_flips(draws: _Draws) -> float:
    """SQNR of the worst sample if the few codes that flipped there do not."""
    if not draws.noise.any():
        return math.inf
    with np.errstate(divide="ignore"):
        at = int(np.argmin(np.where(draws.noise > 0, draws.signal, math.inf) / draws.noise))
    noise = float(draws.noise[at])
    least = min(_counts(noise, draws.scale**2)[1], noise - draws.floor**2 * float(draws.n[at]))
    return _decibels(float(draws.signal[at]), max(least, 0.0))


def _cosine(draws: _Draws, value: float) -> tuple[float, float]:
    signal = float(draws.signal.sum())
    # Noise at a right angle to the signal turns it by Σ(f−q)² / 2Σf².
    unit = draws.scale**2 / (2 * signal) if signal else 0.0
    least = unit * _COUNT + _FLOAT_SHARE**2
    growth = math.exp(
        draws.spread(
            lambda sums: np.maximum(1 - _cosines(sums), 0.0) + least,
            draws.product,
            draws.signal + 1e-300,
            draws.power + 1e-300,
        )
    )
    most, less = _range(draws.distance, growth, unit, _FLOAT_SHARE**2)
    return max(1 - most, -1.0), 1 - less


def _top1(draws: _Draws, value: float) -> tuple[float, float]:
    wrong, rows = draws.rows - draws.agreeing, float(draws.rows.sum())
    growth = math.exp(
        draws.spread(lambda sums: (sums[:, 0] + _COUNT) / sums[:, 1], wrong, draws.rows)
    )
    most, less = _range(float(wrong.sum()), growth, 1.0, 0.0)
    return max(1 - most / rows, 0.0), 1 - less / rows


def _gumbel(values: Array) -> float:
    """Return how far the maximum of the values may move in another build."""
    if values.size < 2:
        return 0.0
    return float(np.std(values, ddof=1)) * _LOGISTIC * student(values.size - 1) / _Z


_DERIVATIONS: Final[dict[str, Callable[[_Draws, float], tuple[float, float]]]] = {
    "max_abs_error": _largest,
    "mean_abs_error": _mean,
    "rmse": _rmse,
    "max_lsb_error": _largest_lsb,
    "sqnr_db": _sqnr,
    "worst_sample_sqnr_db": _worst_sample,
    "cosine_similarity": _cosine,
    "top1_agreement": _top1,
}
assert set(_DERIVATIONS) == {*UPPER_BOUNDED, *LOWER_BOUNDED}


def _cosines(sums: Array) -> Array:
    """Of Σfq, Σf² and Σq². Root by root: of two that are next to nothing the product is none."""
    cosines: Array = sums[:, 0] / (np.sqrt(sums[:, 1]) * np.sqrt(sums[:, 2]))
    return cosines
