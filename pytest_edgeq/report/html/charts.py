"""The charts of a model, as JSON that BokehJS draws in the page."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np
import numpy.typing as npt
from bokeh.document import Document
from bokeh.models import (
    BoxZoomTool,
    ColumnDataSource,
    FactorRange,
    HoverTool,
    PanTool,
    Range1d,
    ResetTool,
    Slope,
    Span,
    WheelZoomTool,
)
from bokeh.plotting import figure

from pytest_edgeq.report.html.chart_data import Columns, Distribution, OutputNoise

Figure = Any
"""A figure of Bokeh, which ships no types that hold."""

COLORS: Mapping[str, str] = {
    "conversion": "#8e6bbf",
    "quantization": "#2b83c6",
    "lowering": "#d55e00",
    "total": "#7a7f87",
    "float": "#2b83c6",
    "float_tflite": "#8e6bbf",
    "simulated": "#16937a",
    "edge": "#d55e00",
}
"""By stage and side: distinct to the colour-blind, and 3:1 against white and against black."""

_DASHES = {"float": "solid", "float_tflite": "dotdash", "simulated": "dashed", "edge": "dotted"}
_HATCHES = {"conversion": "dot", "quantization": None, "lowering": "right_diagonal_line"}
_NEUTRAL = "#80858d"
_FONT = "system-ui, sans-serif"

_LEAST_SHOWN = 12  # percent; the number does not fit into a bar of less on a phone
_FEW_OPS = 50  # whose marks fit next to each other on a phone
_NAMED_OPS = 20  # whose names fit next to each other on a phone, turned
_LONGEST = 18  # characters of an output's name on a phone
_LONGEST_LAYER = 40  # characters of a layer's name on a phone, on a line of its own
_NAME = {"text_align": "left", "text_font_style": "normal"}


@dataclasses.dataclass(frozen=True)
class Chart:
    """One chart."""

    # the JSON for `Bokeh.embed.embed_item`, compressed by gzip, in base64: a sixth of its length
    packed: str
    label: str  # for a reader that does not see it


def stage_bar(outputs: Sequence[OutputNoise]) -> Chart:
    """Return the share of each stage in the noise of each output, worst output on top."""
    names = _unique([output.name for output in outputs])
    ranges = {
        "x_range": Range1d(0, 100, bounds=(0, 100)),
        "y_range": FactorRange(factors=names[::-1]),
    }
    chart = _figure(80 + 34 * len(names), with_tools=False, **ranges)
    bars = []
    left = np.zeros(len(outputs))
    for stage in outputs[0].shares:
        shares = np.array([100 * output.shares[stage] for output in outputs])
        source = ColumnDataSource(
            {
                "y": names,
                "left": left,
                "right": left + shares,
                "middle": left + shares / 2,
                "stage": [stage] * len(names),
                "share": [f"{share:.1f} %" for share in shares],
                "shown": [f"{share:.0f} %" if share >= _LEAST_SHOWN else "" for share in shares],
                "sqnr": [output.decibels[stage] for output in outputs],
                "rmse": [f"{output.rmse[stage]:.4g}" for output in outputs],
            }
        )
        color = COLORS[stage]
        place = {"y": "y", "left": "left", "right": "right", "height": 0.72, "source": source}
        hatch = {"hatch_pattern": _HATCHES[stage], "hatch_color": "white", "hatch_alpha": 0.3}
        bar = chart.hbar(**place, **hatch, color=color, legend_label=stage)
        bars.append(bar)
        _text(chart, "middle", "y", "shown", source, "white", background_fill_color=color)
        left = left + shares
    chart.ygrid.visible = False
    chart.yaxis.visible = len(names) > 1
    tooltips = [
        ("output", "@y"),
        ("stage", "@stage"),
        ("share of the noise power", "@share"),
        ("SQNR", "@sqnr"),
        ("RMSE", "@rmse"),
    ]
    hover = HoverTool(renderers=bars, tooltips=tooltips)
    label = "Share of each stage in the noise power of each output"
    return _finished(chart, label, hover, x="share of the noise power, %")


def layer_chart(points: Columns, culprit: int | None) -> Chart:
    """Return local and cumulative error of each op over depth, with the op to blame marked."""
    (low, high), index = points.range, points.columns["index"]
    depth = Range1d(index.min() - 0.6, index.max() + 0.6)
    named = len(index) <= _NAMED_OPS
    chart = _figure(460 if named else 360, x_range=depth, y_range=Range1d(low, high))
    if named:
        # Without the name of a custom op, which Bokeh might read as a formula.
        names = (op.partition(":")[0] for op in points.columns["op"])
        ticks = zip(index.tolist(), names, strict=True)
        chart.xaxis.ticker = index.tolist()
        chart.xaxis.major_label_overrides = {at: f"{name} #{at}" for at, name in ticks}
        chart.xaxis.major_label_orientation = "vertical"
    source = ColumnDataSource(dict(points.columns))
    # The strip of an op is what the pointer meets, so that any height of the chart will do.
    strips = _bars(chart, source, COLORS["lowering"], "alpha", bottom=low, top=high)
    for name, color in (
        ("cumulative", COLORS["quantization"]),
        ("local", COLORS["lowering"]),  # on top: both errors of the op to blame may be equal
    ):
        label = f"{name} error"
        if name == "cumulative":  # the local errors of ops have nothing to do with each other
            _line(chart, source, "index", name, color, "dashed", label)
        look = {"size": 7 if len(index) <= _FEW_OPS else 4, "color": color, "legend_label": label}
        chart.scatter(x="index", y=name, marker=f"{name}_marker", source=source, **look)
    if culprit is not None:
        chart.add_layout(_vertical(culprit, COLORS["lowering"], "dotted"))
    tooltips = [
        ("op", "@op #@index"),
        ("module", "@module"),
        ("local", "@local_text"),
        ("up to here", "@cumulative_text"),
        ("clipped", "@clipped"),
        ("verdict", "@verdict"),
    ]
    hover = HoverTool(renderers=[strips], tooltips=tooltips, point_policy="follow_mouse")
    label = "Local and cumulative SQNR of each op over depth"
    axes = {"x": "op, in execution order", "y": "SQNR, dB (higher is better)"}
    return _finished(chart, label, hover, **axes)


def sensitivity_chart(bars: Columns) -> Chart:
    """Return SQNR with each layer alone quantized, and gain with it in float, worst on top."""
    names = _unique(bars.columns["module"], _LONGEST_LAYER)
    ranges = {"x_range": Range1d(*bars.range), "y_range": FactorRange(factors=names[::-1])}
    chart = _figure(90 + 50 * len(names), with_tools=False, **ranges)
    drawn = []
    for name, label, color, offset in (
        ("quantized", "SQNR, alone quantized", COLORS["quantization"], 0.07),
        ("gain", "gain, alone in float", COLORS["simulated"], -0.19),
    ):
        source = ColumnDataSource(
            {
                **bars.columns,
                "y": [(each, offset) for each in names],
                "end": np.maximum(bars.columns[name], 0),
            }
        )
        look = {"height": 0.26, "color": color, "legend_label": label}
        drawn.append(chart.hbar(y="y", right=name, source=source, **look))
        _text(chart, "end", "y", f"{name}_text", source, _NEUTRAL, text_align="left", x_offset=2)
    # Above the bars, as an axis has no room for a path of modules on a phone.
    left = {"x": [bars.range[0]] * len(names), "y": [(each, 0.33) for each in names]}
    _text(chart, "x", "y", "name", ColumnDataSource({**left, "name": names}), _NEUTRAL, **_NAME)
    chart.yaxis.visible = False
    chart.ygrid.visible = False
    tooltips = [
        ("layer", "@module"),
        ("ops", "@ops"),
        ("weights", "@weights"),
        ("read by", "@readers"),
        ("alone quantized", "@quantized_text"),
        ("alone in float", "@in_float (@gain_text)"),
    ]
    hover = HoverTool(renderers=drawn, tooltips=tooltips)
    return _finished(chart, "SQNR and gain of each layer", hover, x="dB")


def plan_chart(curve: Columns) -> Chart:
    """Return SQNR over file size of the choices of layers, with the plan marked."""
    chart = _figure(320, y_range=Range1d(*curve.range))
    steps, plan = (
        ColumnDataSource({name: column[part] for name, column in curve.columns.items()})
        for part in (slice(-1), slice(-1, None))
    )
    line = {"line_color": COLORS["quantization"], "line_width": 1.8, "legend_label": "best"}
    chart.step(x="size", y="best", source=steps, mode="after", **line)
    dots = [
        chart.scatter(x="size", y="sqnr", marker="marker", source=source, **look)
        for source, look in (
            (steps, {"size": 7, "color": COLORS["quantization"], "legend_label": "simulated"}),
            (plan, {"size": 14, "color": COLORS["edge"], "legend_label": "plan"}),
        )
    ]
    tooltips = [("layers", "@layers"), ("size", "@size{0,0.0} KB"), ("SQNR", "@text")]
    hover = HoverTool(renderers=dots, tooltips=tooltips)
    label = "SQNR over file size of the choices of layers"
    return _finished(chart, label, hover, x="size of the file, KB", y="SQNR, dB")


def history_chart(
    times: Sequence[datetime], values: Sequence[float | None], verdicts: Sequence[str], name: str
) -> Chart:
    """Return a figure of one model over the runs that measured it; failed ones are crosses."""
    chart = _figure(190, x_axis_type="datetime")
    numbers = np.array([math.nan if value is None else value for value in values], np.float64)
    source = ColumnDataSource(
        {
            "time": np.array([time.replace(tzinfo=None) for time in times], "datetime64[ms]"),
            "value": np.where(np.isfinite(numbers), numbers, np.nan),
            "text": [f"{number:.6g}" for number in numbers],
            "when": [f"{time:%Y-%m-%d %H:%M}" for time in times],
            "verdict": list(verdicts),
            "marker": ["x" if each == "failed" else "circle" for each in verdicts],
            "color": [COLORS["lowering" if v == "failed" else "quantization"] for v in verdicts],
        }
    )
    chart.line(x="time", y="value", source=source, line_color=_NEUTRAL, line_width=1.8)
    dots = chart.scatter(
        x="time", y="value", marker="marker", source=source, size=9, line_width=2, color="color"
    )
    tooltips = [("run", "@when"), (name, "@text"), ("tests", "@verdict")]
    return _finished(
        chart, f"{name} of each run", HoverTool(renderers=[dots], tooltips=tooltips), x="", y=name
    )


def histogram(found: Distribution) -> Chart:
    """Return the distribution of an output's values by side, with qmin and qmax marked."""
    marks = [float(found.edges[0]), float(found.edges[-1]), *found.limits]
    # Beside qmin and qmax there is room for their names, on a phone, too.
    margin = (max(marks) - min(marks)) * (0.25 if found.limits else 0.04)
    highest = max(int(counts.max()) for counts in found.counts.values())
    top = highest * 1.1
    values = Range1d(min(marks) - margin, max(marks) + margin)
    chart = _figure(320, x_range=values, y_range=Range1d(0, top))
    bins = ColumnDataSource(
        {
            "left": found.edges[:-1],
            "right": found.edges[1:],
            "from": [f"{edge:.4g}" for edge in found.edges[:-1]],
            "to": [f"{edge:.4g}" for edge in found.edges[1:]],
            **found.counts,
        }
    )
    for side, counts in found.counts.items():
        # A step line along the edges of the bins, from 0 to 0.
        heights = np.concatenate(([0], np.repeat(counts, 2), [0]))
        steps = ColumnDataSource({"x": np.repeat(found.edges, 2), "y": heights})
        _line(chart, steps, "x", "y", COLORS[side], _DASHES[side], side)
        if side == "float":
            _bars(chart, bins, COLORS[side], 0.16, bottom=0, top=side, legend_label=side)
    strips = _bars(chart, bins, _NEUTRAL, 0, bottom=0, top=top)
    # There are no limits where the output is not quantized.
    for place, name, align, offset in zip(
        found.limits, ("qmin", "qmax"), ("right", "left"), (-5, 5), strict=False
    ):
        chart.add_layout(_vertical(place, _NEUTRAL, "solid"))
        end = ColumnDataSource({"x": [place], "y": [highest * 1.04], "text": [name]})
        _text(chart, "x", "y", "text", end, _NEUTRAL, text_align=align, x_offset=offset)
    tooltips = [("values", "@from to @to"), *((side, f"@{side}") for side in found.counts)]
    hover = HoverTool(renderers=[strips], tooltips=tooltips, point_policy="follow_mouse")
    label = "Histograms of an output's values by side"
    return _finished(chart, label, hover, x="value", y="elements")


