"""
Margins of the errors of a rebuilt model, derived from one measurement.

A rebuild moves scales by a hair, and every code is rounded anew. What that may change is estimated
from the spread of the samples' errors, and is rather too wide than too narrow:

- Sums over samples (SQNR, RMSE, mean, cosine, top-1): the standard error of the metric's logarithm
  over a paired bootstrap of the samples; the difference of two builds has √2 times that error.
- A handful of codes that flip by one step are counts, which a bootstrap cannot tell from none: the
  variance of √count is 1/4 (Anscombe 1948), so k flips may become (√(k + 3/8) + z/√2)².
- Greatest errors: the maximum of Gumbel variables is Gumbel with the same spread, and the
  difference of two is logistic. The spread of few samples is widened as Student's t widens a normal
  quantile, and one LSB is added for the codes.
- A KL divergence grows with the power of the error, and its sum is taken like that of squares.
- The logarithm of a ratio of perplexities is the mean of log p − log q, of either sign, over the
  tokens. Its standard error is that of the bootstrap, or that of the tokens if they were
  independent, whichever is more; the difference of two builds has √2 times that error.
- Errors below 2⁻¹⁷ of the output's RMS, some hundred roundings of float32, are not distinguished.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from statistics import NormalDist
from typing import Final, NamedTuple

import numpy as np

from .metric_table import LEVEL, LOWER_BOUNDED, UPPER_BOUNDED, student
from .metrics import Array
from .results import OutputErrors, SampleErrors

CHOICE_METRICS: Final = ("top1_agreement",)
"""Metrics that say something of an output that holds a choice."""

RESAMPLES: Final = 1000
SEED: Final = 0
_Z: Final = NormalDist().inv_cdf(LEVEL)
_LOGISTIC: Final = math.log(LEVEL / (1 - LEVEL)) * math.sqrt(6) / math.pi
_COUNT: Final = 3 / 8
_FLOAT_SHARE: Final = 2.0**-17
_DRAWN_AT_ONCE: Final = 1 << 20


class Limit(NamedTuple):
    """One metric with the margin that a rebuild explains."""

    value: float  # what was measured
    worst: float  # what is still explained on the bad side
    best: float  # the same on the good side


def limits(
    errors: OutputErrors, times: int = 1, metrics: Collection[str] | None = None
) -> dict[str, Limit]:
    """Return every metric that this output has, with its margin."""
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
        outer, inner = (max, min) if metric in UPPER_BOUNDED else (min, max)
        found[metric] = Limit(value, outer(worst, value), inner(best, value))
    return found


class _Draws:
    """The sums of one output's samples, and those of their resamples."""

    def __init__(self, errors: OutputErrors, times: int) -> None:
        table = np.array(errors.samples, dtype=np.float64)
        names = SampleErrors._fields
        self.different, self.size = len(table), len(table) * times
        self.samples = dict(zip(names, np.tile(table.T, times), strict=True))
        self.sums = {name: float(column.sum()) for name, column in self.samples.items()}
        self.drawn = dict(zip(names, _resampled(table, self.size).T, strict=True))
        self.scale = errors.scale or 0.0
        self.floor = _FLOAT_SHARE * math.sqrt(self.sums["signal"] / self.sums["n"])
        # float64 sums of squares cancel in 1 − cosine below this.
        self.distance = max(1 - errors.cosine_similarity, 0.0)

    def growth(self, statistic: Array) -> float:
        """Return by what factor a statistic of the resamples may grow between two builds."""
        # Resampling n values knows n − 1 of them.
        unbiased = math.sqrt(self.size / max(self.size - 1, 1))
        return math.exp(float(np.std(np.log(statistic), ddof=1)) * unbiased * _Z * math.sqrt(2))

    def noise_range(self) -> tuple[float, float]:
        """Σ(f−q)² at worst and at best."""
        floor = self.floor**2 * self.sums["n"]
        least = self.scale**2 * _COUNT + floor or 1e-300
        growth = self.growth((self.drawn["noise"] + least) / (self.drawn["signal"] + least))
        return _range(self.sums["noise"], growth, self.scale**2, floor)


