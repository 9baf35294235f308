"""Outputs that hold a choice, in files that are written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fixtures.tflite.writer import FileWriter, GraphWriter
from pytest_edgeq import Budget, Edgeq, assert_within_budget
from pytest_edgeq.numerics.error_sums import match_counts
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.tflite.choices import choices
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


def _start(rows: int, peak: float) -> tuple[FileWriter, GraphWriter, int, int]:
    """Write the layer that makes scores, whose codes reach up to a peak."""
    file = FileWriter()
    graph = file.graph()
    x = graph.tensor("int8", (rows, 16), scales=[1 / 127], name="x")
    weights = graph.tensor("int8", _CODES.shape, data=_CODES, scales=[_STEP])
    scores = graph.tensor("int8", (rows, _CLASSES), scales=[peak / 127], name="scores")
    graph.op("FULLY_CONNECTED", [x, weights, -1], [scores], "FullyConnectedOptions")
    return file, graph, x, scores


def _labelled(peak: float = 8.0) -> bytes:
    file, graph, x, scores = _start(_ROWS, peak)
    axis = graph.tensor("int32", (1,), data=np.array([1], np.int32))
    labels = graph.tensor("int32", (_ROWS,), name="labels")
    graph.op("ARG_MAX", [scores, axis], [labels], "ArgMaxOptions", outputType=2)
    graph.borders([x], [labels])
    return file.content()


def _best(peak: float = 8.0) -> bytes:
    file, graph, x, scores = _start(1, peak)
    flat = graph.tensor("int8", (_CLASSES,), scales=[peak / 127])
    shape = graph.tensor("int32", (1,), data=np.array([_CLASSES], np.int32))
    graph.op("RESHAPE", [scores, shape], [flat], "ReshapeOptions", newShape=[_CLASSES])
    count = graph.tensor("int32", (), data=np.array(_BEST, np.int32))
    values = graph.tensor("int8", (_BEST,), scales=[peak / 127], name="values")
    order = graph.tensor("int32", (_BEST,), name="order")
    graph.op("TOPK_V2", [flat, count], [values, order], "TopKV2Options")
    table = graph.tensor("float32", _BOXES.shape, data=_BOXES)
    boxes = graph.tensor("float32", (_BEST, 4), name="boxes")
    graph.op("GATHER", [table, order], [boxes], "GatherOptions")
    graph.borders([x], [values, boxes])
    return file.content()


def _compared(peak: float = 8.0) -> bytes:
    file, graph, x, scores = _start(_ROWS, peak)
    zero = graph.tensor("int8", (1,), data=np.zeros(1, np.int8), scales=[peak / 127])
    mask = graph.tensor("bool", (_ROWS, _CLASSES), name="mask")
    graph.op("GREATER", [scores, zero], [mask], "GreaterOptions")
    graph.borders([x], [mask])
    return file.content()


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
    assert f"output {case!r}: expected what " in text
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
    file, graph, x, scores = _start(1, 8.0)
    axis = graph.tensor("int32", (1,), data=np.array([1], np.int32))
    label = graph.tensor("int32", (1,))
    graph.op("ARG_MAX", [scores, axis], [label], "ArgMaxOptions", outputType=2)
    floats = graph.tensor("float32", (1,))
    graph.op("CAST", [label], [floats], "CastOptions")
    decoded = graph.tensor("float32", (1, _CLASSES))
    graph.op("DEQUANTIZE", [scores], [decoded], "DequantizeOptions")
    result = graph.tensor("float32", (1, _CLASSES), name="result")
    graph.op("MUL", [decoded, floats], [result], "MulOptions")
    graph.borders([x], [result])
    edge = EdgeFile(file.content())
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
