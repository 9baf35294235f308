"""
Confidence of the score drop between two models on the same samples.

The drop is the float score minus the edge score, counted so that more is worse. Each of its two
bounds holds with 95 % confidence by itself (together they are a 90 % interval), because each
answers a question by itself: is the drop small enough, and is it too great?
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from .metrics import Array

CONFIDENCE = 0.95  # of each bound
SEED = 0  # of every draw: the same data gives the same verdict
MOST_SAMPLES = 10_000_000  # a drop that needs more to be settled is as good as its limit
_ALPHA = 1 - CONFIDENCE


class Bounds(NamedTuple):
    """Where the drop lies; each side with 95 % confidence."""

    low: float
    high: float


def mcnemar_p(lost: int, gained: int) -> float:
    """Return the two-sided p-value of the exact McNemar test (Psychometrika 12, 1947)."""
    from scipy.special import bdtr

    return min(1.0, 2 * float(bdtr(min(lost, gained), lost + gained, 0.5)))


def binomial_bounds(count: int, n: int) -> Bounds:
    """Return the exact bounds of a share of which `count` of n were seen (Clopper & Pearson)."""
    from scipy.special import betaincinv

    low = float(betaincinv(count, n - count + 1, _ALPHA)) if count else 0.0
    high = float(betaincinv(count + 1, n - count, CONFIDENCE)) if count < n else 1.0
    return Bounds(low, high)


@dataclass(frozen=True, slots=True)
class RightWrong:
    """Two models that answer the same samples right or wrong."""

    n: int  # samples, 1 or more
    lost: int  # right in float, wrong in edge
    gained: int  # wrong in float, right in edge

    @property
    def drop(self) -> float:
        """Share right in float minus share right in edge."""
        return (self.lost - self.gained) / self.n

    @property
    def bounds(self) -> Bounds:
        """
        The interval of the drop in the population that the samples come from.

        The exact bounds of both shares, joined by MOVER (Zou & Donner, Statistics in Medicine 27,
        2008, for a difference of correlated shares). Where nothing changed it is the rule of three.
        By enumeration its coverage is 95.0 % at the least for 50 to 1,000 samples; Tango's score
        interval falls to 91.5 % where few samples change, which is the rule here.
        """
        return Bounds(
            -_difference_high(self.gained, self.lost, self.n),
            _difference_high(self.lost, self.gained, self.n),
        )

    def samples_needed(self, max_drop: float) -> int | None:
        """About how many samples settle it if the same shares change; None for far too many."""
        passes = self.drop < max_drop

        def settles(n: int) -> bool:
            grown = RightWrong(n, round(self.lost / self.n * n), round(self.gained / self.n * n))
            return grown.bounds.high <= max_drop if passes else grown.bounds.low > max_drop

        high = self.n
        while not settles(high):
            high *= 2
            if high > MOST_SAMPLES:
                return None
        return _rounded_up(bisect_left(range(high), True, high // 2 + 1, key=settles))


def _difference_high(more: int, less: int, n: int) -> float:
    above = binomial_bounds(more, n).high - more / n
    below = less / n - binomial_bounds(less, n).low
    # A sample that is one cannot be the other.
    is_defined = more < n and less < n
    correlation = -math.sqrt(more * less / ((n - more) * (n - less))) if is_defined else 0.0
    squares = above**2 + below**2 - 2 * correlation * above * below
    return min(1.0, (more - less) / n + math.sqrt(squares))


@dataclass(frozen=True, slots=True)
class Resampled:
    """
    A drop whose spread was found by drawing the samples anew.

    The bootstrap knows of nothing that the samples have not shown: without one sample that changed
    it would be certain of a drop of zero, however few there are. So a loss as great as
    `per_sample` in as many samples as may have stayed unseen is counted as well.
    """

    n: int  # samples, 1 or more
    drop: float  # of the samples as they are
    spread: Bounds  # what the bootstrap says of it
    per_sample: float  # how much one sample can lose

    @property
    def bounds(self) -> Bounds:
        """The interval of the drop in the population that the samples come from."""
        unseen = self.per_sample * binomial_bounds(0, self.n).high  # the rule of three
        return Bounds(
            min(self.spread.low, self.drop - unseen), max(self.spread.high, self.drop + unseen)
        )

    def samples_needed(self, max_drop: float) -> int | None:
        """About how many samples settle it if they spread alike; None for far too many."""
        gap = abs(max_drop - self.drop)
        passes = self.drop < max_drop
        width = self.spread.high - self.drop if passes else self.drop - self.spread.low
        if not gap or not math.isfinite(width):
            return None
        by_spread = self.n * (width / gap) ** 2
        seen = gap >= self.per_sample
        by_unseen = 0.0 if seen else math.log(_ALPHA) / math.log1p(-gap / self.per_sample)
        needed = max(by_spread, by_unseen)
        return _rounded_up(math.ceil(needed)) if needed <= MOST_SAMPLES else None


def _rounded_up(n: int) -> int:
    """To two digits: more would promise more than an estimate can."""
    unit = int(10 ** max(0, len(str(n)) - 2))
    return -(-n // unit) * unit


def resampled_means(values: Array, resamples: int) -> Array:
    """Return the mean of each of `resamples` draws, with replacement, of as many values."""
    random = np.random.default_rng(SEED)
    n = len(values)
    return np.array([values[random.integers(0, n, n)].mean() for _ in range(resamples)])


def bootstrap_bounds(point: float, resampled: Array, acceleration: float = 0.0) -> Bounds:
    """
    Return the bias-corrected and accelerated bounds of a bootstrap.

    BCa (Efron, JASA 82, 1987). A resample that has no value (NaN) is as bad as can be on
    either side. `scipy.stats.bootstrap` draws by itself, and a metric of torchmetrics is resampled
    by the weights of its samples.
    """
    normal = NormalDist()
    known = resampled[~np.isnan(resampled)]
    below = (np.count_nonzero(known < point) + np.count_nonzero(known == point) / 2) / max(
        len(known), 1
    )
    # Where all resamples are on one side the correction would be infinite.
    least = 1 / (2 * len(resampled))
    bias = normal.inv_cdf(min(max(below, least), 1 - least))

    def quantile(share: float, unknown: float) -> float:
        shifted = bias + normal.inv_cdf(share)
        level = normal.cdf(bias + shifted / (1 - acceleration * shifted))
        ranked = np.sort(np.where(np.isnan(resampled), unknown, resampled))
        return float(ranked[min(len(ranked) - 1, int(level * len(ranked)))])

    return Bounds(quantile(_ALPHA, -math.inf), quantile(CONFIDENCE, math.inf))


def acceleration_of_mean(values: Array) -> float:
    """Return the acceleration of a mean: Σ(x − x̄)³ / (6 (Σ(x − x̄)²)^1.5), 0 for no spread."""
    away = values - values.mean()
    squares = float((away**2).sum())
    return float((away**3).sum()) / (6 * squares**1.5) if squares > 0 else 0.0
