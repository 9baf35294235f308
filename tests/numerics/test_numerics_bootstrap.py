"""Margins that a rebuild explains."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from fixtures.token_logits import Sequences, accumulated, sequences
from pytest_edgeq.numerics import bootstrap
from pytest_edgeq.numerics.bootstrap import Limit, limits
from pytest_edgeq.numerics.error_sums import IOSpec, StageAccumulator
from pytest_edgeq.numerics.metric_table import LOWER_BOUNDED
from pytest_edgeq.numerics.results import OutputErrors, wiped

Array = np.ndarray[Any, Any]

SCALE = 0.05


def reference(n: int = 64) -> list[Array]:
    """Samples of ten normal values."""
    generator = np.random.default_rng(7)
    return [generator.normal(size=(1, 10)) for _ in range(n)]


def measure(pairs: list[tuple[Array, Array]], scale: float | None = SCALE) -> OutputErrors:
    """The errors of one output."""
    accumulator = StageAccumulator([IOSpec("y", scale)])
    for left, right in pairs:
        accumulator.update([left], [right])
    return accumulator.result().outputs["y"]


def rounded(values: list[Array], seed: int, noise: float = SCALE) -> list[tuple[Array, Array]]:
    """The same values with another draw of the same noise, then rounded to codes."""
    generator = np.random.default_rng(seed)
    return [
        (x, np.round((x + generator.normal(size=x.shape) * noise) / SCALE) * SCALE) for x in values
    ]


def token_errors(pairs: Sequences) -> OutputErrors:
    """The errors of the logits of a language model."""
    return accumulated(pairs).stage().outputs["logits"]


def worse(before: Mapping[str, Limit], after: OutputErrors) -> list[str]:
    """Metrics that are beyond these limits."""
    return [
        metric
        for metric, limit in before.items()
        if not (
            getattr(after, metric) >= limit.worst
            if metric in LOWER_BOUNDED
            else getattr(after, metric) <= limit.worst
        )
    ]


def test_another_draw_of_the_same_rounding_is_within_the_margin() -> None:
    """200 draws, eight metrics each, and none is beyond; the sums are the same at every call."""
    values = reference()
    before = measure(rounded(values, 0))
    assert limits(before) == limits(measure(rounded(values, 0)))
    assert len(limits(before)) == 8
    found = limits(before)
    alarms = [worse(found, measure(rounded(values, seed))) for seed in range(1, 201)]
    assert [alarm for alarm in alarms if alarm] == []


def test_twice_the_noise_is_beyond_the_margin() -> None:
    """A real loss shows in the sums over samples."""
    values = reference()
    found = worse(limits(measure(rounded(values, 0))), measure(rounded(values, 1, 2 * SCALE)))
    assert {"sqnr_db", "rmse", "mean_abs_error", "cosine_similarity"} <= set(found)


def test_a_few_flipped_codes_are_no_loss_where_there_were_none() -> None:
    """Equal sides have no spread: counts say how many codes may flip, and a hundred are beyond."""
    codes = [(y, y) for _, y in rounded(reference(), 0)]

    def flipped(n: int) -> OutputErrors:
        pairs = [(left, right.copy()) for left, right in codes]
        for _, right in pairs[:n]:
            right[0, 0] += SCALE
        return measure(pairs)

    before = limits(measure(codes))
    assert before["sqnr_db"].value == math.inf
    assert math.isfinite(before["sqnr_db"].worst)
    assert worse(before, flipped(5)) == []
    assert {"sqnr_db", "rmse"} <= set(worse(before, flipped(60)))


def test_float_rounding_is_no_loss_where_sides_were_equal() -> None:
    """Without a scale, too, what float32 rounds is not distinguished; a thousandth is."""
    values = reference()

    def off_by(share: float) -> OutputErrors:
        return measure([(x, x * (1 + share)) for x in values], None)

    before = limits(off_by(0.0))
    assert worse(before, off_by(2.0**-22)) == []
    assert {"sqnr_db", "max_abs_error"} <= set(worse(before, off_by(1e-3)))


def test_one_sample_has_the_margin_of_counts_only() -> None:
    """There is no spread over samples, and the limits are still in order."""
    found = limits(measure(rounded(reference(1), 0)))
    assert found["max_lsb_error"].worst == pytest.approx(found["max_lsb_error"].value + 1, rel=1e-3)
    assert found["sqnr_db"].worst < found["sqnr_db"].value < found["sqnr_db"].best


def test_nothing_is_derived_from_what_is_not_finite_or_zero() -> None:
    """Neither can be remembered."""
    zero = np.zeros((1, 3))
    for pair in ((zero, zero + math.nan), (zero, zero)):
        with pytest.raises(ValueError, match="no errors that a margin could be derived for"):
            limits(measure([pair]))


def test_samples_that_are_zero_on_a_side_have_no_quotient_of_zeros() -> None:
    """As where a range is so wide that every code is zero: a warning would be an error here."""
    silent = [(np.zeros((1, 10)), np.zeros((1, 10)))] * 3
    gone = [(value, np.zeros_like(value)) for value in reference(1)]
    assert limits(measure([*silent, *gone]))["cosine_similarity"].worst <= 0


def test_a_reference_of_zeros_has_limits() -> None:
    """Its SQNR is −inf at every sample, and any noise is within that."""
    zeros = np.zeros((1, 3))
    found = limits(measure([(zeros, zeros + 0.1)] * 4))
    assert found["worst_sample_sqnr_db"].worst == -math.inf
    assert found["rmse"].worst > 0.1


@pytest.mark.parametrize("n", [4, 8, 16])
def test_the_greatest_error_of_a_sound_rebuild_stays_within_its_limit(n: int) -> None:
    """Of 20,000 pairs whose samples' greatest errors are drawn alike, 20 at most exceed it."""
    generator = np.random.default_rng(0)
    remembered, now = generator.gumbel(size=(2, 20_000, n))
    worst = remembered.max(axis=1) + [bootstrap._gumbel(each) for each in remembered]
    assert np.count_nonzero(now.max(axis=1) > worst) <= 20


