"""Failures carry what is wrong as data: kind, place, expected and got."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest

from fixtures.models import DepthwiseSeparable, samples
from pytest_edgeq import (
    Budget,
    assert_no_float_ops,
    assert_op_counts,
    assert_op_dtypes,
    assert_output_dtypes,
    assert_qparams,
    assert_runtimes_agree,
    assert_size,
    assert_within_budget,
)
from pytest_edgeq.errors import UnmatchedError, findings_of
from pytest_edgeq.numerics.findings import (
    NONFINITE,
    OVER_BUDGET,
    RUNTIMES_DIFFER,
    UNEXPECTED_COUNT,
    UNEXPECTED_DTYPE,
    UNEXPECTED_QPARAMS,
    UNMATCHED,
    Finding,
    Place,
)

ADD = Place("op", "ADD", 5, "layer1.0")
CONV = Place("op", "CONV_2D", 1, "stem")


def failed(check: Callable[[], None]) -> tuple[Finding, ...]:
    """Return the findings of a check that fails."""
    with pytest.raises(AssertionError) as caught:
        check()
    return findings_of(caught.value)


@pytest.mark.parametrize(
    ("model", "check", "kind", "place", "expected", "got"),
    [
        (
            "static",
            lambda model: assert_output_dtypes(model, "float32"),
            *(UNEXPECTED_DTYPE, Place("output", "output_0"), "float32", "int8"),
        ),
        (
            "non_strict",
            lambda model: assert_op_dtypes(model, "ADD", input="int8"),
            *(UNEXPECTED_DTYPE, ADD, "int8", "float32"),
        ),
        (
            "non_strict",
            lambda model: assert_no_float_ops(model, allow=("TRANSPOSE", "MEAN")),
            *(UNEXPECTED_DTYPE, ADD, "no float", "float32"),
        ),
        (
            "pt2e",
            lambda model: assert_op_dtypes(model, "CONV_2D", count=4),
            *(UNEXPECTED_COUNT, Place("op", "CONV_2D"), "4", "3"),
        ),
        (
            "non_strict",
            lambda model: assert_op_counts(model, {"DEQUANTIZE": 1}),
            *(UNEXPECTED_COUNT, Place("op", "DEQUANTIZE"), "1", "3"),
        ),
        (
            "per_tensor",
            lambda model: assert_qparams(model, "CONV_2D", granularity="per_channel"),
            *(UNEXPECTED_QPARAMS, CONV, "per_channel", "per_tensor"),
        ),
        (
            "depthwise",
            lambda model: assert_runtimes_agree(model, samples(DepthwiseSeparable, 4), 0),
            *(RUNTIMES_DIFFER, Place("output", "output_0"), "at most 0 LSB", "1"),
        ),
    ],
)
def test_place_and_values_are_fields(
    request: pytest.FixtureRequest,
    model: str,
    check: Callable[[Any], None],
    kind: str,
    place: Place,
    expected: str,
    got: str,
) -> None:
    """Every assertion on dtypes, counts, parameters and codes raises one finding."""
    (found,) = failed(lambda: check(request.getfixturevalue(model)))
    assert (found.kind, found.place, found.expected, found.got) == (kind, place, expected, got)
    assert found.evidence
    assert found.causes
    assert found.command


def test_a_size_is_a_place_of_the_file(static: Any) -> None:
    """Which has no op to blame."""
    (found,) = failed(lambda: assert_size(static, max_bytes=10))
    assert (found.kind, found.place.kind) == (OVER_BUDGET, "file")
    assert (found.expected, found.got) == ("at most 10 bytes", f"{static.size_bytes:,}")
    assert found.title == f"size: expected at most 10 bytes, got {static.size_bytes:,}"


def test_each_violated_bound_is_a_finding(comparison: Any) -> None:
    """The first one has the cause and the budget that the measurement needs."""
    made = comparison(boxes=(10.0, float("nan")))
    first, second = failed(lambda: assert_within_budget(made, Budget(max_abs_error=0.25)))
    assert (first.kind, first.place, first.got) == (NONFINITE, Place("output", "boxes"), "1")
    assert (second.kind, second.place) == (OVER_BUDGET, Place("output", "scores"))
    assert (second.expected, second.got) == ("at most 0.25", "0.5")
    assert first.causes == ("the reference is finite; the file gives NaN or infinities",)
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