def _resampled(table: Array, size: int) -> Array:
    """Return the column sums of each resample of `size` rows; blocks bound the memory."""
    different = len(table)
    if size < 2:
        return np.repeat(table, RESAMPLES, axis=0)
    rng = np.random.default_rng(SEED)
    step = max(1, _DRAWN_AT_ONCE // different)
    share = np.full(different, 1 / different)
    blocks = (min(step, RESAMPLES - start) for start in range(0, RESAMPLES, step))
    return np.concatenate(
        [rng.multinomial(size, share, size=n).astype(float) @ table for n in blocks]
    )


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
    most, least = draws.noise_range()
    return _decibels(draws.sums["signal"], most), _decibels(draws.sums["signal"], least)


def _rmse(draws: _Draws, value: float) -> tuple[float, float]:
    most, least = draws.noise_range()
    return math.sqrt(most / draws.sums["n"]), math.sqrt(least / draws.sums["n"])


def _mean(draws: _Draws, value: float) -> tuple[float, float]:
    count = draws.sums["n"]
    least = draws.scale * _COUNT + draws.floor * count or 1e-300
    growth = draws.growth((draws.drawn["absolute"] + least) / draws.drawn["n"])
    most, less = _range(draws.sums["absolute"], growth, draws.scale, draws.floor * count)
    return most / count, less / count


def _largest(draws: _Draws, value: float, unit: float = 1.0) -> tuple[float, float]:
    spread = (_gumbel(draws.samples["largest"]) + draws.scale + draws.floor) / unit
    return value + spread, max(value - spread, 0.0)


def _worst_sample(draws: _Draws, value: float) -> tuple[float, float]:
    signal, noise, n = (draws.samples[name] for name in ("signal", "noise", "n"))
    has_sqnr = (noise > 0) & (signal > 0)
    spread = _gumbel(10 * np.log10(signal[has_sqnr] / noise[has_sqnr]))
    # Any sample may be the one with the next few flips.
    flipped = [
        _decibels(power, max(_counts(error, draws.scale**2)[0], error + draws.floor**2 * count))
        for power, error, count in zip(signal, noise, n, strict=True)
        if power
    ]
    best = math.inf
    if noise.any():  # the worst sample without the few codes that flipped
        with np.errstate(divide="ignore"):
            at = int(np.argmin(np.where(noise > 0, signal, math.inf) / noise))
        fewest = _counts(float(noise[at]), draws.scale**2)[1]
        least = min(fewest, float(noise[at]) - draws.floor**2 * float(n[at]))
        best = _decibels(float(signal[at]), max(least, 0.0))
    return min([value - spread, *flipped]), max(value + spread, best)


def _cosine(draws: _Draws, value: float) -> tuple[float, float]:
    signal = draws.sums["signal"]
    # Noise at a right angle to the signal turns it by Σ(f−q)² / 2Σf².
    unit = draws.scale**2 / (2 * signal) if signal else 0.0
    least = unit * _COUNT + _FLOAT_SHARE**2
    # Root by root: of two that are next to nothing the product is none.
    signals, powers = (np.sqrt(draws.drawn[name] + 1e-300) for name in ("signal", "power"))
    cosines = draws.drawn["product"] / (signals * powers)
    growth = draws.growth(np.maximum(1 - cosines, 0.0) + least)
    most, less = _range(draws.distance, growth, unit, _FLOAT_SHARE**2)
    return max(1 - most, -1.0), 1 - less


def _top1(draws: _Draws, value: float) -> tuple[float, float]:
    rows = draws.sums["rows"]
    wrong = draws.drawn["rows"] - draws.drawn["agreeing"]
    growth = draws.growth((wrong + _COUNT) / draws.drawn["rows"])
    most, less = _range(rows - draws.sums["agreeing"], growth, 1.0, 0.0)
    return max(1 - most / rows, 0.0), 1 - less / rows


def _kl(draws: _Draws, value: float) -> tuple[float, float]:
    positions = draws.sums["positions"]
    # A difference of logits with variance v is a divergence of v/2.
    floor = draws.floor**2 / 2 * positions
    growth = draws.growth((draws.drawn["kl"] + (floor or 1e-300)) / draws.drawn["positions"])
    most, less = _range(draws.sums["kl"], growth, 0.0, floor)
    return most / positions, less / positions


def _perplexity(draws: _Draws, value: float) -> tuple[float, float]:
    by_token = math.sqrt(draws.sums["nll_squares"]) / draws.sums["tokens"]
    difference = draws.drawn["nll"] - draws.drawn["nll_reference"]
    growth = draws.growth(np.exp(difference / draws.drawn["tokens"]))
    margin = max(math.log(growth), by_token * _Z * math.sqrt(2)) + draws.floor
    return value * math.exp(margin), value * math.exp(-margin)


def _gumbel(values: Array) -> float:
    """Return how far the maximum of the values may move in another build."""
    if values.size < 2:
        return 0.0
    return float(np.std(values, ddof=1)) * _LOGISTIC * student(values.size - 1) / _Z


_DERIVATIONS: Final[dict[str, Callable[[_Draws, float], tuple[float, float]]]] = {
    "max_abs_error": _largest,
    "mean_abs_error": _mean,
    "rmse": _rmse,
    "max_lsb_error": lambda draws, value: _largest(draws, value, draws.scale),
    "sqnr_db": _sqnr,
    "worst_sample_sqnr_db": _worst_sample,
    "cosine_similarity": _cosine,
    "top1_agreement": _top1,
    "kl": _kl,
    "perplexity_ratio": _perplexity,
}
assert set(_DERIVATIONS) == {*UPPER_BOUNDED, *LOWER_BOUNDED}
