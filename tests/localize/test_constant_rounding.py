"""What constants of unknown rounding may move outputs by."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pytest_edgeq.localize.constant_rounding import DRAWS, FEW_DRAWS, ConstantRounding


def _limit(moved: np.ndarray) -> float:
    """The limit of one output on one sample, of draws along the first axis."""
    moves = ConstantRounding()
    for each in moved:
        moves.add(0, 0, each)
    return moves.limit(0, [0])


@pytest.mark.parametrize(
    ("rounding", "sizes"), [("uniform", [1.0, 0.1]), ("normal", [3.0, *[1.0] * 9])]
)
def test_a_sound_reference_is_one_more_draw(rounding: str, sizes: list[float]) -> None:
    """In a few directions or in many; a normal error is a sum of many uniform ones."""
    draw = np.random.default_rng(0)
    beyond = 0
    for _ in range(300):
        shape = (DRAWS + 1, len(sizes))
        made = draw.uniform(-1, 1, shape) if rounding == "uniform" else draw.normal(size=shape)
        made = made * sizes
        beyond += bool(np.square(made[0]).sum() > _limit(made[1:]))

    assert beyond == 0


@pytest.mark.parametrize(("directions", "most"), [(1, 9.0), (5, 4.0), (60, 2.5)])
def test_the_limit_is_near_what_rounding_does(directions: int, most: float) -> None:
    """Times as far as in the mean: fewer, where an error has more directions to add up in."""
    draw = np.random.default_rng(0)
    limits = [_limit(draw.uniform(-1, 1, (DRAWS, directions))) for _ in range(60)]
    mean = directions / 3

    assert 1.5 < math.sqrt(np.median(limits) / mean) < most


def test_few_draws_accept_only_what_lies_far_within() -> None:
    """The limit of all draws may be narrower than that of the first few."""
    draw = np.random.default_rng(0)
    for _ in range(60):
        made = draw.uniform(-1, 1, (DRAWS, 5))
        assert _limit(made[:FEW_DRAWS]) < _limit(made)


def test_samples_are_judged_together() -> None:
    """Their squares add up, and their directions."""
    draw = np.random.default_rng(0)
    moves = ConstantRounding()
    for _ in range(DRAWS):
        for sample in range(4):
            moves.add(0, sample, draw.uniform(-1, 1, 3))
    alone = [moves.limit(0, [sample]) for sample in range(4)]

    assert moves.limit(0, range(4)) < sum(alone) * 0.8
