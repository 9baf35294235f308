"""The HTML page, by its text; `test_html_browser` looks at it in a browser."""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, get_args

import jsonschema
import numpy as np
import pytest

from fixtures.token_logits import comparison as of_tokens
from fixtures.token_logits import sequences
from pytest_edgeq.baselines.claims import Category
from pytest_edgeq.numerics.findings import DiffLine, DiffPart
from pytest_edgeq.report import run as run_module
from pytest_edgeq.report.facts import comparison_facts
from pytest_edgeq.report.html import chart_data
from pytest_edgeq.report.html.page import html_page
from pytest_edgeq.report.html.view import text_blocks
from tests.report.runs import (
    SCALE,
    Record,
    border,
    changed_map,
    claim,
    comparison,
    event,
    full_run,
    layers,
    model,
    outcome,
    plan,
    run_of,
)

SCHEMA = jsonschema.Draft202012Validator(
    json.loads(Path(run_module.__file__).with_name("run.schema.json").read_text("utf-8"))
)


class Page(HTMLParser):
    """The elements of a page: which tags it has, and its text outside of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._texts: list[str] = []
        self._inside = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element."""
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        """Leave it."""
        self._inside = ""

    def handle_data(self, data: str) -> None:
        """Note text."""
        if self._inside not in ("script", "style"):
            self._texts.append(data)

    @property
    def charts(self) -> list[Any]:
        """The JSON of the charts."""
        packed = self.attributes("data-chart")
        return [json.loads(gzip.decompress(base64.b64decode(text))) for text in packed]

    @property
    def text(self) -> str:
        """The text, with single blanks, also where one element ends and another begins."""
        return " ".join(" ".join(self._texts).split())

    def attributes(self, name: str) -> list[str]:
        """The values of an attribute, in order."""
        return [value for _, attributes in self.tags if (value := attributes.get(name))]


@pytest.fixture(scope="module")
def page() -> Page:
    """A page with everything, of a record that a run could write."""
    SCHEMA.validate(full_run().data)
    return Page(html_page(full_run()))


def test_everything_is_there(page: Page) -> None:
    """Head, both models, the failure, the stages, the layers, the diff, the findings."""
    for text in (
        "Quantization report 2026-11-25 09:25:19 UTC · 12.5 s · Python 3.11.7 · x86_64",
        "2 models ✗ 1 failed ✓ 1 passed",
        "3 tests ✗ 1 failed ✓ 2 passed",
        "torch 2.13.0",
        "litert-quantizer not installed",
        "test_x.py::test_errors call, test_x.py:7 sqnr_db: expected at least 30, got 12",
        "SQNR of boxes: quantization",
        "CONV_2D #2 (layer1.conv): the weights differ",
        "75 % of the ops were matched with the reference",
        "int8 reaches from qmin = −5.9 to qmax = 6.85",
        "scores, 2048 elements: edge over float",
        "Changed against the baseline: __edgeq__/test_x/test_map.op_dtypes.json",
        "(since it was stored: torch 2.12.0 → 2.13.0)",
    ):
        assert text in page.text
    # Stages, layers, and two of each output.
    assert len(page.charts) == 6
    assert page.attributes("alt") == [f"Sample {i}, input 0" for i in (7, 3, 5)]


def test_a_language_model_has_two_more_columns(page: Page) -> None:
    """The KL divergence and the ratio of perplexities, which no other model has."""
    measured = comparison_facts(of_tokens(sequences()))
    call = event("compare", "lm-1", comparison=measured)
    run = run_of({"lm-1": model("lm")}, [outcome("test_x.py::test_lm", ["lm-1"], call)])
    SCHEMA.validate(run.data)
    assert "cosine top-1 KL perplexity ratio non-finite" in Page(html_page(run)).text
    assert "cosine top-1 non-finite" in page.text
    assert "perplexity" not in page.text


def test_bokeh_finds_no_mistake_in_the_charts(caplog: pytest.LogCaptureFixture) -> None:
    """It logs a glyph without its column, and draws nothing."""
    html_page(full_run())
    assert caplog.messages == []


def test_the_worst_model_comes_first_and_is_open(page: Page) -> None:
    """In the table as in the sections."""
    sections = [a for tag, a in page.tags if tag == "details" and "model" in (a["class"] or "")]
    assert [(a["id"], a["class"], "open" in a) for a in sections] == [
        ("m1", "model failed", True),
        ("m2", "model passed", False),
    ]
    assert page.text.index("bad pt2e_static_int8") < page.text.index("good pt2e_static_int8")


