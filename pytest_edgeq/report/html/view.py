"""The content of the page, computed from the record of a run, as the templates name it."""

from __future__ import annotations

import base64
import dataclasses
import io
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytest_edgeq.numerics.findings import DiffLine, DiffPart, Finding
from pytest_edgeq.report.html.chart_data import (
    decibels,
    distribution,
    layer_bars,
    layer_points,
    limits_of,
    noise_by_output,
    plan_curve,
    points_of,
    stage_sentence,
)
from pytest_edgeq.report.html.charts import (
    Chart,
    histogram,
    layer_chart,
    plan_chart,
    scatter,
    sensitivity_chart,
    stage_bar,
)
from pytest_edgeq.report.model_rows import HEADINGS, ModelRow, badness, cells, model_rows, number_of
from pytest_edgeq.report.run import findings_in

if TYPE_CHECKING:
    from pytest_edgeq.report.run import Run

Record = Mapping[str, Any]

_STAGES = ("conversion", "quantization", "lowering", "total")
_TWO_GAPS = re.compile(r"\S {2,}\S.* {2,}\S")


_OUTPUTS = 4  # outputs of a model that have charts
_POINTS = 40_000  # of the scatter charts of all outputs


@dataclasses.dataclass
class PageLimits:
    """Limits that keep the page small for any number of models."""

    points: int  # of the scatter chart of one output
    picture_bytes: int = 900_000  # of all samples; spent as they are made


