"""Failures carry what is wrong as data: kind, place, expected and got."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest

from pytest_edgeq import (
    Budget,
    assert_input_dtypes,
    assert_no_float_ops,
    assert_op_counts,
    assert_op_dtypes,
    assert_output_dtypes,
    assert_qparams,
    assert_within_budget,
)
from pytest_edgeq.errors import UnmatchedError, findings_of
from pytest_edgeq.numerics.findings import (
    NONFINITE,
    OVER_BUDGET,
    UNEXPECTED_COUNT,
    UNEXPECTED_DTYPE,
    UNEXPECTED_QPARAMS,
    UNMATCHED,
    Finding,
    Place,
)
from tests.assertions.conftest import comparison, golden


def failed(check: Callable[[], None]) -> tuple[Finding, ...]:
    """Return the findings of a check that fails."""
    with pytest.raises(AssertionError) as caught:
        check()
    return findings_of(caught.value)


Check = Callable[[Any], None]
CASES: dict[str, tuple[str, Check, str, str, str]] = {
    "output_float": (
        "dynamic",
        lambda model: assert_output_dtypes(model, "int8"),
        *(UNEXPECTED_DTYPE, "int8", "float32"),
    ),
    # No quantizer of torch writes it: the text says what a caller makes of int8.
    "input_not_uint8": (
        "static",
        lambda model: assert_input_dtypes(model, "uint8"),
        *(UNEXPECTED_DTYPE, "uint8", "int8"),
    ),
    # PT2E misses ADD without a word where the export was not strict.
    "op_add_float": (
        "non_strict",
        lambda model: assert_op_dtypes(model, "ADD", input="int8", output="int8"),
        *(UNEXPECTED_DTYPE, "int8", "float32"),
    ),
    "op_per_tensor": (
        "per_tensor",
        lambda model: assert_op_dtypes(model, "CONV_2D", granularity="per_channel"),
        *(UNEXPECTED_DTYPE, "per_channel", "per_tensor"),
    ),
    "op_count": (
        "pt2e",
        lambda model: assert_op_dtypes(model, "CONV_2D", count=4),
        *(UNEXPECTED_COUNT, "4", "3"),
    ),
    "counts": (
        "non_strict",
        lambda model: assert_op_counts(model, {"ADD": 2, "DEQUANTIZE": 1, "QUANTIZE": 1}),
        *(UNEXPECTED_COUNT, "1", "3"),
    ),
    "no_float_ops": (
        "non_strict",
        lambda model: assert_no_float_ops(model, allow=["TRANSPOSE", "MEAN"]),
        *(UNEXPECTED_DTYPE, "no float", "float32"),
    ),
    "no_float_ops_pt2e": (
        "pt2e",
        lambda model: assert_no_float_ops(model, allow=["TRANSPOSE"]),
        *(UNEXPECTED_DTYPE, "no float", "float32"),
    ),
    "no_float_ops_dynamic": (
        "dynamic",
        assert_no_float_ops,
        *(UNEXPECTED_DTYPE, "no float", "float32"),
    ),
    "no_float_ops_plain": (
        "plain",
        assert_no_float_ops,
        *(UNEXPECTED_DTYPE, "no float", "float32"),
    ),
    "qparams_granularity": (
        "per_tensor",
        lambda model: assert_qparams(model, granularity="per_channel"),
        *(UNEXPECTED_QPARAMS, "per_channel", "per_tensor"),
    ),
    "qparams_scale_range": (
        "static",
        lambda model: assert_qparams(
            model, "CONV_2D", "layer1.*", role="output", scale_range=(1e-4, 2e-4)
        ),
        *(UNEXPECTED_QPARAMS, "0.0001 … 0.0002", "scale 0.00849691, range [-1.33, 0.841]"),
    ),
    "qparams_float": (
        "plain",
        lambda model: assert_qparams(model, "CONV_2D", symmetric=True),
        *(UNEXPECTED_QPARAMS, "a scale", "float32"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_texts_and_fields(request: pytest.FixtureRequest, name: str) -> None:
    """The golden text, rendered from one finding with kind, place, expected and got."""
    model, check, kind, expected, got = CASES[name]
    text, found = golden(name, lambda: check(request.getfixturevalue(model)))
    assert (found.kind, found.expected, found.got) == (kind, expected, got)
    assert text.startswith(str(found.place))
    assert found.evidence
    assert found.causes


def test_each_violated_bound_is_a_finding() -> None:
    """The first one has the cause and the budget that the measurement needs."""
    made = comparison(boxes=(10.0, float("nan")))
    first, second = failed(lambda: assert_within_budget(made, Budget(max_abs_error=0.25)))
    assert (first.kind, first.place, first.got) == (NONFINITE, Place("output", "boxes"), "1")
    assert (second.kind, second.place) == (OVER_BUDGET, Place("output", "scores"))
    assert (second.expected, second.got) == ("at most 0.25", "0.5")
    assert first.causes == ("the reference is finite; the file has NaN or infinities",)
    # No budget accepts NaN.
    assert first.command == ""

    (found,) = failed(lambda: assert_within_budget(comparison(), Budget(max_abs_error=0.25)))
    assert found.command == "Budget(max_abs_error=0.5) (total)"


def test_what_matches_nothing_is_a_finding(static: Any) -> None:
    """Also where the error came from another process."""
    with pytest.raises(UnmatchedError) as caught:
        assert_op_dtypes(static, "SOFTMAX", output="int8")
    (found,) = findings_of(caught.value)
    assert (found.kind, found.title) == (UNMATCHED, str(caught.value))
    assert findings_of(pickle.loads(pickle.dumps(caught.value))) == (found,)
