"""Rows: plain data, an order of badness, and a table."""

from __future__ import annotations

import json
import math

import pytest

from pytest_edgeq.localize.rows import LayerError, LayerErrors
from tests.localize.rows import row, wrong

UNMATCHED = LayerError(
    index=3,
    op="TRANSPOSE",
    module=None,
    dtypes={"input": "int8", "output": "int8"},
    matched=False,
    verdict="unmatched",
)


@pytest.fixture
def errors() -> LayerErrors:
    """One row of each verdict, and a second broken one."""
    rows = (
        row(0),
        row(1, verdict="quantization", local_sqnr_db=12.0),
        row(2, verdict="lowering", excess_lsb=2.5, local_lsb_error=3.0),
        UNMATCHED,
        row(4, verdict="lowering", findings=("the weight's codes: negated",), excess_lsb=90.0),
        row(5, local_sqnr_db=30.0),
    )
    finding = wrong("negated", place=rows[4].place)
    return LayerErrors(rows=rows, culprit=rows[4], finding=finding)


def test_the_worst_come_first(errors: LayerErrors) -> None:
    """The culprit, what is broken, what loses, what was not measured, what is sound."""
    assert [each.index for each in errors.worst(6)] == [4, 2, 1, 3, 5, 0]
    assert [each.index for each in errors.worst(2)] == [4, 2]
    rows = tuple(
        row(i, verdict="lowering", excess_lsb=excess) for i, excess in enumerate((1e9, math.nan))
    )
    undefined = LayerErrors(rows=rows, culprit=None, finding=wrong(""))
    assert [each.index for each in undefined.worst()] == [1, 0]


def test_to_dict_is_plain_and_sorted(errors: LayerErrors) -> None:
    """Strict JSON takes it as it is, and keys are in order at every level."""
    data = errors.to_dict()
    text = json.dumps(data, allow_nan=False)
    assert json.loads(text) == data
    assert text == json.dumps(data, sort_keys=True)
    assert data["culprit"] == 4
    assert set(data["rows"][0]) == {
        *("clipped", "cumulative_lsb_error", "cumulative_rmse_lsb", "cumulative_sqnr_db"),
        *("dtypes", "excess_lsb", "findings", "index", "local_lsb_error", "local_rmse_lsb"),
        *("local_sqnr_db", "matched", "module", "op", "subgraph", "verdict"),
    }
    assert data["rows"][3]["local_sqnr_db"] is None
    # JSON has no numbers for these.
    data = row(0, local_sqnr_db=math.inf, excess_lsb=math.nan).to_dict()
    assert (data["local_sqnr_db"], data["excess_lsb"]) == ("inf", "nan")


def test_the_text(errors: LayerErrors) -> None:
    """The sentence, the coverage, the five worst."""
    assert (errors.coverage, errors.weight_coverage) == (5 / 6, 1.0)
    assert str(errors).splitlines() == [
        "CONV_2D #4 (layer4): negated",
        "5 of 6 ops matched with torch (not: TRANSPOSE #3); the worst:",
        "op            module  verdict       LSB  excess  rmse/S  SQNR dB  total dB  clipped",
        "CONV_2D #4    layer4  lowering        1   90.00   0.290     40.0      33.0      1 %",
        "CONV_2D #2    layer2  lowering        3    2.50   0.290     40.0      33.0      1 %",
        "CONV_2D #1    layer1  quantization    1       –   0.290     12.0      33.0      1 %",
        "TRANSPOSE #3  –       unmatched       –       –       –        –         –        –",
        "CONV_2D #5    layer5  sound           1       –   0.290     30.0      33.0      1 %",
    ]


def test_an_op_of_a_second_signature_has_the_number_of_its_subgraph() -> None:
    """As in every other text; in the table as well."""
    one = row(3, subgraph=1)
    table = LayerErrors(rows=(one,), culprit=None, finding=wrong("negated")).table()
    assert one.name == "CONV_2D #1:3 (layer3)"
    assert table.splitlines()[1].startswith("CONV_2D #1:3  layer3  sound ")
