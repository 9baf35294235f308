"""Budgets: what they refuse, what violates them, what a measurement needs."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_edgeq.numerics.budget import Budget
from pytest_edgeq.numerics.findings import NONFINITE, ZERO_OUTPUT
from pytest_edgeq.numerics.results import OutputErrors, StageErrors
from tests.numerics.test_numerics_errors import stage_of

ALL = (
    "max_abs_error, mean_abs_error, rmse, max_lsb_error, sqnr_db, worst_sample_sqnr_db, "
    "cosine_similarity, top1_agreement, kl, perplexity_ratio"
)


def output_of(reference: Any, actual: Any, scale: float | None = 0.5) -> OutputErrors:
    """Return the errors of one output named scores."""
    return stage_of(scores=(reference, actual, scale)).outputs["scores"]


@pytest.mark.parametrize(("value", "shown"), [(30, "30"), (np.ones(3), "ndarray of shape [3]")])
def test_a_bound_without_a_name(value: Any, shown: str) -> None:
    """The text says which name it needs."""
    message = f"Budget({shown}): a bound needs its name: did you mean sqnr_db=…?"
    with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
        Budget(value)  # type: ignore[call-arg] # what is tested


UNKNOWN = f"no such bound{{}}\n  bounds: {ALL}"


@pytest.mark.parametrize(
    ("bounds", "error", "message"),
    [
        # It would pass anything.
        ({}, ValueError, f" bounds nothing and would pass anything: set one of {ALL}"),
        ({"sqnr": 30}, TypeError, UNKNOWN.format(" (did you mean sqnr_db?)")),
        ({"top1": 0.9}, TypeError, UNKNOWN.format(" (did you mean top1_agreement?)")),
        ({"q": 0.9}, TypeError, UNKNOWN.format("")),
        *(
            ({"rmse": value}, TypeError, f"expected a real number, got {type(value).__name__}")
            for value in (True, "3", [1], 1 + 2j, np.True_)
        ),
        (
            {"sqnr_db": math.nan},
            ValueError,
            "expected a finite number; leave out what is not bounded",
        ),
        (
            {"max_abs_error": -1},
            ValueError,
            "an error is never negative; give the greatest accepted, 0 or more",
        ),
        (
            {"perplexity_ratio": 0.99},
            ValueError,
            "a ratio below 1 asks the file to predict better than its reference; give 1 or more, "
            "such as 1.02",
        ),
        (
            {"sqnr_db": 0},
            ValueError,
            "a bound of 0 dB or below accepts noise as loud as the signal and tests nothing; give "
            "a bound above 0 dB",
        ),
        (
            {"top1_agreement": 99},
            ValueError,
            "expected a share above 0 and at most 1, such as 0.99",
        ),
    ],
)
def test_bounds_that_are_refused(
    bounds: dict[str, Any], error: type[Exception], message: str
) -> None:
    """Each error says what was seen and what to do."""
    shown = "".join(
        f"{name}={value!r}" if "no such" not in message else f"{name}=…"
        for name, value in bounds.items()
    )
    colon = ": " if bounds else ""
    with pytest.raises(error, match=f"^{re.escape(f'Budget({shown}){colon}{message}')}$"):
        Budget(**bounds)


def test_an_array_is_shown_by_its_shape() -> None:
    """Not by its elements."""
    message = re.escape("Budget(rmse=ndarray of shape [64, 10]): expected a real number, got nd")
    with pytest.raises(TypeError, match=f"^{message}"):
        Budget(rmse=np.ones((64, 10)))  # type: ignore[arg-type] # what is tested


def test_repr_is_ready_to_paste() -> None:
    """Only what is set is shown, and the text makes the same budget."""
    budget = Budget(sqnr_db=20.5, max_lsb_error=3)
    assert repr(budget) == "Budget(max_lsb_error=3, sqnr_db=20.5)"
    assert eval(repr(budget), {"Budget": Budget}) == budget


def test_numpy_numbers_become_plain() -> None:
    """A bound read from an array is shown as a number, not as np.float64(...)."""
    budget = Budget(max_lsb_error=np.int64(3), rmse=np.float32(0.5), max_abs_error=Fraction(1, 4))  # type: ignore[arg-type]
    assert repr(budget) == "Budget(max_abs_error=0.25, rmse=0.5, max_lsb_error=3)"


def test_bounds_are_kept_and_passed() -> None:
    """A measurement at the bound itself passes, one beyond it does not."""
    errors = output_of([[4.0, 2.0]], [[4.0, 1.0]])
    assert Budget(max_lsb_error=2, max_abs_error=1, top1_agreement=1).violations(errors, "t") == []
    violations = Budget(max_lsb_error=1.9, rmse=9, sqnr_db=50).violations(errors, "t")
    assert [each.symptom.split(":")[0] for each in violations] == ["t, max_lsb_error", "t, sqnr_db"]


@pytest.mark.parametrize(
    ("bounds", "text"),
    [
        (
            {"max_lsb_error": 1},
            "total, output 'scores': max_lsb_error: expected at most 1, got 2 "
            "(the greatest at sample 0, index (0, 1): expected 2, got 1)",
        ),
        ({"rmse": 0.5}, "total, output 'scores': rmse: expected at most 0.5, got 0.707107"),
        (
            {"worst_sample_sqnr_db": 40},
            "total, output 'scores': worst_sample_sqnr_db: expected at least 40, got 13.0103 "
            "(sample 0)",
        ),
    ],
)
def test_violation_texts(bounds: dict[str, float], text: str) -> None:
    """A violation reads what, where, expected, got, and where the worst is."""
    (violation,) = Budget(**bounds).violations(output_of([[4.0, 2.0]], [[4.0, 1.0]]), "total")
    assert violation.title == text
    assert violation.place.name == "scores"


def test_stage_budget_is_applied_to_each_output() -> None:
    """Both outputs that are off are named, not their worst alone."""
    stage = stage_of(a=([1.0], [3.0], 1.0), b=([1.0], [1.0], 1.0), c=([1.0], [2.0], 1.0))
    violations = Budget(max_abs_error=0.5).violations(stage, "total")
    assert [(v.place.name, v.expected, v.got) for v in violations] == [
        ("a", "at most 0.5", "2"),
        ("c", "at most 0.5", "1"),
    ]


def test_nonfinite_is_a_violation_by_itself() -> None:
    """NaN fails whatever is bounded, with its count and its place."""
    errors = output_of([[4.0, 2.0, 1.0]], [[4.0, math.nan, math.inf]])
    (violation,) = Budget(max_abs_error=1e30).violations(errors, "total")
    assert violation.kind == NONFINITE
    assert violation.title == (
        "total, output 'scores': nonfinite: expected at most 0, got 2 (2 in actual and 0 in the "
        "reference, of 3 elements; the first at sample 0, index (0, 1): expected 2, got nan)"
    )


def test_degenerate_is_a_violation_by_itself() -> None:
    """Zeros that agree keep every bound on errors, and fail all the same."""
    (violation,) = Budget(max_abs_error=1).violations(output_of([0.0], [0.0]), "total")
    assert violation.kind == ZERO_OUTPUT
    assert violation.title == (
        "total, output 'scores': degenerate: expected at most 0, got 1 (reference and actual are "
        "zero in all 1 elements: nothing was tested; use inputs for which this output is not zero)"
    )


@pytest.mark.parametrize("metric", ALL.split(", "))
def test_nan_violates_every_bound(metric: str) -> None:
    """A metric that reads NaN fails, whichever way it is bounded."""
    errors = errors_of(**dict.fromkeys(ALL.split(", "), math.nan))
    (violation,) = Budget(**{metric: 1}).violations(errors, "total")
    assert violation.symptom.startswith(f"total, {metric}: ")
    assert Budget(**{metric: 1}).needed(errors) is None


@pytest.mark.parametrize(
    ("metric", "why", "other"),
    [
        ("max_lsb_error", "has no scale, and so no LSB", "max_abs_error"),
        (
            "top1_agreement",
            "has no classes: it is not of rank 2 with 2 elements or more a row",
            "sqnr_db",
        ),
        ("kl", "is not the logits of a language model over a sequence of tokens", "sqnr_db"),
    ],
)
def test_metric_that_an_output_lacks_is_an_error(metric: str, why: str, other: str) -> None:
    """A bound on a metric that does not exist is no pass, and has no budget that it needs."""
    budget, errors = Budget(**{metric: 1.0}), output_of([1.0], [1.0], None)
    message = f"{metric}: output 'scores' {why}; bound {other} instead"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        budget.violations(errors, "total")
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        budget.needed(errors)


def test_stage_budget_names_the_outputs_that_lack_the_metric() -> None:
    """One output without a scale makes an LSB budget on the whole stage an error."""
    stage = stage_of(a=([1.0], [1.0], 1.0), b=([1.0], [1.0], None), c=([1.0], [1.0], None))
    message = (
        "max_lsb_error: output 'b' has no scale, and so no LSB, output 'c' has no scale, and so no "
        "LSB; bound max_abs_error instead, or give a budget per output"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Budget(max_lsb_error=1).violations(stage, "total")


@pytest.mark.parametrize(
    ("measured", "needed"),
    [
        ({"max_abs_error": 1.23456}, {"max_abs_error": 1.24}),
        ({"max_abs_error": 0.0}, {"max_abs_error": 0}),
        ({"max_abs_error": 1234567.0}, {"max_abs_error": 1240000.0}),
        ({"sqnr_db": 20.57}, {"sqnr_db": 20.5}),
        ({"cosine_similarity": 0.99987661}, {"cosine_similarity": 0.999876}),
        ({"cosine_similarity": 1.0}, {"cosine_similarity": 1}),
        ({"top1_agreement": 0.12345}, {"top1_agreement": 0.123}),
        ({"sqnr_db": math.inf}, {"sqnr_db": 1}),
        ({"sqnr_db": 0.0}, None),
        ({"top1_agreement": 0.0}, None),
        ({"max_abs_error": 1.7976931348623157e308}, None),
    ],
)
def test_needed_budget(measured: dict[str, float], needed: dict[str, float] | None) -> None:
    """Three digits outward, near 1 in the distance from 1; None where no budget is valid."""
    (budget,) = [Budget(**dict.fromkeys(measured, 1))]
    wanted = None if needed is None else Budget(**needed)
    got = budget.needed(errors_of(**measured))
    assert repr(got) == repr(wanted)


def errors_of(**metrics: float) -> OutputErrors:
    """Return errors that read these metrics, the others being good."""
    values: dict[str, Any] = dict.fromkeys(ALL.split(", "), 1.0) | metrics
    return OutputErrors(
        name="y",
        dtype="int8",
        scale=1.0,
        n_samples=1,
        n_elements=1,
        nonfinite_reference=0,
        nonfinite_actual=0,
        degenerate=False,
        worst_sample=0,
        max_abs_index=None,
        **values,
    )


ERRORS = st.floats(0, 1e300)
DECIBELS = st.one_of(st.floats(0, 1e3, exclude_min=True), st.just(math.inf))
SHARES = st.one_of(st.floats(0, 1, exclude_min=True), st.floats(0.999999, 1))


@given(
    st.fixed_dictionaries(
        dict.fromkeys(("max_abs_error", "mean_abs_error", "rmse", "max_lsb_error"), ERRORS)
        | dict.fromkeys(("sqnr_db", "worst_sample_sqnr_db"), DECIBELS)
        | dict.fromkeys(("cosine_similarity", "top1_agreement"), SHARES)
    )
)
def test_needed_budget_is_kept(metrics: dict[str, float]) -> None:
    """Whatever was measured, the budget that it needs has no violations, and can be pasted."""
    errors = errors_of(**metrics)
    stage = StageErrors({"y": errors, "z": errors_of()})
    for measured in (errors, stage):
        needed = Budget(**dict.fromkeys(metrics, 1)).needed(measured)
        assert needed is not None
        assert needed.violations(measured, "total") == []
        assert eval(repr(needed), {"Budget": Budget}) == needed