def model_views(run: Run) -> list[Record]:
    """Return the view of each model for the page, the worst first."""
    rows = model_rows(run)
    chosen = {row.key: _comparisons(run, row.key) for row in rows}
    charted = sum(
        min(len(found[0]["data"]["points"]), _OUTPUTS) for found in chosen.values() if found
    )
    limits = PageLimits(_POINTS // max(1, charted))
    return [_view(run, row, chosen[row.key], limits) for row in rows]


def _view(run: Run, row: ModelRow, comparisons: Sequence[Record], limits: PageLimits) -> Record:
    model = run.models[row.key]
    worst = comparisons[0]["data"] if comparisons else None
    stage_chart, stage_text = _stages(worst)
    samples, left_out = _samples(worst, limits)
    layers = _layers(run, row.key)
    tests = run.tests_of(row.key)
    ops = _ops(model["ops"], None if layers is None else layers["data"])
    return {
        "row": row,
        "cells": dict(zip(HEADINGS, cells(row), strict=True)),
        "data": model,
        "tests": tests,
        "failures": [test for test in tests if test["failure"] is not None],
        "findings": _findings(run, row.key, comparisons),
        "comparisons": comparisons,
        "stage_chart": stage_chart,
        "stage_text": stage_text,
        "layers": layers,
        "sensitivity": _sensitivity(run, row.key),
        "plans": _plans(run, row.key),
        "outputs": [] if worst is None else _outputs(model, worst, limits.points),
        "samples": samples,
        "pictures_left_out": left_out,
        "ops": ops,
        "schemes": sorted({op["data"]["scheme"] for op in ops}),
        "claims": [
            {"test": test["test"], "data": claim, "lines": _diff(claim)}
            for test in tests
            for claim in test["claims"]
        ],
    }


def _diff(claim: Record) -> list[DiffLine]:
    """Return the change of a baseline as lines; none where nothing changed."""
    if claim["change"] is None:
        return []
    change = Finding.from_dict(claim["change"])
    title, *evidence = (DiffLine((DiffPart(text),)) for text in (change.title, *change.evidence))
    return [title, *change.diff, *evidence]


def _comparisons(run: Run, key: str) -> list[Record]:
    """Return the comparisons of a model, the worst first, with the errors as rows."""
    found = []
    for test, event in run.calls_of(key):
        if "comparison" not in event:
            continue
        stages = event["comparison"]["stages"]
        numbers = [
            (stage, name, errors)
            for stage in _STAGES
            if stage in stages
            for name, errors in stages[stage]["outputs"].items()
        ]
        found.append(
            {
                "test": test,
                "call": event["event"],
                "data": event["comparison"],
                "numbers": numbers,
                "of_tokens": any("kl" in errors for _, _, errors in numbers),
            }
        )
    return sorted(found, key=lambda each: badness(each["data"]["stages"]["total"]["sqnr_db"]))


def _findings(run: Run, key: str, comparisons: Sequence[Record]) -> list[Record]:
    """Return the findings of health and of checks, each once."""
    found: dict[tuple[str, ...], str] = {}
    for measured in comparisons:
        for finding in measured["data"]["health"]:
            found.setdefault((f"{finding['where']}: {finding['message']}",), measured["test"])
    for test, event in run.calls_of(key):
        for each in findings_in(event):
            found.setdefault(tuple(each.lines), test)
    return [
        {"test": test, "first": first, "rest": "\n".join(rest)}
        for (first, *rest), test in found.items()
    ]


def _stages(comparison: Record | None) -> tuple[Chart | None, str]:
    """Return the chart of the noise by stage, and its caption or why there is none."""
    if comparison is None:
        return None, ""
    outputs = noise_by_output(comparison["stages"])
    if outputs:
        return stage_bar(outputs), stage_sentence(outputs[0])
    total = decibels(number_of(comparison["stages"]["total"]["sqnr_db"]))
    if len(comparison["stages"]) < 3:
        why = (
            "The loss was measured from end to end alone; for its stages call "
            "edgeq.load(…, float_tflite=…) with the float file of this one."
        )
        return None, f"SQNR: total {total}. {why}"
    return None, f"SQNR: total {total}. No stage has an error that can be shared out."


def _layers(run: Run, key: str) -> Record | None:
    """Return the localization that found a culprit, else the last one."""
    found = run.measured(key, "layers")
    if not found:
        return None
    blaming = [each for each in found if each[1]["culprit"] is not None]
    test, layers = (blaming or found)[-1]
    points = layer_points(layers)
    return {
        "test": test,
        "data": layers,
        "chart": points and layer_chart(points, layers["culprit"]),
    }


def _sensitivity(run: Run, key: str) -> Record | None:
    """Return the last sensitivities; those of a plan, of fewer samples, if there are no others."""
    of_plans = [(test, plan["sensitivity"]) for test, plan in run.measured(key, "plan")]
    found = run.measured(key, "sensitivity") or of_plans
    if not found:
        return None
    test, data = found[-1]
    bars = layer_bars(data)
    return {
        "test": test,
        "data": data,
        "sqnr": decibels(number_of(data["sqnr_db"])),
        "shown": bars and len(bars.columns["module"]),
        "chart": bars and sensitivity_chart(bars),
    }


def _plans(run: Run, key: str) -> list[Record]:
    """Return the plans of a model, each with its chart."""
    return [
        {"test": test, "data": plan, "chart": (curve := plan_curve(plan)) and plan_chart(curve)}
        for test, plan in run.measured(key, "plan")
    ]


def _ops(ops: Sequence[Record], layers: Record | None) -> list[dict[str, Any]]:
    """Return the op-dtype map, with the local errors of the ops of one subgraph."""
    subgraphs: dict[int, list[dict[str, Any]]] = {}
    for op in ops:
        part = subgraphs.setdefault(op["subgraph"], [])
        part.append({"index": len(part), "data": op, "local_db": None, "local": "–", "verdict": ""})
    measured = {row["index"]: row for row in ([] if layers is None else layers["rows"])}
    names = {index: row["op"] for index, row in measured.items()}
    for part in subgraphs.values():
        if {row["index"]: row["data"]["op"] for row in part} == names:
            for row in part:
                found = measured[row["index"]]
                local = number_of(found["local_sqnr_db"])
                row |= {"local_db": local, "local": decibels(local), "verdict": found["verdict"]}
            break
    return [row for part in subgraphs.values() for row in part]


def _outputs(model: Record, comparison: Record, most: int) -> list[Record]:
    """Return the charts of the worst outputs, of at most so many points each."""
    totals = comparison["stages"]["total"]["outputs"]
    names = sorted(comparison["points"], key=lambda name: badness(totals[name]["sqnr_db"]))
    return [
        _output(model, name, totals[name], comparison["points"][name], most)
        for name in names[:_OUTPUTS]
    ]


def _output(model: Record, name: str, errors: Record, recorded: Record, most: int) -> Record:
    entries = [entry for entry in model["outputs"] if entry["name"] == name]
    # Signatures may share a name, and differ in the scale.
    entry = next((each for each in entries if each["scale"] == errors.get("scale")), None)
    limits = None if entry is None else limits_of(entry)
    found = points_of(recorded)
    kept = len(next(iter(recorded.values()), ()))
    view = {
        "name": name,
        "dtype": "?" if entry is None else entry["dtype"],
        "histogram": None,
        "scatter": None,
        "limits": [f"{value:.4g}".replace("-", "−") for value in limits or ()],
        "shown": 0,
        "kept": kept,
        "dropped": kept,
    }
    if found is None:
        return view
    thinned = found.thinned(most)
    return view | {
        "histogram": histogram(distribution(found, limits, entry and entry["scale"])),
        "scatter": scatter(thinned["float"], thinned["edge"]),
        "shown": min(most, kept - found.dropped),
        "dropped": found.dropped,
    }


def _samples(comparison: Record | None, limits: PageLimits) -> tuple[list[Record], bool]:
    """Return the worst samples, and whether pictures were left out to keep the page small."""
    samples: list[Record] = []
    left_out = False
    for each in () if comparison is None else comparison["worst_samples"]:
        pictures = {}
        for position, picture in each["pictures"].items():
            url = png_url(picture)
            if len(url) > limits.picture_bytes:
                left_out = True
                continue
            limits.picture_bytes -= len(url)
            pictures[position] = url
        sqnr = decibels(number_of(each["sqnr_db"]))
        samples.append({"index": each["index"], "sqnr": sqnr, "pictures": pictures})
    return samples, left_out


def png_url(picture: Record) -> str:
    """Return a picture of the record as the data URL of a PNG."""
    from PIL import Image

    mode = "L" if picture["channels"] == 1 else "RGB"
    size = picture["width"], picture["height"]
    image = Image.frombytes(mode, size, base64.b64decode(picture["pixels"]))
    written = io.BytesIO()
    image.save(written, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(written.getvalue()).decode('ascii')}"


def text_blocks(text: str) -> list[tuple[bool, str]]:
    """Split a failure text into runs of lines, each with whether it is a table."""
    runs = itertools.groupby(text.splitlines(), lambda line: _TWO_GAPS.search(line) is not None)
    return [(is_table, "\n".join(lines)) for is_table, lines in runs]
