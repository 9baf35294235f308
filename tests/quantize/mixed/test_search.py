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
from pytest_edgeq.quantize.mixed.search import Search


def _search(
    layers: Iterable[Layer],
    simulated: Any = None,
    bound: float = 0,
    *,
    n_samples: int = 0,
    least_sqnr_db: float | None = None,
    group: str = "",
) -> Search:
    """Return a search for a bound on the SQNR; layers of one letter may be a group."""
    by_module = {each.module: each for each in layers}
    engine: Any = SimpleNamespace(
        layers=by_module,
        groups={group: (*group,)} if group else {},
        precision="float",
        is_quantized=lambda modules: True,
    )
    goal: Any = SimpleNamespace(
        least_sqnr_db=least_sqnr_db, simulated=simulated, accepts=lambda each: each.sqnr_db >= bound
    )
    samples: Any = [SimpleNamespace()] * n_samples
    noise = LayerNoise.of([*by_module, *engine.groups], by_module, 1)
    return Search(engine, goal, samples, noise, 0)


def _layers(names: Iterable[str]) -> list[Layer]:
    return [Layer(name, (), 1) for name in names]


@pytest.mark.parametrize("seed", range(20))
def test_each_layer_that_is_left_is_needed(seed: int) -> None:
    """Errors of layers cancel each other: a layer may be needed only beside others."""
    names = [*"abcdefgh"]
    errors = normal(len(names), 12, seed=seed)  # of each layer, in twelve elements of the output
    bound = float(errors.sum(0).square().sum()) / 2

    def meets(chosen: Iterable[str]) -> bool:
        quantized = [i for i, name in enumerate(names) if name not in chosen]
        return float(errors[quantized].sum(0).square().sum()) <= bound

    kept = _search(_layers(names)).prune(names, meets)

    assert meets(kept)
    assert [name for name in kept if meets(set(kept) - {name})] == []


def test_a_search_goes_on_from_layers_that_nearly_meet_the_goal() -> None:
    """It adds few layers, and none is taken back before a file shows that it is not needed."""
    layers = _layers(map(str, range(64)))
    calls: list[int] = []

    def simulated(engine: Any, modules: frozenset[str], samples: Any) -> Any:
        calls.append(len(modules))
        return SimpleNamespace(sqnr_db=float(len(modules)))

    search = _search(layers, simulated, 32)
    chosen = search.choose([str(i) for i in range(30)])

    assert chosen is not None
    assert 32 <= len(chosen) <= 34
    assert calls[:2] == [64, 30]
    assert max(calls[1:]) == 33

    # The gain of each layer is known when the next file misses the goal.
    calls.clear()
    goal: Any = search.criterion
    goal.accepts = lambda each: each.sqnr_db >= 36
    more = search.choose(chosen)
    assert more is not None
    assert {*chosen} < {*more}
    assert 36 <= len(more) <= 38
    assert len(calls) < 10


def test_layers_that_gain_most_for_a_byte_come_next() -> None:
    """Measured beside those that nearly meet the goal, whatever each gains alone."""
    gains = {"a": 9.0, "b": 4.0, "c": 3.0, "d": 2.0, "e": 4.0}
    layers = [Layer(name, (), 1 if name != "e" else 1000) for name in reversed(gains)]

    def simulated(engine: Any, modules: frozenset[str], samples: Any) -> Any:
        return SimpleNamespace(sqnr_db=sum(gains[each] for each in modules))

    assert _search(layers, simulated, 16).choose(["b", "a"]) == ["c", "b", "a"]
    # "e" is not tried without: it is among the first.
    gains["e"] = 0.0
    assert _search(layers, simulated, 16).choose(["a", "e"]) == ["e", "c", "b", "a"]


def test_layers_that_gain_together_come_together() -> None:
    """A group comes first if it gains more for each byte than each of its layers."""
    lost = {"a": 1.0, "b": 1.4, "c": 1.0, "d": 1.4, "e": 1.4}  # by each layer alone

    def left(modules: Iterable[str]) -> float:
        """Return the noise: "a" and "c" have one scale, and gain nothing one by one."""
        together = 0.0 if {"a", "c"}.issubset(modules) else 4.0
        return together + sum(lost[each] for each in set("bde").difference(modules))

    def simulated(engine: Any, modules: frozenset[str], samples: Any) -> Any:
        return SimpleNamespace(sqnr_db=-left(modules))

    def chosen(group: str) -> list[str] | None:
        search = _search(_layers(lost), simulated, -4.2, group=group)
        found = search.noise
        noises = {found.quantized: left(())}
        noises |= {found.alone[each]: noise for each, noise in lost.items()}
        noises |= {each: left(name) for name, each in found.in_float.items()}
        for each, noise in noises.items():
            each.noise[0], each.signal[0] = noise, 10.0
        return search.choose()

    assert chosen("ac") == ["a", "c"]
    assert chosen("") == ["b", "d", "e"]


def test_a_search_on_all_samples_starts_from_one_on_a_few() -> None:
    """Most layers that are not needed are found so, at a fraction of the cost."""
    gains = {name: float(gain) for gain, name in enumerate("abcdefgh", start=1)}
    counts: list[int] = []

    def simulated(engine: Any, modules: frozenset[str], samples: Any) -> Any:
        counts.append(len(samples))
        return SimpleNamespace(sqnr_db=sum(gains[each] for each in modules))

    search = _search(_layers(gains), simulated, 21, n_samples=32)
    chosen = search.choose()

    assert chosen is not None
    assert sum(gains[each] for each in chosen) >= 21
    assert counts.count(8) > counts.count(32) == 2  # all layers, and those that a few need
    assert len(search.steps) == counts.count(32)  # the curve of the report has no other points


def _errors(draw: np.random.Generator, wide: Any) -> StageErrors:
    """Draw the noise of 32 samples of 100 elements."""
    sums = StageAccumulator([IOSpec("y", 0.1)])
    for scale in wide:
        signal = np.sin(np.arange(100.0))
        sums.update([signal], [signal + scale * draw.normal(size=100)])
    return sums.result()


def test_few_samples_refuse_a_choice_that_is_clearly_worse_than_another() -> None:
    """By the difference, as samples differ more in their noise than choices of layers do."""
    draw = np.random.default_rng(0)
    wide = np.exp(draw.normal(size=32))  # noise of the samples
    factors = {"ab": 0.09, "a": 0.1, "b": 0.13}
    counts: list[int] = []

    def simulated(engine: Any, modules: frozenset[str], samples: Any) -> StageErrors:
        counts.append(len(samples))
        factor = factors["".join(sorted(modules))]
        return _errors(np.random.default_rng(1), factor * wide[: len(samples)])

    bound = simulated(None, frozenset("a"), range(32)).sqnr_db - 0.1
    options: Any = {"bound": bound, "least_sqnr_db": bound, "n_samples": 32}
    search = _search(_layers("ab"), simulated, **options)
    counts.clear()

    assert search.meets("ab")
    assert not search.meets("b")
    assert search.meets("a")
    assert counts == [8, 32, 8, 8, 32]

    assert not _search(_layers("ab"), simulated, **options).meets("b")
    assert counts[5:] == [8, 32]


@pytest.mark.slow
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
