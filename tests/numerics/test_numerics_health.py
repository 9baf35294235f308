"""Health: for every check a real defect that it finds and a sound case that it leaves alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_edgeq.numerics.error_sums import IOSpec
from pytest_edgeq.numerics.findings import Finding, Place
from pytest_edgeq.numerics.health import InputHealth, OutputHealth
from pytest_edgeq.numerics.samples import SampleLedger, overlap_finding, repeated_finding
from pytest_edgeq.numerics.static_health import (
    Calibration,
    check_bias,
    check_scales,
    has_default_parameters,
)

Array = npt.NDArray[Any]
INT8 = IOSpec("y", 0.1, 0, -128, 127)
FLOAT = IOSpec("y")


def quantize(values: Array, spec: IOSpec = INT8) -> tuple[Array, Array]:
    """Return values after one rounding to the codes of an output, and the codes."""
    assert spec.scale is not None
    assert spec.zero_point is not None
    codes = np.clip(np.rint(values / spec.scale) + spec.zero_point, spec.qmin, spec.qmax)
    return ((codes - spec.zero_point) * spec.scale).astype(np.float32), codes.astype(np.int8)


def findings(spec: IOSpec, *samples: tuple[Any, Any]) -> list[Finding]:
    """Return what is found after (reference, actual) samples."""
    health = OutputHealth(spec)
    for reference, actual in samples:
        health.update(np.array(reference), np.array(actual))
    return health.findings()


def kinds(found: list[Finding]) -> list[str]:
    """Return the kinds found."""
    return [finding.kind for finding in found]


@pytest.mark.parametrize("spec", [INT8, FLOAT])
def test_a_sound_output_has_no_finding(spec: IOSpec) -> None:
    """Values over the whole range, rounded once, are sound."""
    values = np.linspace(-12.8, 12.7, 101)
    assert findings(spec, (values, quantize(values)[0])) == []


def test_nonfinite_output_is_found_by_side() -> None:
    """NaN in the output and infinity in the reference are counted apart."""
    (finding,) = findings(INT8, ([1.0, math.inf, 2.0], [math.nan, 1.0, math.nan]))
    assert finding.kind == "nonfinite"
    assert finding.message == (
        "expected finite values, got 2 NaN or infinite of 3 elements, and 1 in the float reference "
        "itself; look at the model (log, sqrt, a division) and at the samples first"
    )
    (finding,) = findings(INT8, ([1.0, 2.0], [math.nan, 1.0]))
    assert finding.message == (
        "expected finite values, got 1 NaN or infinite of 2 elements, where the reference has "
        "none; edgeq.localize(model, samples) names the first op that has any"
    )
    assert kinds(findings(FLOAT, ([math.nan], [1.0]))) == ["nonfinite"]


def test_wiped_output_is_found() -> None:
    """Zero everywhere, whatever the reference says."""
    (finding,) = findings(INT8, ([1.0, 2.0], [0.0, 0.0]), ([3.0, 0.5], [0.0, 0.0]))
    assert (finding.kind, finding.where) == ("zero_output", "output 'y'")
    assert finding.message == (
        "zero in all 4 elements, where the reference runs from 0.5 to 3; "
        "edgeq.localize(model, samples) names the layer"
    )
    assert kinds(findings(INT8, ([0.0, 0.0], [0.0, 0.0]))) == ["zero_output"]


FIXED = IOSpec("y", 1 / 256, 0, 0, 255)


@pytest.mark.parametrize(
    ("spec", "reference", "actual", "expected"),
    [
        # Below half a step of a fixed scale, where a detector detects nothing, zeros are right.
        (FIXED, [0.0, 0.0019], [0.0, 0.0], []),
        (FIXED, [0.0, 0.0021], [0.0, 0.0], ["zero_output"]),
        # A scale that was calibrated has other values.
        (FIXED._replace(scale=1 / 250), [0.0, 0.0019], [0.0, 0.0], ["zero_output"]),
        # What is constant in the reference as well is as it should be.
        (FLOAT, [3.0, 3.0], [3.0, 3.0], []),
        (INT8, [3.04, 3.04], [3.0, 3.0], []),
        (FLOAT, [3.0], [2.0], []),  # one element is not yet a constant
        # Without a whole and sound set of parameters there is no range to leave.
        (IOSpec("y", 0.1, None, -128, 127), [50.0, -50.0], [12.0, -12.0], []),
        (IOSpec("y", math.nan, 0, -128, 127), [50.0, -50.0], [12.0, -12.0], []),
    ],
)
def test_near_misses(spec: IOSpec, reference: Any, actual: Any, expected: list[str]) -> None:
    """Sound outputs that have something of an unsound one."""
    assert kinds(findings(spec, (reference, actual))) == expected


def test_constant_output_is_found() -> None:
    """One value everywhere while the reference varies, or has another."""
    (finding,) = findings(FLOAT, ([1.0, 2.0], [1.5, 1.5]))
    assert finding.kind == "constant_output"
    assert finding.message == (
        "1.5 in all 2 elements, where the reference runs from 1 to 2; "
        "edgeq.localize(model, samples) names the layer"
    )
    (finding,) = findings(INT8, ([1.0, 1.0], [1.5, 1.5]))
    assert "where the reference is 1 throughout" in finding.message


def test_clipped_output_is_found() -> None:
    """A range calibrated on samples that were too small cuts the others off."""
    values = np.linspace(-30, 30, 100)
    (finding,) = findings(INT8, (values, quantize(values)[0]))
    assert finding.kind == "clipped_output"
    assert finding.message == (
        "expected the reference within the range of the codes, [-12.8, 12.7], got 58 of 100 "
        "elements (58 %) outside, as far as [-30, 30], and 58 of 100 elements (58 %) at qmin or "
        "qmax; calibrate with samples like those evaluated, preprocessed alike"
    )


@pytest.mark.parametrize("averaged", [True, False])
def test_an_average_of_ranges_cuts_the_ends_of_small_samples(averaged: bool) -> None:
    """The moving average of eight samples' ends, of four elements each: half go beyond it."""
    rng = np.random.default_rng(0)
    seen = rng.normal(0, 1, (64, 4))
    low, high = seen.min(axis=1).mean(), seen.max(axis=1).mean()
    scale = float(high - low) / 255
    spec = IOSpec("y", scale, round(-128 - low / scale), -128, 127)
    health = OutputHealth(spec, averaged=averaged)
    for values in rng.normal(0, 1, (32, 4)):
        health.update(values, quantize(values, spec)[0])
    assert kinds(health.findings()) == ([] if averaged else ["clipped_output"])


