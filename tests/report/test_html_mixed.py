"""Sensitivities and plans in the record of a run and in its HTML page."""

from __future__ import annotations

import math

import pytest

from pytest_edgeq.report.html import chart_data
from pytest_edgeq.report.html.page import html_page
from tests.report.runs import Record, event, model, outcome, plan, run_of, sensitivity
from tests.report.test_html import SCHEMA, Page


def page_of(*events: Record) -> Page:
    """Return the page of one model and one test with these calls, whose record is valid."""
    run = run_of({"a": model()}, [outcome("t", ["a"], *events)])
    SCHEMA.validate(run.data)
    return Page(html_page(run))


def test_sensitivities_of_a_plan_are_drawn_without_the_call() -> None:
    """With the limits of a plan that misses its budget, and the chart of its search."""
    page = page_of(event("suggest", "a", plan=plan("conv1", "conv2")))
    labels = [text for text in page.attributes("aria-label") if "SQNR" in text]
    assert labels == ["SQNR and gain of each layer", "SQNR over file size of the choices of layers"]
    assert "With all layers quantized: 30.2 dB, over 8 samples, in t." in page.text
    assert "The plan does not meet Budget(sqnr_db=60) with conv1, conv2 in float." in page.text
    assert "Limit: 1 ops stay quantized: ADD (conv2)" in page.text
    assert 'quantizer.set_module_name("conv1", None)' in page.text


def test_a_model_without_sensitivities_has_no_such_section() -> None:
    """Also if the call failed, or no layer is quantized, or no time was left to search."""
    failed = event("suggest", "a") | {"error": "ValueError: no sample"}
    assert "Mixed precision" not in page_of(failed).text
    empty = page_of(event("sensitivity", "a", sensitivity=sensitivity()))
    assert "The model has no quantized layer." in empty.text
    assert not empty.charts
    stopped = page_of(event("suggest", "a", plan=plan("fc", steps=[])))
    assert len(stopped.charts) == 1


def test_the_worst_20_layers_are_shown() -> None:
    """In the order of the record, with the number of all."""
    found = sensitivity(*(f"encoder.layers.{i}.attention.query" for i in range(25)))
    page = page_of(event("sensitivity", "a", sensitivity=found))
    assert "The worst 20 of 25 layers." in page.text
    bars = chart_data.layer_bars(found)
    assert bars is not None
    assert bars.columns["module"] == [row["module"] for row in found["rows"][:20]]


def test_infinite_bars_end_right_of_the_finite_ones() -> None:
    """And a difference of infinite SQNR is none."""
    found = sensitivity("a", "b", "c")
    found["rows"][0]["gain_db"] = "nan"
    found["rows"][1]["gain_db"] = "inf"
    bars = chart_data.layer_bars(found)
    assert bars is not None
    exact, *others = bars.columns["quantized"]
    assert exact > max(others)
    assert bars.columns["quantized_text"] == ["∞ dB", "36.0 dB", "37.0 dB"]
    assert bars.columns["gain_text"] == ["–", "+∞ dB", "+0.80 dB"]
    assert bars.range[0] == 0.0 < bars.range[1]


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_plan_without_a_finite_sqnr_is_drawn(value: str) -> None:
    """In steps, plan and layers; the axis has a range."""
    steps = [{"layers": 1, "size_bytes": 10, "sqnr_db": value}]
    found = plan("a", steps=steps, sqnr_db=value)
    found["sensitivity"]["sqnr_db"] = value
    found["sensitivity"]["rows"][0] |= {"quantized_db": value, "in_float_db": value}
    assert len(page_of(event("suggest", "a", plan=found)).charts) == 2


def test_the_curve_is_the_best_choice_up_to_each_size() -> None:
    """In the order of sizes, in which the search did not measure them."""
    curve = chart_data.plan_curve(plan("a", "b"))
    assert curve is not None
    assert curve.columns["layers"] == [0, 3, 2, 6, 2]
    assert curve.columns["size"].tolist() == [11.4, 17.0, 17.5, 24.0, 17.12]
    assert curve.columns["best"][:-1].tolist() == [30.2, 41.5, 41.5, 44.0]
    assert math.isclose(curve.columns["sqnr"][-1], 41.25)
