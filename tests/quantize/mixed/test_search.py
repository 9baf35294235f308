"""The search for layers to leave in float."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fixtures.models import normal
from pytest_edgeq import Budget
from pytest_edgeq.numerics.error_sums import IOSpec, StageAccumulator
from pytest_edgeq.numerics.results import StageErrors
from pytest_edgeq.quantize.mixed.criteria import BudgetCriterion
from pytest_edgeq.quantize.mixed.engine import Layer, LayerNoise
from pytest_edgeq.quantize.mixed.search import OutOfTimeError, Search


def _search(engine: Any) -> Search:
    goal: Any = None  # not read by prune
    return Search(engine, goal, [], LayerNoise.of((), 1), 0)


@pytest.mark.parametrize("seed", range(20))
def test_each_layer_that_is_left_is_needed(seed: int) -> None:
    """Errors of layers cancel each other: a layer may be needed only beside others."""
    names = [*"abcdefgh"]
    errors = normal(len(names), 12, seed=seed)  # of each layer, in twelve elements of the output
    bound = float(errors.sum(0).square().sum()) / 2

    def meets(chosen: Iterable[str]) -> bool:
        quantized = [i for i, name in enumerate(names) if name not in chosen]
        return float(errors[quantized].sum(0).square().sum()) <= bound

    search = _search(SimpleNamespace(layers={name: Layer(name, (), 1) for name in names}))
    kept = search.prune(names, meets)

    assert meets(kept)
    assert [name for name in kept if meets(set(kept) - {name})] == []


def test_a_search_goes_on_from_layers_that_nearly_meet_the_goal() -> None:
    """When its time is over soon after, it has few layers more, not all of them."""
    layers = {str(i): Layer(str(i), (), 1) for i in range(64)}
    noise = LayerNoise.of(layers, 1)
    calls: list[int] = []

    def simulated(engine: Any, modules: frozenset[str], samples: Any) -> Any:
        calls.append(len(modules))
        if len(calls) > 4:
            raise OutOfTimeError
        return SimpleNamespace(sqnr_db=float(len(modules)))

    goal: Any = SimpleNamespace(
        least_sqnr_db=None, simulated=simulated, accepts=lambda each: each.sqnr_db >= 32
    )
    engine: Any = SimpleNamespace(
        layers=layers, precision="float", is_quantized=lambda modules: True
    )
    search = Search(engine, goal, [], noise, 0)
    chosen = search.choose([str(i) for i in range(30)])

    assert chosen is not None
    assert 32 <= len(chosen) <= 34
    assert calls[:3] == [64, 31, 33]
    assert not search.is_pruned


def test_layers_of_a_block_go_with_it() -> None:
    """They are left in float by the block's name."""
    layers = {
        "a.b": Layer("a.b", (), 1),
        "c": Layer("c", (), 1),
        "a": Layer("a", (), 1, includes=frozenset(["a.b"])),
    }
    search = _search(SimpleNamespace(layers=layers))

    assert search.prune(["a", "c", "a.b"], {"a", "c"}.issubset) == ["c", "a"]


def _errors(draw: np.random.Generator, wide: Any) -> StageErrors:
    """Draw the noise of 32 samples of 100 elements."""
    sums = StageAccumulator([IOSpec("y", 0.1)])
    for scale in wide:
        signal = np.sin(np.arange(100.0))
        sums.update([signal], [signal + scale * draw.normal(size=100)])
    return sums.result()


def test_a_file_may_differ_from_its_simulation_by_two_standard_errors() -> None:
    """Two draws of one noise lie within it in 95 of 100 cases, also where they agree by chance."""
    criterion = BudgetCriterion(Budget(sqnr_db=20))
    within = 0
    for seed in range(200):
        draw = np.random.default_rng(seed)
        wide = draw.uniform(0.02, 0.2, size=32)  # samples differ in their noise
        simulated, file, other = (_errors(draw, wide) for _ in range(3))
        least = criterion.looser(simulated, file).least_sqnr_db
        assert least is not None
        assert least <= 20 - 1.1 * abs(simulated.sqnr_db - file.sqnr_db) + 1e-9
        within += abs(other.sqnr_db - simulated.sqnr_db) <= 20 - least
    assert 185 <= within < 200

    assert criterion.looser(file, file) == criterion


def test_a_bound_moves_beyond_the_simulation_of_a_file_that_misses_it() -> None:
    """So that the same layers are not chosen again, and never back."""
    draw = np.random.default_rng(0)
    simulated, file = (_errors(draw, [scale] * 32) for scale in (0.1, 0.102))
    goal = BudgetCriterion(Budget(sqnr_db=(simulated.sqnr_db + file.sqnr_db) / 2))
    assert goal.accepts(simulated)
    assert not goal.accepts(file)
    once = goal.stricter(goal, simulated, file)

    assert once is not None
    assert not once.accepts(simulated)
    assert once.stricter(goal, file, file) is None  # a smaller difference moves nothing
    assert goal.stricter(goal, simulated, simulated) is None
