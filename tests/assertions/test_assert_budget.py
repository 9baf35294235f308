"""assert_within_budget."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fixtures.models import ResidualNet, samples
from fixtures.token_logits import broken, sequences
from fixtures.token_logits import comparison as of_tokens
from pytest_edgeq import Budget, Comparison, Edgeq, QuantizedModel, assert_within_budget
from pytest_edgeq.errors import UnmatchedError
from pytest_edgeq.numerics.error_sums import IOSpec, StageAccumulator
from pytest_edgeq.numerics.findings import CLIPPED_INPUT, WRONG_OP, Finding, Place
from pytest_edgeq.numerics.results import StageErrors
from tests.assertions.conftest import comparison, golden

pytestmark = pytest.mark.figures


def stage(actual: float) -> StageErrors:
    """One stage with the outputs of the handmade comparison, `scores` off by one number."""
    accumulator = StageAccumulator([IOSpec("scores", 0.5), IOSpec("boxes")])
    accumulator.update(
        [np.array([[1.0, 2.0, 3.0]]), np.array([[10.0, 20.0]])],
        [np.array([[1.0, 2.0, 3.0 + actual]]), np.array([[10.0, 20.0]])],
    )
    return accumulator.result()


def nobody_asks() -> Finding:
    """Fail if the layers are localized."""
    raise AssertionError("unreachable, because the failure is no layer's")


def test_a_real_model_is_within_its_budget(static: QuantizedModel) -> None:
    """By position, by name, and a dict by output, over the stages of a recipe flow."""
    measured = Edgeq().compare(static, samples(ResidualNet, 4, seed=7))

    assert_within_budget(measured, Budget(sqnr_db=20, max_lsb_error=8))
    assert_within_budget(
        measured,
        total={"output_0": Budget(cosine_similarity=0.99)},
        quantization=Budget(sqnr_db=20),
        conversion=Budget(sqnr_db=80),
    )


def _of_stages(quantization: float, lowering: float, **known: Any) -> Comparison:
    return comparison(quantization=stage(quantization), lowering=stage(lowering), **known)


def _undefined() -> Comparison:
    made = StageAccumulator([IOSpec("scores")])
    made.update([np.array([[math.nan, 1.0]])], [np.array([[math.nan, 1.0]])])
    return replace(comparison(), total=made.result(), explain=nobody_asks)


OTHER_INPUTS = Finding(
    kind=CLIPPED_INPUT,
    place=Place("input", "image"),
    symptom="expected values within the range of its codes, [0, 0.5]",
)
LAYER = Finding(
    kind=WRONG_OP,
    place=Place("op", "CONV_2D", 1, "stem"),
    symptom="permuted",
    evidence=("1 of 1 ops matched:", "op  LSB"),
)
NARROW = {"total": Budget(max_abs_error=0.25)}
TEXTS: dict[str, tuple[Callable[[], Comparison], dict[str, Any]]] = {
    "budget": (comparison, NARROW),
    # The first position below the SQNR of the logits of a language model.
    "budget_positions": (
        lambda: of_tokens(sequences(broken, start=40)),
        {"total": Budget(sqnr_db=30, top1_agreement=0.95, kl=0.01, perplexity_ratio=1.02)},
    ),
    # Budgets by stage and output; the stage that loses most is named.
    "budget_stages": (
        lambda: _of_stages(0.1, 0.4),
        {
            "total": {"scores": Budget(max_lsb_error=0.5, sqnr_db=30), "boxes": None},
            "lowering": Budget(max_abs_error=0.2),
        },
    ),
    # No stage and no layer is blamed for what all of them show.
    "budget_inputs": (
        lambda: _of_stages(0.5, 0.0, health=(OTHER_INPUTS,), explain=nobody_asks),
        NARROW,
    ),
    # The sentence on the layer is before the tables, and its rows are the last.
    "budget_layer": (lambda: _of_stages(0.5, 0.0, explain=lambda: LAYER), NARROW),
    # NaN of the model itself is no layer's fault.
    "budget_nan_reference": (_undefined, {"total": Budget(sqnr_db=9)}),
}


@pytest.mark.parametrize("name", TEXTS)
def test_texts(name: str) -> None:
    """The golden texts."""
    measured, budgets = TEXTS[name]
    golden(name, lambda: assert_within_budget(measured(), **budgets))


def test_nan_fails_whatever_the_budget() -> None:
    """A generous budget does not forgive it, nor does None for the output that has it."""
    measured = comparison(boxes=(math.nan, math.inf))
    generous = Budget(max_abs_error=1e30)

    golden("budget_nan", lambda: assert_within_budget(measured, generous))
    with pytest.raises(AssertionError, match="output 'boxes': nonfinite: expected at most 0"):
        assert_within_budget(measured, {"scores": generous, "boxes": None})


def test_nan_in_a_stage_that_was_not_asked_for_fails() -> None:
    """The total is broken, though the budget is for another stage."""
    measured = comparison(scores=(math.nan, 2, 3), lowering=stage(0.0))
    with pytest.raises(AssertionError, match="total, output 'scores': nonfinite"):
        assert_within_budget(measured, lowering=Budget(max_abs_error=1))


RMSE, LSB = Budget(rmse=1), Budget(max_lsb_error=9)


@pytest.mark.parametrize(
    ("budget", "stages", "error", "text"),
    [
        (None, {}, ValueError, "was given no budget"),
        (RMSE, {"total": RMSE}, ValueError, "is given twice"),
        ({}, {}, ValueError, "bounds no output"),
        (0.5, {}, TypeError, "expected a Budget"),
        ({"scores": 0.5, "boxes": None}, {}, TypeError, "output 'scores': expected a Budget"),
        (
            None,
            {"conversion": RMSE},
            UnmatchedError,
            "pt2e flow of net has no stage 'conversion', .* total",
        ),
        ({"score": RMSE, "boxes": None}, {}, UnmatchedError, "'score' .did you mean scores"),
        ({"scores": RMSE}, {}, UnmatchedError, "output 'boxes' is left out"),
        (LSB, {}, UnmatchedError, "max_lsb_error: output 'boxes' has no scale"),
        (
            {"scores": None, "boxes": LSB},
            {},
            UnmatchedError,
            "max_lsb_error: output 'boxes' .*bound max_abs_error instead",
        ),
    ],
)
def test_misuse(budget: Any, stages: Any, error: type[Exception], text: str) -> None:
    """No budget, two, or something else; a stage, an output or a metric that is not there."""
    with pytest.raises(error, match=text):
        assert_within_budget(comparison(), *([] if budget is None else [budget]), **stages)


def test_swapped_arguments() -> None:
    """The text has them in the right order."""
    with pytest.raises(TypeError, match=r"got Budget; .*: assert_within_budget\(comparison, budg"):
        assert_within_budget(Budget(rmse=1), comparison())  # type: ignore[arg-type] # the subject


def test_no_budget_is_offered_for_a_broken_output() -> None:
    """One could be made of 2 dB, and nothing that fails would be told of it."""
    measured = comparison(scores=(1.0, 2.0, 0.0))
    with pytest.raises(AssertionError, match="less than one bit of the output is left") as caught:
        assert_within_budget(measured, total={"scores": Budget(sqnr_db=30), "boxes": None})
    assert "update" not in str(caught.value)
