"""What is summed up in pieces is what one sum in float64 gives."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from pytest_edgeq.localize.sums import SMALL, Beside, Codes, Sums, ends_of, summed

CODES = Codes(-128, 127, float(torch.tensor(0.05)), 3)  # as a file has it, in float32

# Of float32 within a piece, measured 3e-7 on these; a lost piece or element is 1e-5 or more.
CLOSE = 2e-6

SHAPES = {
    "one": (1,),
    "row": (700,),
    "long row": (200_000,),
    "features": (1, 300),
    "rows": (90, 1500),
    "sequence": (1, 17, 32),
    "images": (2, 3, 5, 7),
    "lines of pixels": (1, 5, 200, 170),
    "channels last": (1, 24, 70, 90),
    "two with channels last": (2, 33, 60, 70),
}


_Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _given(name: str) -> _Four:
    """What the file makes of codes, and what it is held against, some beyond what codes reach."""
    shape = SHAPES[name]
    generator = torch.Generator().manual_seed(len(name))
    floats = torch.randn(shape, generator=generator) * 3
    quantized = floats + torch.randn(shape, generator=generator) * 0.04
    if "last" in name:
        floats = floats.contiguous(memory_format=torch.channels_last)
    codes = (quantized / CODES.scale + CODES.zero_point).round()
    codes = (codes + (torch.rand(shape, generator=generator) < 0.01)).clamp(-128, 127)
    made = (codes - CODES.zero_point) * CODES.scale
    whole = floats + torch.randn(shape, generator=generator) * 0.3
    return made, floats, quantized, whole


def _alone(*beside: Any) -> Sums:
    (sums,) = summed([Beside(*beside)])
    return sums


def _expected(given: Sequence[torch.Tensor]) -> Sums:
    made, floats, quantized, whole = (each.double() for each in given)
    axes = [axis for axis in range(made.ndim) if axis != 1]
    beyond = 1.5 * CODES.scale
    cut = quantized.clamp(CODES.floor, CODES.ceiling)
    codes = (made / CODES.scale).round()
    return Sums(
        noise=float((made - floats).square().sum()),
        channels=(made - floats).square().sum(axes).numpy() if made.ndim > 1 else None,
        signal=float(floats.square().sum()),
        least=float(floats.min()),
        greatest=float(floats.max()),
        own_signal=float(made.square().sum()),
        below=int((floats < CODES.floor - beyond).sum()),
        above=int((floats > CODES.ceiling + beyond).sum()),
        apart_noise=float((made - whole).square().sum()),
        apart_signal=float(whole.square().sum()),
        apart=float((made - whole).abs().max()),
        off=float((cut - made).abs().max()),
        steps=float(((cut / CODES.scale).round() - codes).abs().max()),
        peak=float(quantized.abs().max()),
        own_least=float(made.min()),
        own_greatest=float(made.max()),
    )


@pytest.mark.parametrize("name", SHAPES)
def test_sums_are_those_of_float64(name: str) -> None:
    """Whatever the layout, and however many pieces it takes."""
    given = _given(name)
    expected = _expected(given)
    made, floats = summed([Beside(*given, CODES, 0.0), Beside(*given, None, 0.0)])

    for sums in (made, floats):
        for each in ("noise", "signal", "own_signal", "apart_noise", "apart_signal"):
            assert getattr(sums, each) == pytest.approx(getattr(expected, each), rel=CLOSE)
        if expected.channels is None:
            assert sums.channels is None
        else:
            assert sums.channels == pytest.approx(expected.channels, rel=20 * CLOSE)
    assert (made.least, made.greatest) == (expected.least, expected.greatest)
    assert (made.below, made.above) == (expected.below, expected.above)
    assert made.apart == pytest.approx(expected.apart, abs=1e-6)
    assert made.off * CODES.scale == pytest.approx(expected.off, abs=1e-6)
    assert made.steps == expected.steps
    assert floats.peak == pytest.approx(expected.peak, abs=1e-6)
    assert floats.own_peak == pytest.approx(expected.own_peak, abs=1e-6)
    ends = floats.own_least, floats.own_greatest
    assert ends == pytest.approx((expected.own_least, expected.own_greatest), abs=1e-6)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16])
def test_codes_are_counted_at_the_ends_that_they_reach(dtype: Any) -> None:
    """The first and the last there are, as many as there are; none where they end before."""
    info = np.iinfo(dtype)
    low, high = int(info.min), int(info.max)
    codes = Codes(low, high, 0.1, 0)
    within = np.arange(low + 1, high, max((high - low) // 9, 1)).astype(dtype)
    ends = np.array([low, high, low], dtype)

    assert ends_of(within, codes) == (within.min(), within.max(), 0, 0)
    assert ends_of(np.concatenate([within, ends]), codes) == (low, high, 2, 1)
    # Of a narrow range, which leaves the first one out, the second counts.
    assert ends_of(np.concatenate([within, ends]), codes._replace(low=low + 1)).low == 1


def test_one_tensor_for_both_references() -> None:
    """What needs no second look gives the same."""
    made, floats, _, whole = _given("channels last")
    once, twice = summed(
        [
            Beside(made, floats, floats, whole, CODES, 0.0),
            Beside(made, floats, floats.clone(), whole, CODES, 0.0),
        ]
    )
    assert (once.off, once.steps) == (twice.off, twice.steps)
    assert once.noise == twice.noise


@pytest.mark.parametrize("name", ["rows", "channels last"])
def test_what_is_told_of_a_source_is_what_would_be_found(name: str) -> None:
    """A tensor held against another of the file, of which all is known."""
    made, floats, _, whole = _given(name)
    (source,) = summed([Beside(floats, made, made, whole, None, 0.0)])
    alone, told = summed(
        [Beside(made, floats, floats, whole, CODES, 0.0, told=t) for t in (None, source)]
    )

    assert source.own_signal == pytest.approx(alone.signal)
    for each in dataclasses.fields(Sums):
        expected = getattr(alone, each.name)
        assert getattr(told, each.name) == pytest.approx(expected, rel=CLOSE), each.name
    less = _alone(made, floats, floats, whole, CODES, 0.0, False)
    assert (less.own_signal, less.signal) == (0.0, alone.signal)


@pytest.mark.parametrize("name", ["sequence", "lines of pixels"])
def test_steps_are_looked_for_beyond_what_is_known(name: str) -> None:
    """One step is nothing new where one is known, two are."""
    made, floats, _, whole = _given(name)
    quantized = made.clone()

    def steps(known: float) -> float:
        return _alone(made, floats, quantized, whole, CODES, known).steps

    quantized[0, 3, 4] = made[0, 3, 4] * 0
    made[0, 3, 4] = 1.3 * CODES.scale
    assert (steps(0.0), steps(1.0)) == (1, 0)
    made[0, 3, 4] = 2.3 * CODES.scale
    assert (steps(0.0), steps(1.0), steps(math.inf)) == (2, 2, 0)


@pytest.mark.parametrize("size", [1e-30, 1e-18, 1e25])
@pytest.mark.parametrize("name", ["rows", "channels last", "long row", "images"])
def test_what_float32_cannot_hold_is_summed_in_float64(name: str, size: float) -> None:
    """Squares of tiny and of huge values are neither 0 nor infinite."""
    given = tuple(each * size for each in _given(name))
    sums, expected = _alone(*given, None, 0.0), _expected(given)

    # Differences are rounded to float32 where they are few: 6e-8 each, and not all one way.
    for each in ("noise", "signal", "own_signal", "apart_noise", "apart_signal"):
        assert getattr(sums, each) == pytest.approx(getattr(expected, each), rel=1e-9)


@pytest.mark.parametrize("name", ["images", "two with channels last"])
def test_what_is_equal_is_not_off_at_all(name: str) -> None:
    """Zero is zero: no difference is lost, and none is made up."""
    made, _, _, whole = _given(name)
    sums = _alone(made, made, made, whole * 0, CODES, 0.0)

    assert (sums.noise, sums.off, sums.apart_signal) == (0, 0, 0)
    assert sums.channels is not None
    assert not sums.channels.any()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["sequence", "rows"])
def test_what_is_not_finite_is_beyond_every_bound(name: str, bad: float) -> None:
    """In the file, or in either reference; in any piece."""
    for place in range(4):
        given = [each.clone() for each in _given(name)]
        given[place].reshape(-1)[-1] = bad
        made, floats, quantized, whole = given
        sums = _alone(made, floats, quantized, whole, None, 0.0)
        assert math.isinf(sums.noise) == (place in (0, 1))
        assert math.isinf(sums.apart_noise) == (place in (0, 3))
        assert math.isinf(sums.off) == (place in (0, 2))


def test_nothing_is_summed_to_nothing() -> None:
    """A tensor without elements."""
    empty = torch.empty(0, 3)
    assert _alone(empty, empty, empty, empty, CODES, 0.0).noise == 0


def test_many_in_a_row_are_each_by_itself() -> None:
    """Small ones together, large ones alone, in whatever order; codes beside floats."""
    names = [*SHAPES, *reversed(SHAPES)]
    given = [
        Beside(*_given(name), CODES if i % 3 else None, float(i % 2))
        for i, name in enumerate(names)
    ]
    assert {each.made.numel() > SMALL for each in given} == {True, False}
    for each, sums in zip(given, summed(given), strict=True):
        alone = _alone(*each)
        assert sums.steps == alone.steps
        assert (sums.below, sums.above) == (alone.below, alone.above)
        for name in ("noise", "signal", "own_signal", "apart_noise", "apart_signal", "off"):
            assert getattr(sums, name) == pytest.approx(getattr(alone, name), rel=1e-12)
