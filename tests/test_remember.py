"""What of a comparison is remembered, and the budget that is made from it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fixtures.tflite.writer import one_op
from fixtures.token_logits import broken, comparison, noisy, sequences
from pytest_edgeq import Budget, Comparison, Edgeq, QuantizedModel
from pytest_edgeq.baselines.errors import describe_change
from pytest_edgeq.check.remember import Evaluation, errors_to_remember
from pytest_edgeq.numerics.error_sums import IOSpec, StageAccumulator

Array = np.ndarray[Any, Any]
Pair = tuple[Array, Array]


@pytest.fixture(scope="module")
def add() -> QuantizedModel:
    """A float file of one ADD of two inputs."""
    side = {"dtype": "float32", "shape": (1, 4)}
    content = one_op("ADD", [side, side], [side], "AddOptions")
    return Edgeq().load(content, reference=lambda x, y: x + y)


def _comparison(*pairs: Pair, scale: float | None = 0.05) -> Comparison:
    accumulator = StageAccumulator([IOSpec("y", scale)])
    for left, right in pairs:
        accumulator.update([left], [right])
    return Comparison(name="net", flow="pt2e", runtime="xnnpack", total=accumulator.result())


def _noisy(share: float, n: int = 16) -> Comparison:
    generator = np.random.default_rng(0)
    values = [generator.normal(size=(1, 10)) for _ in range(n)]
    return _comparison(*((x, x + share * generator.normal(size=x.shape)) for x in values))


def test_the_fingerprint_is_of_bytes_inputs_and_order(add: QuantizedModel) -> None:
    """The same samples give it again; a bit, two inputs or two samples swapped do not."""

    def fingerprint(*samples: Pair) -> str:
        return Edgeq(localize_timeout=0).compare(add, samples).fingerprint

    one, two = (np.full((1, 4), value, np.float32) for value in (1, 2))
    bit = np.nextafter(one, two)
    found = fingerprint((one, two), (two, two))
    assert found == fingerprint((one.copy(), two.copy()), (two.copy(), two.copy()))
    others = [
        fingerprint((bit, two), (two, two)),
        fingerprint((two, one), (two, two)),
        fingerprint((two, two), (one, two)),
        fingerprint((one, two)),
        fingerprint((one, two), (two, two), (two, two)),
    ]
    assert len({found, *others}) == 6
    assert len(found) == 64


def test_the_file_states_how_its_margins_were_made() -> None:
    """Seed, resamples and level; and the sums that the next build is held against."""
    data = errors_to_remember(_noisy(0.1))
    assert data["margin"]["bootstrap"] == {"resamples": 1000, "seed": 0, "level": 0.9999}
    rows = {row["metric"]: row for row in data["errors"]}
    assert {metric for metric, row in rows.items() if "samples" in row} == {
        "sqnr_db",
        "mean_abs_error",
    }
    assert len(rows["sqnr_db"]["samples"]) == 16
    noise = math.fsum(rows["sqnr_db"]["samples"])
    assert noise / 160 == pytest.approx(rows["rmse"]["value"] ** 2, rel=1e-4)


@pytest.mark.parametrize("broken", [math.nan, math.inf, 0.0])
@pytest.mark.parametrize("use", [errors_to_remember, Edgeq().suggest_budget])
def test_what_is_not_finite_or_zero_is_refused(
    broken: float, use: Callable[[Comparison], object]
) -> None:
    """Neither is remembered, nor made a budget of."""
    left = np.zeros((1, 3))
    comparison = _comparison((left, left + broken))
    with pytest.raises(AssertionError, match="net: total, output 'y': "):
        use(comparison)


def test_a_suggested_budget_is_rounded_outward_and_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The measurement keeps it, and what is printed makes it."""
    comparison = _noisy(0.02)
    budget = Edgeq().suggest_budget(comparison)
    assert set(budget.bounds()) == {
        "max_lsb_error",
        "sqnr_db",
        "cosine_similarity",
        "top1_agreement",
    }
    assert budget.violations(comparison.total, "total") == []
    assert eval(capsys.readouterr().out, {"Budget": Budget}) == budget
    for metric, bound in budget.bounds().items():
        assert float(f"{bound:.3g}") == bound or metric in ("cosine_similarity", "top1_agreement")


