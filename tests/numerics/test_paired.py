"""How sure a drop is: against scipy, closed forms, enumeration and simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from pytest_edgeq.numerics.paired import (
    Bounds,
    Resampled,
    RightWrong,
    acceleration_of_mean,
    binomial_bounds,
    bootstrap_bounds,
    mcnemar_p,
    resampled_means,
)


def test_mcnemar_by_hand() -> None:
    """6 against 0: 2 / 2^6. 5 against 1: 2 · 7 / 2^6. Thousands do not overflow."""
    assert mcnemar_p(6, 0) == 2 / 64
    assert mcnemar_p(1, 5) == pytest.approx(14 / 64, rel=1e-12)
    assert mcnemar_p(0, 0) == mcnemar_p(7, 7) == 1.0
    assert 0 < mcnemar_p(2000, 2200) < 0.01


@given(st.integers(1, 5000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_binomial_bounds_are_clopper_and_pearsons(count: tuple[int, int]) -> None:
    """As scipy's test gives them: an exact interval of 90 % has 95 % on each side."""
    low, high = binomial_bounds(*count)
    expected = stats.binomtest(*count).proportion_ci(0.90, method="exact")
    assert low == pytest.approx(expected.low, rel=1e-8, abs=1e-15)
    assert high == pytest.approx(expected.high, rel=1e-8)


@pytest.mark.parametrize("n", [1, 10, 299, 100_000])
def test_nothing_changed_is_the_rule_of_three(n: int) -> None:
    """In closed form: (1 − p)^n = 5 %."""
    closed = 1 - 0.05 ** (1 / n)
    assert binomial_bounds(0, n).high == pytest.approx(closed, rel=1e-9)
    assert RightWrong(n, 0, 0).bounds.high == pytest.approx(closed, rel=1e-9)
    assert RightWrong(n, 0, 0).bounds.low == -RightWrong(n, 0, 0).bounds.high


@given(st.integers(1, 400), st.integers(0, 60), st.integers(0, 60))
def test_bounds_of_right_and_wrong(n: int, lost: int, gained: int) -> None:
    """Around the drop, mirrored when sides are swapped, and worse with each sample lost."""
    n = max(n, lost + gained + 1)
    bounds = RightWrong(n, lost, gained).bounds
    swapped = RightWrong(n, gained, lost).bounds
    assert -1 <= bounds.low < RightWrong(n, lost, gained).drop < bounds.high <= 1
    assert (-swapped.high, -swapped.low) == bounds
    assert RightWrong(n, lost + 1, gained).bounds.high > bounds.high - 1e-12


@pytest.mark.parametrize("n", [50, 500])
def test_coverage_of_right_and_wrong(n: int) -> None:
    """
    By enumeration, not by chance: the upper bound misses the drop in 5 % of cases at most.

    Shares as quantization has them: up to 12 samples lost and up to 8 gained on average.
    """
    most = 36  # beyond it lies less than 1e-8 of what has a mean of 12
    lost, gained = np.ogrid[: most + 1, : most + 1]
    high = np.ones((most + 1, most + 1))
    for b in range(most + 1):
        for c in range(min(most, n - b) + 1):
            high[b, c] = RightWrong(n, b, c).bounds.high
    worst = 1.0
    # 3 and 4.75 stand just below where the bounds of no and one sample lost fail.
    for mean_lost in (0.2, 1, 2.9, 3, 4.7, 4.75, 7, 12):
        for mean_gained in (0, 0.3, 1, 3, 8):
            p, q = mean_lost / n, mean_gained / n
            chance = stats.binom.pmf(lost, n, p)
            chance = chance * stats.binom.pmf(gained, np.maximum(n - lost, 0), q / (1 - p))
            assert chance.sum() == pytest.approx(1, abs=1e-6)
            worst = min(worst, float(chance[high >= p - q].sum()))
    # 1e-4: what float64 and the cut-off at `most` leave.
    assert 0.95 - 1e-4 <= worst < 0.97