def test_the_metrics_of_zeros_are_those_that_zeros_are_measured_with() -> None:
    """All eight, of a reference whose first class is the greatest in every second row."""
    generator = np.random.default_rng(0)
    values = [generator.normal(size=(1, 4)) for _ in range(32)]
    for x in values[::2]:
        x[0, 0] = 9.0
    measured = measure([(x, x + 0.1) for x in values])
    zeros = measure([(x, np.zeros_like(x)) for x in values])
    found = wiped(measured)
    assert len(found) == 8
    for metric, value in found.items():
        assert getattr(zeros, metric) == pytest.approx(value, abs=1e-12)


def test_a_guess_of_the_class_is_better_than_zeros() -> None:
    """Zeros are of the first class, which no row of these is: a guess is right in a quarter."""
    values = [np.array([[0.0, 1.0, 2.0, 3.0]])] * 8
    assert wiped(measure([(x, x + 0.1) for x in values]))["top1_agreement"] == 0.25


@pytest.mark.parametrize("n", [1, 8])
def test_the_ratio_of_perplexities_of_a_rebuild(n: int) -> None:
    """Another draw of the noise moves it either way, of a single sequence as well."""
    first = token_errors(sequences(n=n, size=0.3))
    limit = limits(first)["perplexity_ratio"]
    ratios = [
        token_errors(sequences(n=n, size=0.3, build=b)).perplexity_ratio for b in range(1, 21)
    ]
    assert all(ratio is not None and limit.best < ratio < limit.worst for ratio in ratios)
    assert limit.worst < 1.3


def test_the_divergence_of_a_rebuild() -> None:
    """Another draw of the noise stays within the margin, three times as much does not."""
    before = limits(token_errors(sequences()))
    assert all(worse(before, token_errors(sequences(build=build))) == [] for build in range(1, 11))
    assert "kl" in worse(before, token_errors(sequences(size=0.15, build=1)))


def test_equal_logits_have_the_margin_of_rounding() -> None:
    """A file that equals its reference may differ by float32's rounding in the next build."""
    before = limits(token_errors(sequences(lambda reference, seed: reference.copy())))
    assert worse(before, token_errors(sequences(size=2e-6))) == []
