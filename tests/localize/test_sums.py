"""Sums over pieces of a tensor equal one sum in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pytest_edgeq.localize.measured import Codes, TensorErrors, errors_of

Floats = npt.NDArray[np.float32]

CODES = Codes(-128, 127, float(np.float32(0.05)), 3)  # as a file has it, in float32

# A lost piece or element is 1e-5 or more.
CLOSE = 1e-12

SHAPES = {
    "one": (1,),
    "long row": (200_000,),
    "rows": (90, 1500),
    "sequence": (1, 17, 32),
    "images": (2, 5, 7, 3),
    "wide": (2, 70_000),
}

SQUARES = ("noise", "signal", "cumulative_noise", "cumulative_signal")


def _given(name: str) -> tuple[Floats, Floats, Floats, Floats]:
    """Return values of codes and what they are held against, some beyond what codes reach."""
    shape = SHAPES[name]
    numbers = np.random.default_rng(len(name))
    floats = numbers.normal(size=shape) * 3
    rounded = floats + numbers.normal(size=shape) * 0.04
    codes = (rounded / CODES.scale + CODES.zero_point).round()
    codes = (codes + (numbers.random(shape) < 0.01)).clip(-128, 127)
    made = (codes - CODES.zero_point) * CODES.scale
    whole = floats + numbers.normal(size=shape) * 0.3
    one, two, three, four = (
        np.asarray(each, np.float32) for each in (made, floats, rounded, whole)
    )
    return one, two, three, four


def _expected(given: Sequence[Floats]) -> TensorErrors:
    made, floats, rounded, whole = (each.astype(np.float64) for each in given)
    beyond = 1.5 * CODES.scale
    cut = rounded.clip(CODES.floor, CODES.ceiling)
    codes = (made / CODES.scale).round()
    noises = np.square(made - floats)
    return TensorErrors(
        made.size,
        noise=float(noises.sum()),
        channel_noise=noises.sum(tuple(range(made.ndim - 1))) if made.ndim > 1 else None,
        signal=float(np.square(floats).sum()),
        smallest=float(floats.min()),
        largest=float(floats.max()),
        beyond_low=int((floats < CODES.floor - beyond).sum()),
        beyond_high=int((floats > CODES.ceiling + beyond).sum()),
        cumulative_noise=float(np.square(made - whole).sum()),
        cumulative_signal=float(np.square(whole).sum()),
        cumulative_lsb=float(np.abs(made - whole).max()) / CODES.scale,
        off=float(np.abs(cut - made).max()) / CODES.scale,
        local_lsb=float(np.abs((cut / CODES.scale).round() - codes).max()),
        peak=float(np.abs(rounded).max()),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_sums_are_those_of_float64(name: str) -> None:
    """Whatever the shape, and however many pieces it takes."""
    given = _given(name)
    expected = _expected(given)
    made, floats = errors_of(*given, CODES), errors_of(*given, None)

    for found in (made, floats):
        for each in SQUARES:
            assert getattr(found, each) == pytest.approx(getattr(expected, each), rel=CLOSE)
        if expected.channel_noise is None:
            assert found.channel_noise is None
        else:
            assert found.channel_noise == pytest.approx(expected.channel_noise, rel=CLOSE)
    for each in ("elements", "smallest", "largest", "beyond_low", "beyond_high", "local_lsb"):
        assert getattr(made, each) == getattr(expected, each)
    assert made.cumulative_lsb == pytest.approx(expected.cumulative_lsb)
    # The ends of the range are float32, as values of codes are.
    assert made.off == pytest.approx(expected.off, abs=1e-4)
    assert floats.peak == expected.peak


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16])
def test_codes_are_counted_at_the_ends_that_they_reach(dtype: Any) -> None:
    """The first and the last there are, as many as there are; none where they end before."""
    info = np.iinfo(dtype)
    low, high = int(info.min), int(info.max)
    codes = Codes(low, high, 0.1, 0)
    within = np.arange(low + 1, high, max((high - low) // 9, 1)).astype(dtype)
    ends = np.array([low, high, low], dtype)

    def counted(stored: npt.NDArray[Any], codes: Codes) -> tuple[float, float, int, int]:
        found = TensorErrors()
        found.add_codes(stored, codes)
        return found.least, found.greatest, found.low, found.high

    assert counted(within, codes) == (within.min(), within.max(), 0, 0)
    assert counted(np.concatenate([within, ends]), codes) == (low, high, 2, 1)
    # Of a narrow range, which leaves the first one out, the second counts.
    assert counted(np.concatenate([within, ends]), codes._replace(low=low + 1))[2] == 1


@pytest.mark.parametrize("size", [1e-30, 1e25])
def test_what_float32_cannot_hold_is_summed_in_float64(size: float) -> None:
    """Squares of tiny and of huge values are neither 0 nor infinite."""
    made, floats, rounded, whole = (each * np.float32(size) for each in _given("rows"))
    sums, expected = (
        errors_of(made, floats, rounded, whole, None),
        _expected([made, floats, rounded, whole]),
    )

    for each in SQUARES:
        assert getattr(sums, each) == pytest.approx(getattr(expected, each), rel=CLOSE)


def test_what_is_equal_is_not_off_at_all() -> None:
    """Zero is zero: no difference is lost, and none is made up; nor of nothing."""
    made, _, _, whole = _given("images")
    for given in (made, made[:0]):
        sums = errors_of(given, given, given, whole[: len(given)] * 0, CODES)
        assert (sums.noise, sums.off, sums.cumulative_signal) == (0, 0, 0)
        assert sums.channel_noise is not None
        assert not sums.channel_noise.any()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_beyond_every_bound(bad: float) -> None:
    """In the file, or in either reference; in any piece."""
    for place in range(4):
        given = _given("rows")
        given[place].reshape(-1)[-1] = bad
        sums = errors_of(*given, None)
        assert math.isinf(sums.noise) == (place in (0, 1))
        assert math.isinf(sums.cumulative_noise) == (place in (0, 3))
        assert math.isinf(sums.off) == (place in (0, 2))
        assert not math.isnan(errors_of(*given, CODES).local_lsb)


def test_infinite_values_are_not_clipped() -> None:
    """The padding of a MAX_POOL_2D is −inf, for which the least code does as well."""
    floats = np.array([-np.inf, -1e6, 0.0, 1e6, 1e6, np.inf], np.float32)
    made = np.clip(floats, np.float32(CODES.floor), np.float32(CODES.ceiling))
    sums = errors_of(made, floats, floats, floats, CODES)

    assert (sums.beyond_low, sums.beyond_high) == (1, 2)