def scatter(floats: npt.NDArray[np.float64], edge: npt.NDArray[np.float64]) -> Chart:
    """Return the edge values of an output over the float values of the same elements."""
    low = float(min(floats.min(), edge.min()))
    high = float(max(floats.max(), edge.max()))
    margin = (high - low) * 0.04 or 1.0
    ends = low - margin, high + margin
    chart = _figure(320, x_range=Range1d(*ends), y_range=Range1d(*ends))
    columns = {"float": floats, "edge": edge, "difference": edge - floats}
    source = ColumnDataSource({name: each.astype(np.float32) for name, each in columns.items()})
    chart.add_layout(
        Slope(gradient=1, y_intercept=0, line_color=_NEUTRAL, line_dash="dashed", line_width=1.5)
    )
    style = {"size": 5, "fill_color": COLORS["edge"], "fill_alpha": 0.45, "line_color": None}
    dots = chart.scatter(x="float", y="edge", source=source, **style)
    tooltips = [("float", "@float"), ("edge", "@edge"), ("edge − float", "@difference")]
    hover = HoverTool(renderers=[dots], tooltips=tooltips, limit=1)
    label = "Edge values of an output over the float values"
    return _finished(chart, label, hover, x="float", y="edge")


def _figure(height: int, *, with_tools: bool = True, **ranges: Any) -> Figure:
    """Return an empty figure; its colours are CSS variables of the page."""
    zoom, wheel = BoxZoomTool(), WheelZoomTool(modifiers={"ctrl": True})
    chart = figure(
        height=height,
        sizing_mode="stretch_width",
        tools=[PanTool(), zoom, wheel, ResetTool()] if with_tools else [],
        toolbar_location="above" if with_tools else None,
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
        **ranges,
    )
    if with_tools:
        chart.toolbar.active_drag = zoom
        chart.toolbar.active_scroll = wheel
    chart.toolbar.logo = None
    for axis in (*chart.xaxis, *chart.yaxis):
        for label in ("axis_label", "major_label"):
            axis.update(**{f"{label}_text_font": _FONT, f"{label}_text_font_size": "12px"})
        axis.update(axis_label_text_font_style="normal", minor_tick_line_color=None)
    return chart