@pytest.mark.parametrize(("n_loud", "found"), [(2, []), (8, ["clipped_output"])])
def test_what_lies_outside_goes_together_in_a_sample(n_loud: int, found: list[str]) -> None:
    """Two of eight samples leave the range by most that they have: of elements a sixth."""
    rng = np.random.default_rng(0)
    health = [OutputHealth(INT8), OutputHealth(INT8)]
    for place, values in enumerate(rng.uniform(-12, 12, (8, 16))):
        loud = values + 16 if place < n_loud else values
        health[place % 2].update(loud, quantize(loud)[0])
    health[0].merge(health[1])
    assert kinds(health[0].findings()) == found


def test_an_average_of_ranges_does_not_hide_a_wrong_one() -> None:
    """Calibrated on a tenth of the values that come, three of four elements are cut off."""
    spec = IOSpec("y", 0.2 / 255, 0, -128, 127)
    health = OutputHealth(spec, averaged=True)
    for values in np.random.default_rng(0).normal(0, 1, (8, 4)):
        health.update(values, quantize(values, spec)[0])
    (finding,) = health.findings(Calibration(averages=True))
    assert finding.kind == "clipped_output"
    assert "a recipe averages the samples' ranges" in finding.message
    (of_another_tool,) = health.findings()
    assert "recipe" not in of_another_tool.message


def test_softmax_with_its_fixed_scale_is_sound() -> None:
    """An exact 1.0 lies one LSB outside of TFLite's softmax range, in every sound classifier."""
    spec = IOSpec("y", 1 / 256, -128, -128, 127)
    values = np.eye(2)
    assert findings(spec, (values, quantize(values, spec)[0])) == []


def test_relu_at_its_lower_end_is_sound() -> None:
    """Most codes at qmin are right where the reference is zero there."""
    spec = IOSpec("y", 0.1, -128, -128, 127)
    values = np.append(np.zeros(90), np.linspace(0, 20, 10))
    assert findings(spec, (values, quantize(values, spec)[0])) == []


@pytest.mark.parametrize("with_codes", [True, False])
def test_saturated_output_is_found(with_codes: bool) -> None:
    """A wrong multiplier drives codes to the ends though the reference is well inside."""
    values = np.linspace(-10, 10, 100)
    actual, codes = quantize(values * 4)
    health = OutputHealth(INT8)
    health.update(values, actual, codes if with_codes else None)
    (finding,) = health.findings()
    assert finding.kind == "saturated_output"
    assert "in 63 of 100 elements (63 %)" in finding.message


VALUES = st.sampled_from([0.0, 0.5, 1.0, 12.7, -12.8, 99.0, -99.0, math.nan, math.inf])