def test_what_was_not_measured_names_the_call_that_does(page: Page) -> None:
    """Never an empty place."""
    good = page.text[page.text.rindex("good pt2e_static_int8") :]
    for call in (
        "edgeq.compare(quantized, inputs)",
        "edgeq.localize(quantized, inputs)",
        "edgeq.check_op_dtypes(quantized)",
    ):
        assert call in good
    whole = Page(html_page(run_of({}, []))).text
    assert "No test of this run used a model: call edgeq.quantize(model, sample_inputs)" in whole


def shown(*events: Record, found: Record | None = None, **test: Any) -> str:
    """Return the text of the page of one model and one test with these calls."""
    run = run_of({"a": model() if found is None else found}, [outcome("t", ["a"], *events) | test])
    SCHEMA.validate(run.data)
    return Page(html_page(run)).text


def test_missing_parts_are_explained() -> None:
    """With the reason: inputs that are no images, no values of outputs, one stage alone."""
    text = shown(event("compare", "a", comparison=comparison()))
    assert "#7 27.0 dB" in text
    assert "None of the inputs is an image" in text
    compared = comparison() | {"points": {}}
    compared["stages"] = {"total": compared["stages"]["total"]}
    text = shown(event("compare", "a", comparison=compared))
    assert "The values of outputs are not in this record" in text
    assert "edgeq.load(…, float_tflite=…)" in text


EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


def test_names_and_texts_are_escaped() -> None:
    """Nothing that a user wrote becomes an element, in HTML or in the JSON of a chart."""
    model_ = model(EVIL, outputs=(EVIL,))
    model_["ops"][2]["module"] = EVIL
    compared = comparison((EVIL,))
    compared["health"] = [{"kind": "range", "where": EVIL, "message": EVIL}]
    line = DiffLine((DiffPart(EVIL, "old"), DiffPart(EVIL, "new")), "added")
    change = replace(changed_map(), headline=EVIL, diff=(line,), evidence=(EVIL,))
    failed = outcome(
        f"test_x.py::test[{EVIL}]",
        ["a"],
        event("compare", "a", comparison=compared),
        event("localize", "a", layers=layers(model_["ops"]) | {"cause": EVIL}),
        event("check", "a", findings=[], records=[change.to_dict()]),
        event("suggest", "a", plan=plan(EVIL, f"$${EVIL}")),
        failure=EVIL,
        claims=[claim(change, path=EVIL, note=EVIL, since=[EVIL])],
    )
    run = run_of({"a": model_}, [failed, outcome(f"crash {EVIL}", [], failure=EVIL)])
    page, plain = Page(html_page(run)), Page(html_page(full_run(bad="a", good="b")))
    assert page.text.count("<script>alert(1)</script>") > 10
    assert not [a for tag, a in page.tags if "onerror" in a or a.get("src") == "x"]
    scripts = [a for tag, a in page.tags if tag == "script"]
    # Bokeh and the page's own, as in any other.
    assert len(scripts) == 2
    policies = [each.attributes("content")[0] for each in (page, plain)]
    assert policies[0] == policies[1]


def test_the_page_names_nothing_that_a_browser_would_fetch(page: Page) -> None:
    """By its elements; the browser test records the requests."""
    for name in ("src", "href"):
        assert all(re.match(r"data:|#", url) for url in page.attributes(name))
    assert not [tag for tag, _ in page.tags if tag in ("link", "iframe", "object", "base")]
    assert page.attributes("content")[0].startswith("default-src 'none'; img-src data:;")


@pytest.mark.slow
def test_twenty_models_stay_below_5_mb() -> None:
    """Detectors with everything that there is to show, and noise for pictures."""
    outputs = tuple("abcdef")
    models = {f"m{i}": model(f"Net{i}", outputs=outputs, ops=300) for i in range(20)}
    tests = [
        outcome(
            f"test_x.py::test[{key}]",
            [key],
            event("compare", key, comparison=comparison(outputs, side=96)),
            event("localize", key, layers=layers(found["ops"])),
        )
        for key, found in models.items()
    ]
    text = html_page(run_of(models, tests))
    assert len(text.encode("utf-8")) < 5_000_000
    # What was left out for it is said.
    assert "Pictures were left out to keep the page small" in Page(text).text
    assert "the 4 worst of 6" in Page(text).text


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_numbers_that_json_lacks_are_shown(value: str) -> None:
    """In metrics, layers and points."""
    compared = comparison()
    for stage in compared["stages"].values():
        for each in (stage, *stage["outputs"].values()):
            each |= {"sqnr_db": value, "rmse": "nan", "nonfinite": 3}
    for values in compared["points"]["logits"].values():
        values[5] = value
    model_ = model()
    measured = layers(model_["ops"])
    measured["rows"][3] |= {"local_sqnr_db": value, "cumulative_sqnr_db": value}
    compared["worst_samples"][0]["sqnr_db"] = value
    events = event("compare", "a", comparison=compared), event("localize", "a", layers=measured)
    text = shown(*events, found=model_)
    assert "No stage has an error that can be shared out" in text
    assert "1 elements are not finite" in text


