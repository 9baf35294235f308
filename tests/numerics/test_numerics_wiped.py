"""The metrics of an output of zeros."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from pytest_edgeq.numerics.error_sums import IOSpec, StageAccumulator
from pytest_edgeq.numerics.results import OutputErrors, accepts, wiped

Array = np.ndarray[Any, Any]


def _measured(pairs: Sequence[tuple[Array, Array]]) -> OutputErrors:
    accumulator = StageAccumulator([IOSpec("y", 0.05)])
    for left, right in pairs:
        accumulator.update([left], [right])
    return accumulator.result().outputs["y"]


def test_the_metrics_of_zeros_are_those_that_zeros_are_measured_with() -> None:
    """All eight, of a reference whose first class is the greatest in every second row."""
    generator = np.random.default_rng(0)
    values = [generator.normal(size=(1, 4)) for _ in range(32)]
    for x in values[::2]:
        x[0, 0] = 9.0
    measured = _measured([(x, x + 0.1) for x in values])
    zeros = _measured([(x, np.zeros_like(x)) for x in values])
    found = wiped(measured)
    assert len(found) == 8
    for metric, value in found.items():
        assert getattr(zeros, metric) == pytest.approx(value, abs=1e-12)


def test_a_guess_of_the_class_is_better_than_zeros() -> None:
    """Zeros are of the first class, which no row of these is: a guess is right in a quarter."""
    values = [np.array([[0.0, 1.0, 2.0, 3.0]])] * 8
    assert wiped(_measured([(x, x + 0.1) for x in values]))["top1_agreement"] == 0.25


def test_a_reference_of_zeros_has_none() -> None:
    """Zeros are right there."""
    zeros = np.zeros((1, 4))
    assert wiped(_measured([(zeros, zeros + 0.1)])) == {}


def test_a_metric_at_its_limit_is_accepted() -> None:
    """On either side."""
    assert accepts("sqnr_db", 0.0, 0.0)
    assert not accepts("sqnr_db", 0.1, 0.0)
    assert accepts("rmse", 0.5, 0.5)
    assert not accepts("rmse", 0.4, 0.5)
