"""Errors held against each other sample by sample."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from pytest_edgeq.baselines.errors import describe_change, loose
from pytest_edgeq.baselines.paired_limits import (
    FEWEST_SAMPLES,
    FLOOR_DB,
    at_least,
    floor_db,
    margin_db,
    narrowed,
)
from pytest_edgeq.numerics.findings import ERRORS_REGRESSED

Data = dict[str, Any]
Sums = list[float]

WIDE_DB = 5.0
"""What one measurement of samples as unlike as these gives: the trained digits network has 4.8."""


def sums(seed: int, n: int = 32, loss_db: float = 0.0) -> Sums:
    """
    Noise of samples that differ by a factor of fifty, and of each another draw a seed.

    A draw moves a sample by 5 %, as another order of calibration does.
    """
    size = np.random.default_rng(99).lognormal(0.0, 1.0, n)
    draw = np.random.default_rng(seed).normal(1.0, 0.05, n)
    return [float(each) for each in size * draw * 10 ** (loss_db / 10)]


def remembered(noise: Sums, *, samples: bool = True) -> Data:
    """Errors of one metric."""
    value = 40 - 10 * math.log10(math.fsum(noise))
    row = {
        "stage": "total",
        "output": "y",
        "metric": "sqnr_db",
        "value": value,
        "worst": value - WIDE_DB,
        "best": value + WIDE_DB,
    }
    data = {"flow": "pt2e", "runtime": "xnnpack", "fingerprint": "ab", "n_samples": len(noise)}
    return {**data, "errors": [{**row, "samples": noise} if samples else row]}


def test_two_decibels_are_found_by_paired_samples_alone() -> None:
    """A loss that all of 32 samples share regresses; the limits of one measurement pass it."""
    for seed in range(1, 21):
        worse = sums(seed, loss_db=2.0)
        found = describe_change(remembered(sums(0)), remembered(worse))
        assert found is not None
        assert found.title.startswith(
            "errors regressed: total, output 'y': sqnr_db: expected at least "
        )
        assert found.harm.amount == pytest.approx(2.0, abs=1.0)
        alone = [remembered(each, samples=False) for each in (sums(0), worse)]
        assert describe_change(alone[0], alone[1]) is None


@pytest.mark.parametrize(
    ("moved_db", "kind"), [(9.0, None), (-9.0, None), (25.0, ERRORS_REGRESSED)]
)
def test_noise_of_float32_is_neither_worse_nor_better(moved_db: float, kind: str | None) -> None:
    """At 113 dB a little more or less is another order of sums; at 88 dB it is not."""
    quiet = [1e-9 * each for each in sums(0)]
    before = remembered(quiet)
    (row,) = before["errors"]
    assert row["value"] == pytest.approx(113.1, abs=0.1)
    before["errors"] = [at_least(row, floor_db("pt2e", "total", row["value"]))]
    after = remembered([each * 10 ** (moved_db / 10) for each in quiet])
    found = describe_change(before, after)
    assert (None if found is None else found.kind) == kind
    assert loose(before, after) == []


@pytest.mark.parametrize("n", [8, 32, 256])
def test_another_draw_is_no_loss_and_no_gain(n: int) -> None:
    """200 rebuilds: none regressed, none loose."""
    before = remembered(sums(0, n))
    for seed in range(1, 201):
        after = remembered(sums(seed, n))
        assert describe_change(before, after) is None
        assert loose(before, after) == []


@pytest.mark.parametrize("metric", ["mean_abs_error", "sqnr_db"])
def test_the_margin_is_that_of_a_paired_bootstrap(metric: str) -> None:
    """Of 20,000 resamples, times Student's t at 31 degrees of freedom (4.216); 3 % is its noise."""
    generator = np.random.default_rng(5)
    before = np.ones(32)
    now = np.roll(np.linspace(0.95, 1.05, 32), generator.integers(32))
    drawn = generator.multinomial(32, np.full(32, 1 / 32), size=20_000)
    per = 10 if metric == "sqnr_db" else 20
    ratios = per * np.log10((drawn @ now) / (drawn @ before))
    expected = 4.216 * ratios.std() * math.sqrt(32 / 31)
    found = margin_db(metric, before.tolist(), now.tolist(), 0.0)
    assert found == pytest.approx(expected, rel=0.03)
    assert margin_db(metric, before.tolist(), now.tolist(), 9.0) == 9.0


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ([1.0] * (FEWEST_SAMPLES - 1), [1.0] * (FEWEST_SAMPLES - 1)),
        ([1.0] * 8, [1.0] * 9),
        ([0.0] * 8, [1.0] * 8),
        ([1.0] + [0.0] * 31, [2.0] + [0.0] * 31),
    ],
    ids=["few", "other", "none", "one-flip"],
)
def test_samples_that_cannot_tell_leave_the_limits(before: Sums, now: Sums) -> None:
    """There is no margin, and the row stays."""
    assert margin_db("sqnr_db", before, now, FLOOR_DB) is None
    limits = {"value": 40.0, "worst": 35.0, "best": 45.0}
    row = {"stage": "total", "metric": "sqnr_db", **limits, "samples": before}
    assert narrowed(row, {**row, "samples": now}, FLOOR_DB) == row


@pytest.mark.parametrize(
    ("metric", "flow", "worst", "best"),
    [
        ("sqnr_db", "pt2e", 38.5, 41.5),
        ("sqnr_db", "recipe", 36.0, 44.0),
        ("mean_abs_error", "pt2e", 40 * 10**0.075, 40 / 10**0.075),
    ],
)
def test_the_floor_is_of_the_flow_and_in_the_sense_of_the_metric(
    metric: str, flow: str, worst: float, best: float
) -> None:
    """Equal samples have no spread; limits that are narrower already stay."""
    far = {"sqnr_db": (1.0, 99.0), "mean_abs_error": (99.0, 1.0)}[metric]
    limits = {"value": 40.0, "worst": far[0], "best": far[1]}
    row = {"stage": "total", "metric": metric, **limits, "samples": [1.0] * 8}
    floor = floor_db(flow, "total", 40.0)
    found = narrowed(row, row, floor)
    assert (found["worst"], found["best"]) == pytest.approx((worst, best))
    near = {**row, "worst": 40.0, "best": 40.0}
    assert narrowed(near, near, floor) == near


@pytest.mark.parametrize(
    ("sqnr_db", "floor"), [(40.0, 1.5), (101.0, 1.5), (130.0, 30.0), (math.inf, 1.5)]
)
def test_what_float32_rounds_may_be_anything_up_to_100_db(sqnr_db: float, floor: float) -> None:
    """Above it an error says how sums were ordered, and nothing of the model."""
    assert floor_db("pt2e", "conversion", sqnr_db) == floor


@pytest.mark.parametrize(
    ("metric", "value", "worst"),
    [
        ("sqnr_db", 30.0, 20.0),
        ("cosine_similarity", 0.99, 0.9),
        ("rmse", 1.0, 10**0.5),
        ("top1_agreement", 0.9, 0.9),
        ("sqnr_db", "inf", 52.0),
    ],
)
def test_limits_are_as_wide_as_the_floor(metric: str, value: Any, worst: float) -> None:
    """Ten times the noise for 10 dB; wider ones stay, and so does what has no dB."""
    near = 52.0 if value == "inf" else value
    row = {"metric": metric, "value": value, "worst": near, "best": value}
    found = at_least(row, 10.0)
    assert found["worst"] == pytest.approx(worst)
    assert at_least(found, 5.0) == found