def test_shares_are_of_noise_power() -> None:
    """Twice the error is four times the noise, and two dB values are not added."""
    stages = _stages({"quantization": 1.0, "lowering": 2.0, "total": 5**0.5})
    (found,) = chart_data.noise_by_output(stages)
    assert found.shares == {"quantization": pytest.approx(0.2), "lowering": pytest.approx(0.8)}
    assert found.total_over_sum == pytest.approx(1)
    assert chart_data.stage_sentence(found).endswith(" 100 % of the sum over the stages.")


@pytest.mark.parametrize(
    ("total", "said"), [(1.0, "cancel in part: the total noise is 50 %"), (2.0, "agree in part")]
)
def test_errors_that_cancel_or_agree_are_reported(total: float, said: str) -> None:
    """The shares are of the sum, which the total then is not."""
    stages = _stages({"quantization": 1.0, "lowering": 1.0, "total": total})
    assert said in chart_data.stage_sentence(chart_data.noise_by_output(stages)[0])


def _stages(rmse: dict[str, float]) -> Record:
    return {
        stage: {"outputs": {"y": {"rmse": value, "sqnr_db": 20.0}}} for stage, value in rmse.items()
    }


def test_limits_are_the_values_of_the_extreme_codes() -> None:
    """Of signed and unsigned dtypes; a float output has none."""
    assert chart_data.limits_of(border("y", SCALE)) == pytest.approx((-5.9, 6.85))
    unsigned = border("y", 0.5) | {"dtype": "uint8", "zero_point": 128}
    assert chart_data.limits_of(unsigned) == (-64, 63.5)
    assert chart_data.limits_of(border("y", None)) is None


def test_bins_hold_whole_codes() -> None:
    """A uniform distribution over the codes is flat, where other bins would draw a comb."""
    codes = np.tile(np.arange(-128, 127), 4) * SCALE
    points = chart_data.points_of({"float": codes.tolist(), "edge": codes.tolist()})
    assert points is not None
    found = chart_data.distribution(points, (-128 * SCALE, 127 * SCALE), SCALE)
    # The last bin may reach beyond the last code.
    assert set(found.counts["edge"][:-1]) == {16}
    assert found.counts["edge"].sum() == len(codes)


@pytest.mark.parametrize(
    ("values", "scale"), [([3.0] * 4, None), ([1e38, -1e38, 0.0], SCALE), ([0.0, 0.0], SCALE)]
)
def test_every_value_is_in_a_bin(values: list[float], scale: float | None) -> None:
    """Of a constant, too, and of values far beyond qmin and qmax."""
    points = chart_data.points_of({"float": values})
    assert points is not None
    found = chart_data.distribution(points, (-5.9, 6.85) if scale else None, scale)
    assert found.counts["float"].sum() == len(values)


def test_elements_that_are_not_finite_are_dropped_on_all_sides() -> None:
    """So the sides stay the same elements."""
    points = chart_data.points_of({"edge": [1.0, "nan", 3.0], "float": [1.0, 2.0, "inf"]})
    assert points is not None
    assert {side: values.tolist() for side, values in points.sides.items()} == {
        "float": [1.0],
        "edge": [1.0],
    }
    assert points.dropped == 2
    assert chart_data.points_of({"float": ["nan"], "edge": [1.0]}) is None
    assert chart_data.points_of({}) is None


def test_infinite_errors_stand_at_the_edge_and_unmatched_ops_are_gaps() -> None:
    """A triangle is no measurement."""
    points = chart_data.layer_points(layers(model()["ops"]))
    assert points is not None
    assert points.columns["local_marker"][0] == "triangle"
    assert points.columns["local"][0] > np.nanmax(points.columns["local"][1:])
    assert math.isnan(points.columns["local"][1])
    assert points.columns["local_text"][:2] == ["∞ dB, 0 LSB", "not measured"]
    assert points.columns["alpha"][2] > 0
    nothing = layers(model()["ops"])
    for row in nothing["rows"]:
        row |= {"local_sqnr_db": None, "cumulative_sqnr_db": None}
    assert chart_data.layer_points(nothing) is None


