"""Inputs: cut or rounded away they are found, and sound ones are left alone."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pytest_edgeq.numerics.error_sums import IOSpec
from pytest_edgeq.numerics.findings import Finding
from pytest_edgeq.numerics.health import InputHealth

INT8 = IOSpec("x", 0.1, 0, -128, 127)


def normal(n: int, scale: float, seed: int = 0) -> np.ndarray:
    """Return values of this standard deviation."""
    return np.random.default_rng(seed).normal(0, scale, n).astype(np.float32)


def findings(*samples: np.ndarray, spec: IOSpec = INT8, averaged: bool = False) -> list[Finding]:
    """Return what is found of these samples."""
    health = InputHealth(spec, averaged=averaged)
    for sample in samples:
        health.update(sample)
    return health.findings()


@pytest.mark.parametrize("scale", [0.2, 1.0, 5.0])
def test_a_sound_input_has_no_finding(scale: float) -> None:
    """From a few steps to most of the range."""
    assert findings(normal(1000, scale)) == []


def test_a_clipped_input_is_found() -> None:
    """Values four times as large as what was calibrated."""
    (finding,) = findings(normal(500, 12.8), normal(500, 12.8, seed=1))
    assert finding.kind == "clipped_input"
    assert finding.where == "input 'x'"
    assert finding.message == (
        "expected values within the range of its codes, [-12.8, 12.7], got 289 of 1000 elements "
        "(28.9 %) outside, as far as [-49.9, 39.7]; calibrate with samples like those evaluated, "
        "preprocessed alike"
    )


def test_an_input_that_was_calibrated_on_zeros() -> None:
    """Only zeros leave a hundredth of its values, and more of them would not help."""
    (finding,) = findings(normal(1000, 1.0), spec=IOSpec("x", 4e-12, -128, -128, 127))
    zeros = (
        "the calibration samples are zero there, or next to it; calibrate with samples like those "
        "evaluated, preprocessed alike"
    )
    assert finding.message.endswith(zeros)
    (finding,) = findings(normal(1000, 1.0), spec=IOSpec("x", 4e-4, -128, -128, 127))
    assert "zero there" not in finding.message


def test_the_limit_is_five_per_cent_and_three_sigmas() -> None:
    """Of 100 elements 5 % are 5, and their standard deviation is 2.18: 11 are no surprise."""
    assert findings(np.array([20.0] * 11 + [1.0] * 89)) == []
    assert [f.kind for f in findings(np.array([20.0] * 12 + [1.0] * 88))] == ["clipped_input"]


def test_an_averaged_range_cuts_both_ends() -> None:
    """Two of ten elements a sample lie outside where ranges are averages."""
    sample = np.array([20.0, -20.0, *[1.0] * 8])
    assert findings(*[sample] * 20, averaged=True) == []
    assert [each.kind for each in findings(*[sample] * 20)] == ["clipped_input"]


def test_a_coarse_input_is_found() -> None:
    """Pixels that were normalised for the model, and not for the calibration."""
    raw = IOSpec("x", 1.0, -128, -128, 127)
    pixels = (np.random.default_rng(0).integers(0, 256, 1000) / 255 - 0.45) / 0.225
    assert findings(pixels * 57.4 + 114.75, spec=raw) == []
    (finding,) = findings(pixels.clip(0), spec=raw)
    assert finding.kind == "coarse_input"
    assert finding.message == (
        "expected its values to span 8 codes or more, got 3.4 of 256: they lie in [0, 2.44], and "
        "the codes reach [0, 255] in steps of 1; compare the values of the calibration samples, "
        "one of which may be an outlier, with those of the evaluated samples, which may be "
        "preprocessed otherwise"
    )


@pytest.mark.parametrize(("codes", "found"), [(7, []), (6, ["coarse_input"])])
def test_the_least_span_is_of_eight_codes(codes: int, found: list[str]) -> None:
    """Zero among them, as every range has it; fewer than 32 elements say nothing."""
    values = np.full(32, 0.1 * codes)
    assert [each.kind for each in findings(values)] == found
    assert findings(values[1:]) == []


def test_zeros_and_what_is_not_finite_say_nothing() -> None:
    """Silence has no bit to lose; NaN and infinity are told where they come out."""
    assert findings(np.zeros(100)) == []
    assert findings(np.array([math.nan, math.inf, 1.0, -1.0])) == []
    assert findings() == []


@pytest.mark.parametrize("scale", [0.0, math.inf, math.nan])
def test_a_scale_that_is_none_is_told_elsewhere(scale: float) -> None:
    """`check_scales` tells of it."""
    assert findings(normal(100, 1.0), spec=IOSpec("x", scale, 0, -128, 127)) == []


def test_an_input_without_a_scale_cannot_be_looked_at() -> None:
    """There is nothing to hold it against."""
    with pytest.raises(ValueError, match="input 'x': expected one with a scale"):
        InputHealth(IOSpec("x"))


@pytest.mark.parametrize(
    ("values", "kinds"),
    [
        (np.linspace(-2.5, 2.5, 64), ["uncalibrated_activation"]),
        (np.linspace(-20.5, 20.5, 64), ["uncalibrated_activation"]),
        (np.linspace(-99.5, 99.5, 64), []),
        (np.arange(64) - 32.0, []),
        (np.arange(64) % 2.0, []),
    ],
    ids=["few codes", "a quarter", "many codes", "whole numbers", "a mask"],
)
def test_scale_one_and_zero_point_zero(values: np.ndarray, kinds: list[str]) -> None:
    """They are right for whole codes; fractions that leave most codes unused are evidence."""
    found = findings(values, values, spec=IOSpec("x", 1.0, 0, -128, 127))
    assert [each.kind for each in found] == kinds


def test_what_tells_that_an_input_was_never_calibrated() -> None:
    """Which values they are, and how many codes."""
    (finding,) = findings(np.linspace(-2.5, 2.5, 64), spec=IOSpec("x", 1.0, 0, -128, 127))
    assert finding.message == (
        "scale 1.0 and zero point 0, and its values, in [-2.5, 2.5], span 6 of 256 codes; its "
        "observer saw no sample; calibrate with inputs that reach it"
    )