@pytest.mark.parametrize(
    ("evidence", "limit", "expected"),
    [
        (RightWrong(10, 0, 0), 0.01, 300),  # 299, rounded up
        (RightWrong(100, 1, 0), 0.01, None),  # as good as the limit
        (Resampled(10, 0.0, Bounds(0.0, 0.0), 1.0), 0.01, 300),
        # Four times as wide as it may be takes sixteen times as many.
        (Resampled(100, 0.01, Bounds(-0.01, 0.05), 0.0), 0.02, 1600),
        (Resampled(100, 0.03, Bounds(0.01, 0.05), 0.0), 0.02, 400),
        (Resampled(100, 0.02, Bounds(0.01, 0.05), 0.0), 0.02, None),
        (Resampled(100, 0.01, Bounds(-math.inf, math.inf), 0.0), 0.02, None),
    ],
)
def test_samples_needed(
    evidence: RightWrong | Resampled, limit: float, expected: int | None
) -> None:
    """Closed forms, and what no number settles."""
    assert evidence.samples_needed(limit) == expected


@given(st.lists(st.floats(-1, 1), min_size=3, max_size=40))
def test_acceleration_is_a_sixth_of_the_skewness(values: list[float]) -> None:
    """By scipy's skewness: that of a mean is 1/√n of it."""
    drops = np.array(values)
    if drops.std() < 1e-6:
        return
    expected = stats.skew(drops) / (6 * math.sqrt(len(drops)))
    assert acceleration_of_mean(drops) == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_bootstrap_bounds_are_scipys() -> None:
    """BCa of a skewed mean, on draws of their own: equal up to the noise of 4,000 resamples."""
    drops = np.random.default_rng(3).exponential(1.0, 80)
    resampled = resampled_means(drops, 4000)
    low, high = bootstrap_bounds(float(drops.mean()), resampled, acceleration_of_mean(drops))
    theirs = stats.bootstrap(
        (drops,), np.mean, confidence_level=0.90, n_resamples=4000, method="BCa", rng=4
    ).confidence_interval
    # A 5 % quantile of 4,000 has a standard error of 0.033 deviations of what it is drawn from;
    # theirs has the same, and the bias correction as much again: 0.033 · 2, three times over.
    noise = 0.2 * float(resampled.std())
    assert low == pytest.approx(theirs.low, abs=noise)
    assert high == pytest.approx(theirs.high, abs=noise)


def test_a_resample_without_a_score_is_as_bad_as_can_be() -> None:
    """NaN does not vanish: with more than one in twenty the bound is infinite."""
    resampled = np.linspace(-1, 1, 1000)
    resampled[::10] = np.nan
    assert bootstrap_bounds(0.0, resampled) == (-math.inf, math.inf)
    resampled = np.linspace(-1, 1, 1000)
    resampled[::500] = np.nan
    assert 0.88 < bootstrap_bounds(0.0, resampled).high < 0.92
    assert bootstrap_bounds(0.0, np.full(10, np.nan)).high == math.inf


def test_resamples_on_one_side_only() -> None:
    """The correction stays finite."""
    assert bootstrap_bounds(0.0, np.ones(100)) == (1.0, 1.0)
    assert bootstrap_bounds(2.0, np.ones(100)) == (1.0, 1.0)
    assert bootstrap_bounds(0.0, np.zeros(100)) == (0.0, 0.0)


def test_what_the_samples_have_not_shown_counts() -> None:
    """A bootstrap of equal values is certain of everything; the bounds are not."""
    bounds = Resampled(100, 0.0, Bounds(0.0, 0.0), 0.5).bounds
    assert bounds.high == pytest.approx(0.5 * (1 - 0.05**0.01))
    assert bounds.low == -bounds.high
    wide = Bounds(-0.3, 0.4)
    assert Resampled(100, 0.0, wide, 0.5).bounds == wide