@pytest.mark.parametrize(("ops", "named"), [(20, True), (21, False)])
def test_few_ops_are_named_on_the_axis(ops: int, named: bool) -> None:
    """And local errors are not joined, as the errors of unlike ops have nothing in common."""
    found = model(ops=ops)
    found["ops"][3]["op"] = "CUSTOM:$$x^2$$"
    events = event("localize", "a", layers=layers(found["ops"]))
    page = html_page(run_of({"a": found}, [outcome("test_x.py::test_a", ["a"], events)]))
    (chart,) = (json.dumps(each) for each in Page(page).charts)
    assert ('"CONV_2D #2"' in chart, '"CUSTOM #3"' in chart) == (named, named)
    lines = set(re.findall(r'"name": "Line", .*?"y": {"type": "field", "field": "(\w+)"}', chart))
    assert lines == {"cumulative"}


def test_a_change_is_shown_as_a_diff() -> None:
    """Added, removed and changed lines, old and new values, in the words of the terminal."""
    found = re.search(r'<pre class="diff"[^>]*>(.*?)</pre>', html_page(full_run()), re.DOTALL)
    assert found is not None
    lines = re.findall(r'<span class="(\w+)">(.) (.*?)\n?</span>', found[1])
    assert [(kind, sign) for kind, sign, _ in lines] == [
        ("plain", " "),
        ("heading", " "),
        ("plain", " "),
        ("changed", "~"),
        ("heading", " "),
        ("added", "+"),
        ("heading", " "),
        ("removed", "-"),
        ("plain", " "),
    ]
    assert [re.sub("<.*?>", "", text) for *_, text in lines] == changed_map().lines
    assert lines[3][2].endswith(
        "  scheme <del>int8</del> → <ins>float</ins>; inputs <del>int8, int8</del> → "
        "<ins>float32, float32</ins>; outputs <del>int8</del> → <ins>float32</ins>"
    )


@pytest.mark.parametrize("category", get_args(Category))
def test_whatever_became_of_a_baseline_is_shown(category: str) -> None:
    """Each category of the session is one of the schema and of the page."""
    stored = claim(changed_map(), category=category)
    assert f": {stored['path']} (since" in shown(claims=[stored])


def test_tables_in_texts_are_kept_apart() -> None:
    """They must not be wrapped."""
    text = "expected: 3  got: 4\nstage  output  rmse\ntotal  y       0.1\n\nfix: it"
    blocks = text_blocks(text)
    assert [is_table for is_table, _ in blocks] == [False, True, False]
    assert "\n".join(lines for _, lines in blocks) == text


def test_the_op_table_has_the_errors_of_the_subgraph_that_was_localized() -> None:
    """Known by the names of its ops; where they fit none, no error is shown at a wrong op."""
    found = model(ops=4)
    for op in found["ops"][:2]:
        op["subgraph"] = 1
    fits, other = layers(found["ops"]), layers(found["ops"])
    fits["rows"] = fits["rows"][:2]
    other["rows"][0]["op"] = "MUL"
    assert "∞ dB" in shown(event("localize", "a", layers=fits), found=found)
    text = shown(event("localize", "a", layers=other), found=found)
    assert "∞ dB" not in text.partition("Op dtypes")[2]


def test_a_failure_without_a_model_and_baselines_without_a_test_are_shown() -> None:
    """A crash may have used any model."""
    run = run_of(
        {},
        [outcome("test_x.py::test_crash", [], failure="worker 'gw0' crashed")],
        baselines={"obsolete": ["__edgeq__/a.json"], "pruned": ["__edgeq__/b.json"]},
    )
    text = Page(html_page(run)).text
    assert "Failed without a model test_x.py::test_crash" in text
    assert "__edgeq__/a.json is obsolete: delete it with --edgeq-update=prune" in text
    assert "__edgeq__/b.json was deleted" in text


@pytest.mark.parametrize(
    ("result", "culprit", "begins"),
    [
        ("passed", None, "The tests passed; what limits the SQNR: no single layer"),
        ("passed", 2, "CONV_2D #2"),
        ("failed", None, "no single layer"),
    ],
)
def test_the_layers_of_a_sound_model_are_no_failure(
    result: str, culprit: int | None, begins: str
) -> None:
    """The sentence of localizing reads like one."""
    measured = event("localize", "a", layers=layers(model()["ops"], culprit))
    page = html_page(run_of({"a": model()}, [outcome("t", ["a"], measured) | {"outcome": result}]))
    assert f"<p>{begins}" in page