@given(st.lists(st.lists(st.tuples(VALUES, VALUES), max_size=3), max_size=5), st.integers(0, 5))
def test_any_split_finds_the_same(samples: list[list[tuple[float, float]]], cut: int) -> None:
    """Two halves merged find what one pass finds."""
    one, first, second = (OutputHealth(INT8) for _ in range(3))
    for i, pairs in enumerate(samples):
        array = np.array(pairs).reshape(-1, 2)
        for health in (one, first if i < cut else second):
            health.update(array[:, 0], array[:, 1])
    second.merge(first)
    assert second.findings() == one.findings()


@pytest.mark.parametrize(
    ("scales", "text"),
    [
        ([0.0, 0.1], "got zero in 1 of 2 (the first at channel 0: 0)"),
        ([0.1, math.nan, math.inf], "got not finite in 2 of 3 (the first at channel 1: nan)"),
        ([0.1, 0.0, -1.0], "got zero and negative in 2 of 3 (the first at channel 1: 0)"),
    ],
)
def test_bad_scale_is_found(scales: list[float], text: str) -> None:
    """A scale that is no scale is named by kind and place."""
    (finding,) = check_scales(Place("tensor", "w"), np.array(scales))
    assert (finding.kind, finding.where) == ("bad_scale", "w")
    assert text in finding.message


@pytest.mark.parametrize(
    ("scales", "points", "dtype", "expected"),
    [
        ([1.0], [0], "int8", True),
        ([1.0], [3], "int8", False),
        ([0.9], [0], "int8", False),
        ([1.0], [0], "uint8", False),
    ],
)
def test_what_an_observer_leaves_that_saw_nothing(
    scales: list[float], points: list[int], dtype: str, expected: bool
) -> None:
    """Scale 1.0 and zero point 0 of signed codes; raw pixels are uint8."""
    assert has_default_parameters(np.array(scales), np.array(points), dtype) is expected


def test_bias_at_the_limit_is_found() -> None:
    """Both ends of int32, and the symmetric one, show that a bias was cut off."""
    values = np.array([5, 2**31 - 1, -(2**31), -(2**31) + 1], np.int32)
    (finding,) = check_bias(Place("tensor", "conv bias"), values)
    assert (finding.kind, finding.where) == ("bias_at_int32_limit", "conv bias")
    assert "got 3 of 4 at its limit" in finding.message


def test_ledger_knows_samples_again() -> None:
    """A copy in whatever memory layout; the same bytes in another shape or dtype are another."""
    ledger = SampleLedger()
    sample = np.arange(6, dtype=np.float32).reshape(2, 3)
    ledger.add([sample, np.array(1)])
    ledger.add([sample, np.array(1)])
    assert len(ledger) == 1
    assert [np.asfortranarray(sample), np.array(1)] in ledger
    for other in (sample.ravel(), sample.view(np.int32)):
        assert [other, np.array(1)] not in ledger


def test_overlap_is_a_finding() -> None:
    """Calibration samples among those evaluated are counted; none is no finding."""
    finding = overlap_finding(3, 10)
    assert finding is not None
    assert (finding.kind, finding.where) == ("calibration_overlap", "inputs")
    assert finding.message == (
        "3 of 10 evaluated samples were also used to calibrate: the errors look smaller than they "
        "are; evaluate on samples that the calibration has not seen"
    )
    assert overlap_finding(0, 10) is None


def _ids(rng: np.random.Generator) -> list[Array]:
    return [rng.integers(0, 30, (1, 1)), rng.integers(0, 40, (1, 1))]


def test_one_sample_again_and_again_is_a_finding() -> None:
    """Four times is a mistake; three, or two that differ, may be all there are."""
    one, other = [np.zeros(3)], [np.ones(3)]
    ledger = SampleLedger()
    for _ in range(3):
        ledger.add(one)
        assert repeated_finding(ledger) is None
    ledger.add(one)
    finding = repeated_finding(ledger)
    assert finding is not None
    assert str(finding) == (
        "calibration_repeated: inputs: expected different calibration samples, got one, 4 times: "
        "ranges hold what it reaches, and cut off the others; look at the loader, and give dozens "
        "that differ"
    )
    ledger.add(other)
    assert repeated_finding(ledger) is None
    assert repeated_finding(SampleLedger()) is None


