"""Outputs that hold a choice, in files that are written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fixtures.tflite.writer import chain, constant
from pytest_edgeq import Budget, Edgeq, assert_within_budget
from pytest_edgeq.numerics.error_sums import match_counts
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.tflite.ends import choices
from tests.checked import checked

Array = npt.NDArray[Any]

_ROWS, _CLASSES, _BEST = 10, 12, 4
_STEP = 1 / 64
_CODES = np.random.default_rng(0).integers(-60, 61, (_CLASSES, 16)).astype(np.int8)
_BOXES = np.random.default_rng(1).uniform(0, 100, (_CLASSES, 4)).astype(np.float32)


def _scores(x: Any) -> Array:
    return np.asarray(np.asarray(x) @ (_CODES.T * np.float32(_STEP)))


def _labels(x: Any) -> Array:
    return np.asarray(_scores(x).argmax(axis=1), np.int32)


def _boxes(x: Any) -> tuple[Array, Array]:
    scores = _scores(x)[0]
    order = np.argsort(-scores, kind="stable")[:_BEST]
    return scores[order], _BOXES[order]


def _mask(x: Any) -> Array:
    return np.asarray(_scores(x) > 0)


def _content(rows: int, peak: float, *ops: tuple[Any, ...], outputs: str, **tensors: Any) -> bytes:
    """Write the layer that makes scores, whose codes reach up to a peak, and ops on them."""
    return chain(
        ("FULLY_CONNECTED", "x w -", "scores", "FullyConnectedOptions"),
        *ops,
        inputs="x",
        outputs=outputs,
        x={"dtype": "int8", "shape": (rows, 16), "scales": [1 / 127]},
        w={"dtype": "int8", "shape": _CODES.shape, "data": _CODES, "scales": [_STEP]},
        scores={"dtype": "int8", "shape": (rows, _CLASSES), "scales": [peak / 127]},
        axis=constant([1], "int32"),
        **tensors,
    )


_ARG_MAX = ("ARG_MAX", "scores axis", "labels", "ArgMaxOptions", {"outputType": 2})


def _labelled(peak: float = 8.0) -> bytes:
    labels = {"dtype": "int32", "shape": (_ROWS,)}
    return _content(_ROWS, peak, _ARG_MAX, outputs="labels", labels=labels)


def _best(peak: float = 8.0) -> bytes:
    codes = {"dtype": "int8", "scales": [peak / 127]}
    return _content(
        1,
        peak,
        ("RESHAPE", "scores shape", "flat", "ReshapeOptions", {"newShape": [_CLASSES]}),
        ("TOPK_V2", "flat count", "values order", "TopKV2Options"),
        ("GATHER", "table order", "boxes", "GatherOptions"),
        outputs="values boxes",
        shape=constant([_CLASSES], "int32"),
        flat=codes | {"shape": (_CLASSES,)},
        count=constant(_BEST, "int32"),
        values=codes | {"shape": (_BEST,)},
        order={"dtype": "int32", "shape": (_BEST,)},
        table=constant(_BOXES),
        boxes={"shape": (_BEST, 4)},
    )


def _compared(peak: float = 8.0) -> bytes:
    greater = ("GREATER", "scores zero", "mask", "GreaterOptions")
    zero = constant([0], "int8", scales=[peak / 127])
    mask = {"dtype": "bool", "shape": (_ROWS, _CLASSES)}
    return _content(_ROWS, peak, greater, outputs="mask", zero=zero, mask=mask)


def _samples(rows: int, n: int = 8) -> list[Array]:
    return list(np.random.default_rng(2).uniform(-1, 1, (n, rows, 16)).astype(np.float32))


_CASES: dict[str, tuple[Callable[..., bytes], Any, int]] = {
    "labels": (_labelled, _labels, _ROWS),
    "boxes": (_best, _boxes, 1),
    "mask": (_compared, _mask, _ROWS),
}


@pytest.mark.parametrize("case", _CASES)
def test_near_ties_pass_and_are_noted(case: str) -> None:
    """Coarse scores exchange some that are nearly equal, which SQNR would count as a loss."""
    content, reference, rows = _CASES[case]
    model = Edgeq().load(content(peak=24.0), reference=reference, name="choice")
    comparison = Edgeq().compare(model, _samples(rows))
    agreement = comparison.total.outputs[case].top1_agreement
    assert agreement is not None
    assert 0.5 < agreement < 1
    text, told = checked(model, _samples(rows))
    assert text == ""
    assert any(f"output {case!r}: " in each and "dB SQNR" in each for each in told), told


@pytest.mark.parametrize("case", _CASES)
def test_scores_of_which_nothing_is_left_are_found(case: str) -> None:
    """Of a range that is far too wide."""
    content, reference, rows = _CASES[case]
    model = Edgeq().load(content(peak=3000.0), reference=reference, name="choice")
    text, _ = checked(model, _samples(rows))
    assert f"output {case!r}: expected the choices of " in text
    assert "the scores that it chooses by, of FULLY_CONNECTED #0, have " in text


def test_budgets_bound_the_matches() -> None:
    """As `top1_agreement`; it is what `suggest_budget` gives."""
    model = Edgeq().load(_labelled(peak=24.0), reference=_labels, name="labels")
    comparison = Edgeq().compare(model, _samples(_ROWS, 40))
    budget = Edgeq().suggest_budget(comparison)
    assert budget.sqnr_db is None
    assert budget.top1_agreement is not None
    assert_within_budget(comparison, budget)
    with pytest.raises(AssertionError, match="top1_agreement"):
        assert_within_budget(comparison, Budget(top1_agreement=1.0))


def test_what_holds_no_choice_is_none() -> None:
    """Sorted values are nearly the reference's; a choice inside of a network decides no output."""
    edge = EdgeFile(_best())
    assert list(choices(edge.graph, edge.signature)) == ["boxes"]
    row = {"shape": (1, _CLASSES)}
    content = _content(
        1,
        8.0,
        _ARG_MAX,
        ("CAST", "labels", "floats", "CastOptions"),
        ("DEQUANTIZE", "scores", "decoded", "DequantizeOptions"),
        ("MUL", "decoded floats", "result", "MulOptions"),
        outputs="result",
        labels={"dtype": "int32", "shape": (1,)},
        floats={"shape": (1,)},
        decoded=row,
        result=row,
    )
    edge = EdgeFile(content)
    assert choices(edge.graph, edge.signature) == {}


def test_rows_match_within_the_spread_of_their_columns() -> None:
    """Whole numbers, such as a class, must be equal."""
    rows = np.array([[10.5, 0.5, 3], [50.5, 0.1, 7], [90.5, 0.9, 7]])
    assert match_counts(rows, rows + np.array([2.0, 0.02, 0])) == (3, 3)
    assert match_counts(rows, rows[[1, 0, 2]]) == (1, 3)
    assert match_counts(rows, rows + np.array([0, 0, 1])) == (0, 3)
    assert match_counts(np.array([1, 2, 3]), np.array([1, 2, 4])) == (2, 3)
    assert match_counts(np.array([[1.0, 2.0]]), np.array([[1.0, 3.0]])) == (1, 2)
    assert match_counts(np.array(4.0), np.array(4.0)) == (1, 1)
    assert match_counts(np.empty((0, 4)), np.empty((0, 4))) == (0, 0)
