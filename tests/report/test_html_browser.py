"""The HTML page in Chromium: its charts, its controls, and that it requests nothing."""

from __future__ import annotations

import functools
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_edgeq.report.html.history import history_page
from pytest_edgeq.report.html.page import html_page
from pytest_edgeq.report.run import Run
from tests.report.runs import (
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

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

# A browser is started.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_VARIABLE = "EDGEQ_TESTS_CHROMIUM"

Open = Callable[..., "Page"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium, without a window."""
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install it")
    named = os.environ.get(_VARIABLE)
    path = named or next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        pytest.skip(f"there is no Chromium: apt-get install chromium, or name it by {_VARIABLE}")
    with api.sync_playwright() as playwright:
        # As root, and in most containers, it has no sandbox.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@functools.cache
def _full_page() -> str:
    return html_page(full_run())


@pytest.fixture
def open_page(browser: Browser, tmp_path: Path) -> Iterator[Open]:
    """Open the page of a run; an error, a warning or a request of the browser fails the test."""
    complaints: list[str] = []
    pages: list[Page] = []

    def opened(run: Run | str, *, width: int = 1280, **context: Any) -> Page:
        path = tmp_path / "report.html"
        path.write_text(run if isinstance(run, str) else html_page(run), encoding="utf-8")
        page = browser.new_page(viewport={"width": width, "height": 900}, **context)
        pages.append(page)
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on("dialog", lambda dialog: complaints.append(f"dialog: {dialog.message}"))
        page.on(
            "console",
            lambda said: (
                complaints.append(f"{said.type}: {said.text}")
                if said.type in ("error", "warning")
                else None
            ),
        )
        page.on(
            "request",
            lambda request: (
                None
                if request.url.startswith(("data:", "blob:")) or request.url == path.as_uri()
                else complaints.append(f"request: {request.url}")
            ),
        )
        page.goto(path.as_uri())
        return page

    yield opened
    for page in pages:
        page.close()
    assert complaints == []


def show_all(page: Page) -> None:
    """Open every section, and scroll until every chart that can be seen is drawn."""
    page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
    for chart in page.locator("[data-chart]:visible").all():
        chart.scroll_into_view_if_needed()
        drawn(chart)


def drawn(chart: Locator) -> Locator:
    """Wait until a chart has a canvas, and return it."""
    chart.scroll_into_view_if_needed()
    chart.locator("canvas").first.wait_for()
    chart.and_(chart.page.locator("[data-drawn]")).wait_for()
    return chart


def chart_of(page: Page, label: str) -> Locator:
    """Return the first chart of this label, drawn."""
    return drawn(page.get_by_role("group", name=label).first)


def hover(page: Page, chart: Locator, x: float, y: float = 0.5) -> str:
    """Move the pointer to a place in the frame of a chart, 0 to 1; return the tooltips."""
    frame = chart.evaluate(
        """(plot) => {
            const view = [...Bokeh.index].find((each) => plot.contains(each.el));
            const { x, y, width, height } = view.canvas_view.el.getBoundingClientRect();
            const box = view.frame.bbox;
            return [x + box.left, y + box.top, box.width, box.height];
        }"""
    )
    page.mouse.move(frame[0] + x * frame[2] - 2, frame[1] + y * frame[3])
    page.mouse.move(frame[0] + x * frame[2], frame[1] + y * frame[3])
    tooltip = page.locator(".bk-tooltip-content:visible").first
    tooltip.wait_for()
    return str(tooltip.inner_text())


def rows(page: Page, table: str) -> list[str]:
    """Return the first cells of the rows of a table that are shown."""
    cells = page.locator(f"table.{table} >> nth=0 >> tbody tr:visible > :first-child")
    return [text.split("\n")[0] for text in cells.all_inner_texts()]


def test_everything_is_drawn_without_complaint_or_request(open_page: Open) -> None:
    """All charts of all models."""
    page = open_page(_full_page())
    show_all(page)
    assert page.locator("[data-chart]:visible canvas").count() >= 4
    assert page.title() == "1 of 2 models failed – pytest-edgeq"


def test_a_history_is_drawn(open_page: Open) -> None:
    """Each chart, with its run named where the pointer is."""
    page = open_page(history_page([full_run(), full_run()]))
    show_all(page)
    assert page.locator("[data-drawn]").count() == page.locator("[data-chart]").count() > 3


def test_names_of_users_are_text_everywhere(open_page: Open) -> None:
    """In tables, on axes and in tooltips; neither elements nor formulas, which Bokeh would load."""
    name = "</script><script>alert(1)</script> <img src=x> $$x^2$$"
    found = model(name, outputs=(name, "b"))
    for op in found["ops"]:
        op["module"] = name
    run = run_of(
        {"a": found},
        [
            outcome(
                f"test_x.py::test[{name}]",
                ["a"],
                event("compare", "a", comparison=comparison((name, "b"))),
                event("localize", "a", layers=layers(found["ops"])),
                event("suggest", "a", plan=plan(name, "conv1")),
                failure=name,
                claims=[claim(replace(changed_map(), headline=name))],
            )
        ],
    )
    page = open_page(run)
    show_all(page)
    assert page.locator("h2", has_text=name).count() == 1
    chart = chart_of(page, "Local and cumulative SQNR")
    assert name in hover(page, chart, 0.5)


def test_hovering_over_a_layer_names_op_and_module(open_page: Open) -> None:
    """At any height, with both errors; the third of six ops is the one to blame."""
    page = open_page(_full_page())
    chart = chart_of(page, "Local and cumulative SQNR")
    for y in (0.1, 0.5, 0.9):
        text = hover(page, chart, 2.5 / 6, y)
        assert "CONV_2D #2" in text
        assert "layer1.conv" in text
        assert "5.5 dB, 3 LSB" in text
        assert "28.0 dB" in text
        assert "lowering" in text
    assert "not measured" in hover(page, chart, 1.5 / 6)


def test_hovering_over_the_other_charts(open_page: Open) -> None:
    """A stage's share with its SQNR, the counts of a bin, one element of the scatter chart."""
    page = open_page(_full_page())
    text = hover(page, chart_of(page, "Share of each stage"), 0.9, 0.3)
    assert re.search(r"lowering\s.*share of the noise power:?\s+\d+\.\d %", text, re.DOTALL)
    text = hover(page, chart_of(page, "Histograms"), 0.5)
    assert re.search(r"float:?\s+\d+", text)
    assert re.search(r"edge:?\s+\d+", text)
    chart = chart_of(page, "Edge values")
    assert "edge − float" in hover(page, chart, 0.5)


def test_a_drag_zooms_into_layers_and_reset_ends_it(open_page: Open) -> None:
    """By the toolbar of Bokeh."""
    page = open_page(_full_page())
    chart = chart_of(page, "Local and cumulative SQNR")
    start = "(plot) => [...Bokeh.index].find((v) => plot.contains(v.el)).model.x_range.start"
    before = chart.evaluate(start)
    hover(page, chart, 0.4, 0.3)
    page.mouse.down()
    hover(page, chart, 0.7, 0.8)
    page.mouse.up()
    page.wait_for_function(f"(plot) => ({start})(plot) > {before} + 1", arg=chart.element_handle())
    chart.locator("[title=Reset]").first.click()
    page.wait_for_function(f"(plot) => ({start})(plot) == {before}", arg=chart.element_handle())


def test_charts_of_a_closed_section_are_drawn_when_it_is_opened(open_page: Open) -> None:
    """The link in the table of models opens it."""
    runs = full_run()
    runs.data["tests"][0]["events"].append(event("compare", "good-1", comparison=comparison()))
    page = open_page(runs)
    section = page.locator("#m2")
    assert section.get_attribute("open") is None
    assert section.locator("canvas").count() == 0
    page.get_by_role("link", name="good").click()
    drawn(section.locator("[data-chart]").first)
    page.locator("#m2 > summary").click()
    page.locator("#m2:not([open])").wait_for()
    page.get_by_role("link", name="good").click()
    page.locator("#m2[open]").wait_for()


def three() -> Run:
    """Return a run of three models, of which one was not compared."""
    noise = {"Loud": 0.6, "Quiet": 0.02}
    models = {name: model(name) for name in ("Unmeasured", *noise)}
    models["Quiet"]["quantizer"] = "recipe_static_wi8_ai8"
    tests = [outcome("test_x.py::test_unmeasured", ["Unmeasured"], failure="no")]
    tests += [
        outcome(f"t[{name}]", [name], event("compare", name, comparison=comparison(noise=level)))
        for name, level in noise.items()
    ]
    return run_of(models, tests)


def test_models_are_sorted_by_a_click_or_a_key(open_page: Open) -> None:
    """Numbers as numbers, and what was not measured last in both directions."""
    page = open_page(three())
    assert rows(page, "models") == ["Unmeasured", "Loud", "Quiet"]
    button = page.get_by_role("button", name="SQNR dB")
    heading = page.locator("table.models th", has=button)
    assert heading.get_attribute("aria-sort") is None
    button.click()
    assert heading.get_attribute("aria-sort") == "ascending"
    assert rows(page, "models") == ["Loud", "Quiet", "Unmeasured"]
    button.focus()
    page.keyboard.press("Enter")
    assert heading.get_attribute("aria-sort") == "descending"
    assert rows(page, "models") == ["Quiet", "Loud", "Unmeasured"]
    page.get_by_role("button", name="model").first.click()
    assert heading.get_attribute("aria-sort") is None
    assert rows(page, "models") == ["Loud", "Quiet", "Unmeasured"]


def test_models_are_filtered(open_page: Open) -> None:
    """By name or quantizer, and by verdict."""
    page = open_page(three())
    box = page.get_by_label("Model or quantizer")
    box.fill("RECIPE_static")
    assert rows(page, "models") == ["Quiet"]
    box.fill("")
    page.get_by_label("Verdict").select_option("failed")
    assert rows(page, "models") == ["Unmeasured"]
    assert page.locator("#models output").inner_text() == "1 of 3 models"


def test_ops_are_filtered_by_op_module_and_scheme(open_page: Open) -> None:
    """All three together."""
    page = open_page(_full_page())
    part = page.locator("#m1")
    assert rows(page, "ops") == ["0", "1", "2", "3", "4", "5"]
    part.get_by_role("combobox", name="Op", exact=True).select_option("ADD")
    assert rows(page, "ops") == ["1", "3", "5"]
    part.get_by_label("Module").fill("layer2")
    assert rows(page, "ops") == ["5"]
    part.get_by_label("Scheme").select_option("int8")
    assert rows(page, "ops") == []
    assert part.locator("[data-count=ops]").inner_text() == "0 of 6 ops"
    part.get_by_label("Module").fill("")
    assert rows(page, "ops") == ["1", "3"]


def test_an_output_is_chosen(open_page: Open) -> None:
    """The charts of the worst one are shown first."""
    page = open_page(_full_page())
    shown = page.locator("#m1 .pair:visible figcaption").first
    assert shown.inner_text().startswith("boxes,")
    page.locator("#m1").get_by_role("combobox", name="Output").select_option("scores")
    assert shown.inner_text().startswith("scores,")
    drawn(page.locator("#m1 .pair:visible [data-chart]").first)


def test_a_phone_needs_no_scrolling_to_the_side(open_page: Open) -> None:
    """With long names and wide texts; tables scroll by themselves, and a finger does no zooming."""
    long = "a_very_long_name_" * 8
    found = model(long, outputs=(long, "b"))
    wide = "stage  output  " + "  ".join(f"metric_{i}" for i in range(40))
    run = run_of(
        {"a": found},
        [
            outcome(
                f"test_x.py::{long}",
                ["a"],
                event("compare", "a", comparison=comparison((long, "b"), side=96)),
                event("localize", "a", layers=layers(found["ops"])),
                failure=f"{long}\n{wide}\n{'x' * 500}",
                claims=[claim(changed_map())],
            )
        ],
    )
    page = open_page(run, width=390, has_touch=True, is_mobile=True)
    show_all(page)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    # A table that goes on has a shadow at its side.
    table = page.get_by_role("region", name="Models")
    assert table.evaluate("each => each.scrollWidth > each.clientWidth")
    shadows = table.evaluate("each => getComputedStyle(each).backgroundAttachment")
    assert shadows == "local, local, scroll, scroll"
    chart = chart_of(page, "Local and cumulative SQNR")
    width = chart.locator("canvas").first.bounding_box()
    assert width is not None
    assert 250 < width["width"] <= 390
    action = chart.locator(".bk-events").first.evaluate("(el) => getComputedStyle(el).touchAction")
    assert action != "none"


def test_a_tap_does_what_a_hover_does(open_page: Open) -> None:
    """On a phone; the tooltip stays on the screen though the name of the module is long."""
    run = full_run()
    long = "a_very_long_name." * 6
    run.models["bad-1"]["ops"][2]["module"] = long
    run.data["tests"][1]["events"][1]["layers"] = layers(run.models["bad-1"]["ops"])
    page = open_page(run, width=390, has_touch=True, is_mobile=True)
    chart = chart_of(page, "Local and cumulative SQNR")
    box = chart.bounding_box()
    assert box is not None
    page.touchscreen.tap(box["x"] + 0.5 * box["width"], box["y"] + 0.5 * box["height"])
    tooltip = page.locator(".bk-tooltip-content:visible").first
    assert long in tooltip.inner_text()
    shown = tooltip.bounding_box()
    assert shown is not None
    assert 0 <= shown["x"] < shown["x"] + shown["width"] <= 390


def test_light_and_dark_follow_the_browser(open_page: Open) -> None:
    """Also when it changes while the page is open: charts are painted anew."""
    page = open_page(_full_page(), color_scheme="light")
    chart = chart_of(page, "Local and cumulative SQNR")
    canvases, pixels = chart.locator("canvas"), "all => all.map(each => each.toDataURL()).join()"
    background = "getComputedStyle(document.body).backgroundColor"
    light, before = page.evaluate(background), canvases.evaluate_all(pixels)
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(background) != light
    for _ in range(100):
        if (painted := canvases.evaluate_all(pixels)) not in ("", before):
            break
        page.wait_for_timeout(50)
    assert painted not in ("", before)