def test_ids_that_meet_by_chance_are_no_overlap() -> None:
    """Of 1,200 pairs of ids 100 calibrate, and new ones are among these now and then."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(200):
        ledger = SampleLedger()
        for _ in range(100):
            ledger.add(_ids(rng))
        met = sum(_ids(rng) in ledger for _ in range(8))
        assert overlap_finding(8, 8, chance=ledger.chance) is not None
        found.append((met, overlap_finding(met, 8, chance=ledger.chance)))
    assert sum(met > 0 for met, _ in found) > 50
    assert sum(finding is not None for _, finding in found) <= 2


@pytest.mark.parametrize(
    ("dtype", "shape", "high"), [(np.float32, (1, 2), 30), (np.int64, (1, 16), 1000)]
)
def test_nothing_meets_by_chance_that_has_room(
    dtype: type[np.generic], shape: tuple[int, ...], high: int
) -> None:
    """Floats, and token ids of some length: one sample met again was calibrated with."""
    rng = np.random.default_rng(0)
    ledger = SampleLedger()
    for _ in range(100):
        ledger.add([rng.integers(0, high, shape).astype(dtype)])
    assert ledger.chance == 0
    assert overlap_finding(1, 8, chance=ledger.chance) is not None


def normal(n: int, scale: float, seed: int = 0) -> np.ndarray:
    """Return values of this standard deviation."""
    return np.random.default_rng(seed).normal(0, scale, n).astype(np.float32)


def input_findings(*samples: Array, spec: IOSpec = INT8) -> list[Finding]:
    """Return what is found of these samples."""
    health = InputHealth(spec)
    for sample in samples:
        health.update(sample)
    return health.findings()


@pytest.mark.parametrize("scale", [0.2, 5.0])
def test_a_sound_input_has_no_finding(scale: float) -> None:
    """From a few steps to most of the range."""
    assert input_findings(normal(1000, scale)) == []


def test_a_clipped_input_is_found() -> None:
    """Values four times as large as what was calibrated."""
    (finding,) = input_findings(normal(500, 12.8), normal(500, 12.8, seed=1))
    assert finding.kind == "clipped_input"
    assert finding.where == "input 'y'"
    assert finding.message == (
        "expected values within the range of its codes, [-12.8, 12.7], got 289 of 1000 elements "
        "(28.9 %) outside, as far as [-49.9, 39.7]; calibrate with samples like those evaluated, "
        "preprocessed alike"
    )


def test_an_input_that_was_calibrated_on_zeros() -> None:
    """Only zeros leave a hundredth of its values, and more of them would not help."""
    (finding,) = input_findings(normal(1000, 1.0), spec=IOSpec("x", 4e-12, -128, -128, 127))
    zeros = (
        "the calibration samples are zero or nearly zero there; calibrate with samples like those "
        "evaluated, preprocessed alike"
    )
    assert finding.message.endswith(zeros)
    (finding,) = input_findings(normal(1000, 1.0), spec=IOSpec("x", 4e-4, -128, -128, 127))
    assert "zero there" not in finding.message


def test_the_limit_is_five_per_cent_and_three_sigmas() -> None:
    """Of 100 elements 5 % are 5, and their standard deviation is 2.18: 11 are no surprise."""
    assert input_findings(np.array([20.0] * 11 + [1.0] * 89)) == []
    assert [f.kind for f in input_findings(np.array([20.0] * 12 + [1.0] * 88))] == ["clipped_input"]


def test_a_coarse_input_is_found() -> None:
    """Pixels that were normalised for the model, and not for the calibration."""
    raw = IOSpec("x", 1.0, -128, -128, 127)
    pixels = (np.random.default_rng(0).integers(0, 256, 1000) / 255 - 0.45) / 0.225
    assert input_findings(pixels * 57.4 + 114.75, spec=raw) == []
    (finding,) = input_findings(pixels.clip(0), spec=raw)
    assert finding.kind == "coarse_input"
    assert finding.message == (
        "expected its values to span 8 codes or more, got 3.4 of 256: they lie in [0, 2.44], and "
        "the codes reach [0, 255] in steps of 1; compare the values of the calibration samples, "
        "one of which may be an outlier, with those of the evaluated samples, which may be "
        "preprocessed otherwise"
    )


def test_zeros_and_what_is_not_finite_say_nothing() -> None:
    """Silence has no bit to lose; NaN and infinity are reported at the output."""
    assert input_findings(np.zeros(100)) == []
    assert input_findings(np.array([math.nan, math.inf, 1.0, -1.0])) == []
    assert input_findings() == []


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.linspace(-2.5, 2.5, 64), ["uncalibrated_activation"]),
        (np.linspace(-40.5, 60.5, 64), []),
        (np.arange(64) % 5 - 2.0, []),
        (np.arange(64) - 32.0, []),
    ],
    ids=["few codes", "many codes", "few whole numbers", "whole numbers"],
)
def test_scale_one_and_zero_point_zero(values: np.ndarray, expected: list[str]) -> None:
    """They are right for whole codes; fractions that leave most codes unused are evidence."""
    spec = IOSpec("x", 1.0, 0, -128, 127)
    assert kinds(input_findings(values, values, spec=spec)) == expected
    assert kinds(findings(spec, (values, np.rint(values)))) == expected
