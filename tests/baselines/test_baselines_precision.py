"""When a change of op dtypes is the cause of errors that are worse than in the baseline."""

from __future__ import annotations

from typing import Any

import pytest

from fixtures.tflite.writer import chain
from pytest_edgeq.baselines.precision import coarser_ops, explains_errors
from pytest_edgeq.numerics.findings import LOSSY_OP, WRONG_OP, Finding, Place
from pytest_edgeq.runtimes.edge import EdgeFile
from tests.baselines.op_maps import op, op_map

Data = dict[str, Any]


@pytest.fixture
def edge() -> EdgeFile:
    """A file of three ops: two in a row make the output `left`, the third makes `right`."""
    ops = [("RELU", "x", "between"), ("RELU", "between", "left"), ("RELU", "x", "right")]
    return EdgeFile(chain(*ops, inputs="x", outputs="left right", key="serving_default"))


def ops_map(*schemes: str, output: str = "int8") -> Data:
    """Return an op-dtype map of the file, its ops in these schemes."""
    outputs = [{"name": name, "dtype": output, "shape": [1, 4]} for name in ("left", "right")]
    ops = [op("RELU", f"act{place}", scheme) for place, scheme in enumerate(schemes)]
    return {"inputs": [], "outputs": outputs, "ops": ops}


def errors(value: float, output: str = "left", **change: Any) -> Data:
    """Return the errors of one output in one metric, which may fall to 35 dB."""
    metric, stage = change.pop("metric", "sqnr_db"), change.pop("stage", "quantization")
    worst = 35.0 if metric == "sqnr_db" else 4.0
    row = {"stage": stage, "output": output, "metric": metric, "value": value, "worst": worst}
    known = {"flow": "pt2e", "runtime": "xnnpack", "weights": "a", "calibration": "b"}
    return {**known, "n_calibrated": 8, "errors": [{**row, "best": value}], **change}


def _layer(kind: str, op: int) -> Finding:
    return Finding(kind=kind, place=Place("op", "RELU", op), symptom="it loses most")


BEFORE = ("float", "int8", "int8")
AFTER = ("int8", "int8", "int8")


@pytest.mark.parametrize(
    ("before", "after", "output", "layer", "is_cause"),
    [
        (BEFORE, AFTER, "left", None, True),
        (BEFORE, AFTER, "left", _layer(LOSSY_OP, 0), True),
        (BEFORE, AFTER, "left", _layer(LOSSY_OP, 1), False),
        (BEFORE, AFTER, "left", _layer(WRONG_OP, 0), False),
        (BEFORE, AFTER, "right", None, False),
        (AFTER, BEFORE, "left", None, False),
    ],
    ids=[
        "less precise",
        "the layer to blame",
        "another layer to blame",
        "damaged weights",
        "another output",
        "more precise",
    ],
)
def test_ops_with_fewer_bits_explain_the_outputs_behind_them(
    edge: EdgeFile,
    before: tuple[str, ...],
    after: tuple[str, ...],
    output: str,
    layer: Finding | None,
    is_cause: bool,
) -> None:
    """An op that gained precision explains nothing, nor one on which the output does not depend."""
    maps = ops_map(*before), ops_map(*after)
    old, new = errors(40.0, output), errors(20.0, output)
    assert explains_errors(maps, edge, layer, old, new) is is_cause


@pytest.mark.parametrize(
    "change",
    [{"weights": "c"}, {"calibration": "c"}, {"runtime": "builtin"}, {"stage": "conversion"}],
    ids=lambda change: next(iter(change)),
)
def test_they_explain_nothing_where_something_else_may(edge: EdgeFile, change: Data) -> None:
    """Other weights, samples or kernels; and the float form has no such ops."""
    maps = ops_map(*BEFORE), ops_map(*AFTER)
    stage = {key: value for key, value in change.items() if key == "stage"}
    old, new = errors(40.0, **stage), errors(20.0, **change)
    assert not explains_errors(maps, edge, None, old, new)


@pytest.mark.parametrize("dtype", ["int16", "int8"])
def test_errors_in_steps_are_those_of_other_steps(edge: EdgeFile, dtype: str) -> None:
    """An output whose dtype changed has other steps, even where each op has more bits."""
    maps = ops_map(*AFTER), ops_map(*BEFORE, output=dtype)
    old, new = (errors(value, metric="max_lsb_error") for value in (2.0, 300.0))
    assert explains_errors(maps, edge, None, old, new) is (dtype == "int16")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"weight": "int8"}, {"weight": "int4"}),
        ({"granularity": "per_channel"}, {"granularity": "per_tensor"}),
        ({"granularity": "blockwise_32"}, {"granularity": "per_channel"}),
        ({"scheme": "dynamic", "inputs": ["float32"], "outputs": ["float32"]}, {}),
    ],
    ids=["bits of the weight", "one scale", "no blocks", "activations"],
)
def test_what_makes_an_op_coarser(before: Data, after: Data) -> None:
    """And the way back does not."""
    old, new = (op_map(op("FULLY_CONNECTED", "fc", **change)) for change in (before, after))
    assert coarser_ops(old, new) == {0}
    assert coarser_ops(new, old) == set()