def _finished(
    chart: Figure, label: str, hover: HoverTool, *, x: str, y: str | None = None
) -> Chart:
    """Return a finished figure as JSON, as `bokeh.embed.json_item` does in thrice the time."""
    chart.add_tools(hover)
    for legend in chart.legend[:1]:
        chart.add_layout(legend, "above")
        legend.update(background_fill_color=None, border_line_color=None, click_policy="hide")
        legend.update(orientation="horizontal", padding=2, margin=2, spacing=10)
        # Unlike those of axes, its labels are elements, which are styled before they are in a page.
        ink = [".bk-label { color: var(--ink) !important; }"]
        legend.update(label_text_font=_FONT, label_text_font_size="12px", stylesheets=ink)
    chart.xaxis.axis_label, chart.yaxis.axis_label = x, y
    document = Document()
    document.add_root(chart)
    drawn = document.to_json(deferred=False)
    item = {"root_id": chart.id, "doc": drawn, "version": drawn["version"]}
    written = json.dumps(item, allow_nan=False, separators=(",", ":")).encode("utf-8")
    return Chart(base64.b64encode(gzip.compress(written, mtime=0)).decode("ascii"), label)


def _bars(
    chart: Figure, source: ColumnDataSource, color: str, alpha: float | str, **more: Any
) -> Any:
    look = {"fill_color": color, "fill_alpha": alpha, "line_color": None}
    return chart.quad(source=source, left="left", right="right", **look, **more)


def _line(
    chart: Figure, source: ColumnDataSource, x: str, y: str, color: str, dash: str, label: str
) -> None:
    look = {"line_color": color, "line_dash": dash, "line_width": 1.8}
    chart.line(x=x, y=y, source=source, legend_label=label, **look)


def _text(
    chart: Figure, x: str, y: str, text: str, source: ColumnDataSource, color: str, **more: Any
) -> None:
    look = {"text_color": color, "text_font": {"value": _FONT}, "text_font_size": "12px"}
    look |= {"text_align": "center", "text_baseline": "middle", "text_font_style": "bold"}
    chart.text(x=x, y=y, text=text, source=source, padding=3, **(look | more))


def _vertical(place: float, color: str, dash: str) -> Span:
    return Span(location=place, dimension="height", line_color=color, line_dash=dash, line_width=2)


def _unique(names: Sequence[str], longest: int = _LONGEST) -> list[str]:
    """Shorten names for the width of a phone; number those that would be equal."""
    short = [name if len(name) <= longest else f"…{name[1 - longest :]}" for name in names]
    return [
        f"{name} ({short[:i].count(name) + 1})" if short.count(name) > 1 else name
        for i, name in enumerate(short)
    ]