@pytest.mark.parametrize("flow", ["recipe", "pt2e"])
def test_a_budget_leaves_what_a_rebuild_explains(flow: str) -> None:
    """The one margin: 4 dB in a recipe, where samples as alike as these leave far less."""
    generator = np.random.default_rng(0)
    values = [generator.normal(size=(1, 1000)) for _ in range(32)]
    noises = [0.02 * generator.normal(size=(1, 1000)) for _ in range(32)]
    comparison = replace(
        _comparison(*((x, x + e) for x, e in zip(values, noises, strict=True))), flow=flow
    )

    budget = Edgeq().suggest_budget(comparison)

    rows = {row["metric"]: row for row in errors_to_remember(comparison)["errors"]}
    floor = {"recipe": 4.0, "pt2e": 1.5}[flow]
    assert comparison.total.sqnr_db - rows["sqnr_db"]["worst"] == pytest.approx(floor, abs=0.01)
    assert budget.sqnr_db is not None
    assert 0 <= rows["sqnr_db"]["worst"] - budget.sqnr_db < 0.1
    rebuilt = 10 ** ((floor - 0.1) / 20)
    moved = _comparison(*((x, x + rebuilt * e) for x, e in zip(values, noises, strict=True)))
    assert budget.violations(moved.total, "total") == []
    worse = 10 ** ((floor + 0.2) / 20)
    moved = _comparison(*((x, x + worse * e) for x, e in zip(values, noises, strict=True)))
    assert "sqnr_db" in budget.violations(moved.total, "total")[0].symptom


def test_metrics_that_are_infinite_are_left_out() -> None:
    """An exact output of one class has a greatest error only, where float rounding stands."""
    values = [np.full((1, 1), float(n)) for n in range(1, 9)]
    budget = Edgeq().suggest_budget(_comparison(*((x, x) for x in values), scale=None))
    assert "top1_agreement" not in budget.bounds()
    assert "max_lsb_error" not in budget.bounds()
    assert all(map(math.isfinite, budget.bounds().values()))


def test_outside_of_a_test_nothing_is_remembered() -> None:
    """As `check_op_dtypes` says it."""
    with pytest.raises(RuntimeError, match="check_errors remembers by test: call it on the fix"):
        Edgeq().check_errors(_noisy(0.1))


def test_sums_beyond_float64_are_refused() -> None:
    """Every element is finite, and their squares are not."""
    x = np.full((1, 3), 1e300)
    with pytest.raises(AssertionError, match="sums beyond float64"):
        errors_to_remember(_comparison(*((x, -x) for _ in range(8))))


@pytest.mark.parametrize("method", ["check_errors", "suggest_budget"])
def test_a_model_is_no_comparison(add: QuantizedModel, method: str) -> None:
    """The text says what to give."""
    with pytest.raises(
        TypeError, match=f"{method}: expected a result of .*, got Quant.*; compare it first"
    ):
        getattr(Edgeq(), method)(add)


def test_a_language_model_is_remembered_by_quarter_and_worst_position() -> None:
    """Beside all metrics of the whole, of which none is missing."""
    data = errors_to_remember(comparison(sequences()))
    stored: dict[str, set[str]] = {}
    for row in data["errors"]:
        stored.setdefault(row["output"], set()).add(row["metric"])
    parts = [*(f"logits, quarter {n}" for n in (1, 2, 3, 4)), "logits, worst position"]
    assert list(stored) == ["logits", *parts]
    assert stored["logits"] >= {"sqnr_db", "kl", "perplexity_ratio", "top1_agreement"}
    assert all(stored[each] == {"sqnr_db"} for each in parts)
    assert Evaluation(comparison(sequences())).refusal(data) is None


def test_a_rebuilt_language_model_keeps_its_limits() -> None:
    """Other noise of the same size is no regression, in whatever part."""
    data = [errors_to_remember(comparison(sequences(build=build))) for build in range(6)]
    assert [describe_change(data[0], each) for each in data[1:]] == [None] * 5


def test_a_loss_in_the_last_quarter_alone() -> None:
    """The whole is within its margin; the quarter is not."""
    lossy = sequences(broken, start=60, size=0.085, build=1)
    before, after = (errors_to_remember(comparison(each)) for each in (sequences(), lossy))
    found = describe_change(before, after)
    assert found is not None
    assert found.title.startswith(
        "errors regressed: total, output 'logits, quarter 4': sqnr_db: expected at least "
    )
    worse = [line.split("  ")[1] for line in found.evidence if "logits" in line]
    assert "logits" not in worse


def test_a_loss_at_one_position_alone() -> None:
    """One of 80 positions has an error of a tenth of its signal, which no quarter shows."""

    def spoiled(reference: Array, seed: int) -> Array:
        found = noisy(reference, seed, build=1)
        found[40] = noisy(reference, seed, size=0.22, build=2)[40]
        return found

    before, after = (
        errors_to_remember(comparison(each)) for each in (sequences(), sequences(spoiled))
    )
    found = describe_change(before, after)
    assert found is not None
    assert "output 'logits, worst position': sqnr_db" in found.title
    assert not any("quarter" in line for line in found.evidence), found.evidence


def test_the_budget_of_a_language_model() -> None:
    """It bounds what shows a broken cache, and a rebuild keeps it."""
    budget = Edgeq().suggest_budget(comparison(sequences()))
    assert set(budget.bounds()) == {"sqnr_db", "top1_agreement", "kl", "perplexity_ratio"}
    rebuilt = comparison(sequences(build=1))
    assert budget.violations(rebuilt.total, "total") == []
    worse = comparison(sequences(broken, start=40))
    assert len(budget.violations(worse.total, "total")) == 4
