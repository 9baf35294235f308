"""The comparison: its stages, its table, the samples it keeps."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fixtures.token_logits import broken, sequences
from fixtures.token_logits import comparison as of_tokens
from pytest_edgeq.numerics.comparison import Comparison, PointSample, WorstSample, WorstSamples
from pytest_edgeq.numerics.error_sums import IOSpec, StageAccumulator
from pytest_edgeq.numerics.findings import Finding, Place
from pytest_edgeq.numerics.results import StageErrors

TABLE = """\
digits: flow pt2e, runtime xnnpack, 1 sample(s), 0 non-finite element(s)
stage     output  max_abs_error  mean_abs_error    rmse  max_lsb_error  sqnr_db  \
worst_sample_sqnr_db  cosine_similarity  top1_agreement
lowering  scores              0               0       0              0      inf  \
                 inf           1.000000               1
lowering  boxes               0               0       0              -      inf  \
                 inf           1.000000               -
total     scores              1             0.5  0.7071              2    12.3  \
                 12.3           0.976187               1
total     boxes               2               2       2              -    12.04  \
               12.04           1.000000               -
"""


def stage(error: float) -> StageErrors:
    """Return the errors of a quantized and a float output that are off by this."""
    accumulator = StageAccumulator([IOSpec("scores", 0.5), IOSpec("boxes")])
    accumulator.update(
        [np.array([[4.0, 1.0]]), np.array([8.0])],
        [np.array([[4.0, 1.0 + error]]), np.array([8.0 - 2 * error])],
    )
    return accumulator.result()


def comparison(**kwargs: Any) -> Comparison:
    """Return a comparison with a lowering stage."""
    return Comparison(
        name="digits", flow="pt2e", runtime="xnnpack", total=stage(1), lowering=stage(0), **kwargs
    )


def test_str_is_a_table() -> None:
    """One row for each output of each stage, a dash where there is no such metric."""
    assert list(comparison(quantization=stage(1), conversion=stage(1)).stages) == [
        *("conversion", "quantization", "lowering", "total")
    ]
    lines = str(comparison()).splitlines()
    assert [line.split() for line in lines[:-1]] == [line.split() for line in TABLE.splitlines()]
    assert len({len(line) for line in lines[1:-1]}) == 1
    assert lines[-1] == "health: nothing found"


def test_str_ends_with_the_findings() -> None:
    """Every finding has its line."""
    finding = Finding(
        kind="zero_output", place=Place("output", "scores"), symptom="zero everywhere"
    )
    text = str(comparison(health=(finding,)))
    assert text.endswith("\nhealth: zero_output: output 'scores': zero everywhere")


def test_a_language_model_has_two_more_metrics_and_a_line_by_position() -> None:
    """The text and the data of other models have no positions."""
    measured = of_tokens(sequences(broken, start=60))
    head, columns, _, line, health = str(measured).splitlines()
    assert head.startswith("lm: ")
    assert columns.split()[6:8] == ["kl", "perplexity_ratio"]
    assert line.startswith("total by position: worst at position ")
    assert health == "health: nothing found"
    data = measured.to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["positions"]["total"]["n"] == [8] * 80
    assert {"kl", "perplexity_ratio"} <= data["stages"]["total"].keys()
    plain = comparison()
    assert not {"positions"} & plain.to_dict().keys()
    for each in (plain.total, plain.total.outputs["scores"]):
        assert not {"kl", "perplexity_ratio"} & each.to_dict().keys()


def test_errors_by_position() -> None:
    """They are those of a stage; other models have none."""
    measured = of_tokens(sequences())
    assert measured.by_position() is measured.positions["total"]
    with pytest.raises(ValueError, match="lm has no such stage; it has total"):
        measured.by_position("conversion")
    with pytest.raises(ValueError, match="digits has no errors by position: it is not measured as"):
        comparison().by_position()


def test_to_dict_leaves_the_inputs_out() -> None:
    """What is stored is strict JSON, and no tensor is in it."""
    worst = WorstSample(4, -math.inf, object())
    finding = Finding(kind="zero_output", place=Place("output", "y"), symptom="zero")
    data = comparison(worst_samples=(worst,), health=(finding,)).to_dict()
    text = json.dumps(data, allow_nan=False)
    assert text == json.dumps(data, sort_keys=True)
    assert data["worst_samples"] == [{"index": 4, "sqnr_db": "-inf"}]
    (health,) = data["health"]
    assert (health["kind"], health["where"], health["message"]) == (
        "zero_output",
        "output 'y'",
        "zero",
    )
    assert Finding.from_dict(health) == finding
    assert list(data["stages"]) == ["lowering", "total"]


def number(value: int) -> Callable[[], int]:
    """Return a maker of inputs."""
    return lambda: value


def test_worst_samples_clones_only_what_it_keeps() -> None:
    """Inputs are made when a sample is kept and not otherwise."""
    made = []
    keeper = WorstSamples()
    for index, sqnr in enumerate([30.0, 20.0, 40.0, 10.0, 50.0]):
        keeper.offer(index, sqnr, lambda index=index: made.append(index))  # type: ignore[misc]
    assert made == [0, 1, 2, 3]
    assert [sample.index for sample in keeper.result()] == [3, 1, 0]


def test_nan_is_the_worst_sample_then_minus_infinity() -> None:
    """NaN comes before −inf, and −inf before every number."""
    keeper = WorstSamples()
    for index, sqnr in enumerate([5.0, -math.inf, math.nan, math.inf, -3.0]):
        keeper.offer(index, sqnr, number(index))
    assert [sample.inputs for sample in keeper.result()] == [2, 1, 4]


@given(st.lists(st.sampled_from([1.0, 2.0, 3.0, math.nan, -math.inf])), st.integers(0, 9))
def test_worst_samples_merge_without_a_trace(values: list[float], cut: int) -> None:
    """Two keepers merged keep what one keeps, whichever came first."""
    offers = list(enumerate(values))
    keepers = []
    for part in (offers, offers[:cut], offers[cut:]):
        keeper = WorstSamples()
        for index, sqnr in part:
            keeper.offer(index, sqnr, number(index))
        keepers.append(keeper)
    one, first, second = keepers
    second.merge(first)
    assert repr(second.result()) == repr(one.result())


def _sides(size: int, count: int) -> list[dict[str, np.ndarray[tuple[int], np.dtype[np.float32]]]]:
    generator = np.random.default_rng(17)
    values = [generator.normal(size=size).astype(np.float32) for _ in range(count)]
    return [{"float": each, "edge": each + np.float32(0.5)} for each in values]


@pytest.mark.parametrize("size", [3, 100, 5000])
def test_any_split_keeps_the_same_elements(size: int) -> None:
    """Two threads that share the samples keep what one keeps."""
    whole, even, odd = PointSample(), PointSample(), PointSample()
    for index, sides in enumerate(_sides(size, 100)):
        whole.update(index, sides)
        (odd if index % 3 else even).update(index, sides)
    odd.merge(even)
    kept = whole.result()
    for side, values in odd.result().items():
        assert np.array_equal(values, kept[side])
    assert 0 < kept["edge"].size <= 2048
