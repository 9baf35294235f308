"""The content of the page, computed from the record of a run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytest_edgeq.numerics.findings import DiffLine, DiffPart, Finding
from pytest_edgeq.report.html.charts import Chart, histogram, layer_chart, scatter, stage_bar
from pytest_edgeq.report.html.distribution import Points, distribution, limits_of, points_of
from pytest_edgeq.report.html.layers import layer_points
from pytest_edgeq.report.html.ops import OpRow, op_rows
from pytest_edgeq.report.html.pictures import png_url
from pytest_edgeq.report.html.stages import decibels, noise_by_output, stage_sentence
from pytest_edgeq.report.model_rows import HEADINGS, ModelRow, cells, model_rows, number_of
from pytest_edgeq.report.run import findings_in

if TYPE_CHECKING:
    from pytest_edgeq.report.run import Run

Record = Mapping[str, Any]


@dataclasses.dataclass
class PageLimits:
    """
    What keeps the page small, whatever the number of models.

    Attributes:
        outputs_per_model: How many outputs of a model have charts.
        points: How many points the scatter charts of all outputs may have.
        picture_bytes: How long the pictures of all samples may be; spent as they are made.
    """

    outputs_per_model: int = 4
    points: int = 40_000
    picture_bytes: int = 900_000


@dataclasses.dataclass(frozen=True)
class OutputView:
    """
    The charts of one output.

    Attributes:
        name: The output's.
        dtype: In the file; `?` where the file has no output of that name.
        histogram: Values by side; None where none is finite.
        scatter: Edge over float; None likewise.
        limits: The values of qmin and qmax, as text; empty where it is not quantized.
        shown: How many points the scatter chart has.
        kept: How many elements the record has.
        dropped: How many of those are not finite.
    """

    name: str
    dtype: str
    histogram: Chart | None
    scatter: Chart | None
    limits: Sequence[str]
    shown: int
    kept: int
    dropped: int


@dataclasses.dataclass(frozen=True)
class Measured:
    """
    One comparison of a model.

    Attributes:
        test: The test that measured it.
        call: `compare` or `check`.
        data: The comparison.
    """

    test: str
    call: str
    data: Record

    @property
    def total_db(self) -> float:
        """SQNR from end to end; −inf for NaN, which is the worst."""
        value = float(self.data["stages"]["total"]["sqnr_db"])
        return -math.inf if math.isnan(value) else value

    @property
    def numbers(self) -> Iterator[tuple[str, str, Record]]:
        """The errors of each output by stage: stage, output, metrics."""
        for stage in ("conversion", "quantization", "lowering", "total"):
            if stage in self.data["stages"]:
                for name, errors in self.data["stages"][stage]["outputs"].items():
                    yield stage, name, errors


@dataclasses.dataclass(frozen=True)
class Claim:
    """A baseline that a test of the model was held against: the test, the record, its lines."""

    test: str
    data: Record
    lines: Sequence[DiffLine]


@dataclasses.dataclass(frozen=True)
class Found:
    """A finding on a model: the test, the first line of the text, the other lines."""

    test: str
    first: str
    rest: str


@dataclasses.dataclass(frozen=True)
class Sample:
    """One of the worst samples: index, SQNR as text, data URLs of its pictures by input."""

    index: int
    sqnr: str
    pictures: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Layers:
    """Errors by layer: the test that measured them, the record, the chart if there is one."""

    test: str
    data: Record
    chart: Chart | None


@dataclasses.dataclass(frozen=True)
class ModelView:
    """
    What the page shows of one model.

    Attributes:
        row: Of the table of models.
        data: The model in the record.
        tests: That used it.
        findings: Of health and of `edgeq.check`, each text once.
        comparisons: All of them, the worst first; charts are of the first.
        stage_chart: Noise by stage.
        stage_text: The figures behind it, or why there is no chart.
        layers: The localization that found a culprit, else the last one.
        outputs: Those with charts, the worst first.
        samples: The worst ones.
        pictures_left_out: Whether pictures were left out to keep the page small.
        ops: The op-dtype map.
        claims: Baselines of maps and errors.
    """

    row: ModelRow
    data: Record
    tests: Sequence[Record]
    findings: Sequence[Found]
    comparisons: Sequence[Measured]
    stage_chart: Chart | None
    stage_text: str
    layers: Layers | None
    outputs: Sequence[OutputView]
    samples: Sequence[Sample]
    pictures_left_out: bool
    ops: Sequence[OpRow]
    claims: Sequence[Claim]

    @property
    def cells(self) -> dict[str, str]:
        """The row as text, by heading."""
        return dict(zip(HEADINGS, cells(self.row), strict=True))

    @property
    def failures(self) -> list[Record]:
        """The tests that failed."""
        return [test for test in self.tests if test["failure"] is not None]

    @property
    def schemes(self) -> list[str]:
        """Schemes of the ops, for the filter."""
        return sorted({op.data["scheme"] for op in self.ops})


def model_views(run: Run, limits: PageLimits) -> list[ModelView]:
    """Return the models, the worst first."""
    rows = model_rows(run)
    chosen = {row.key: _comparisons(run, row.key) for row in rows}
    charted = sum(
        min(len(found[0].data["points"]), limits.outputs_per_model)
        for found in chosen.values()
        if found
    )
    points = limits.points // max(1, charted)
    return [_view(run, row, chosen[row.key], limits, points) for row in rows]


def _view(
    run: Run, row: ModelRow, comparisons: Sequence[Measured], limits: PageLimits, points: int
) -> ModelView:
    model = run.models[row.key]
    worst = comparisons[0].data if comparisons else None
    stage_chart, stage_text = _stages(worst)
    samples, left_out = _samples(worst, limits)
    layers = _layers(run, row.key)
    tests = run.tests_of(row.key)
    return ModelView(
        row=row,
        data=model,
        tests=tests,
        findings=_findings(run, row.key, comparisons),
        comparisons=comparisons,
        stage_chart=stage_chart,
        stage_text=stage_text,
        layers=layers,
        outputs=[] if worst is None else _outputs(model, worst, limits, points),
        samples=samples,
        pictures_left_out=left_out,
        ops=op_rows(model["ops"], None if layers is None else layers.data),
        claims=[
            Claim(test["test"], claim, _diff(claim)) for test in tests for claim in test["claims"]
        ],
    )


def _diff(claim: Record) -> list[DiffLine]:
    """Return the change of a baseline as lines; none where nothing changed."""
    if claim["change"] is None:
        return []
    change = Finding.from_dict(claim["change"])
    title, *evidence = (DiffLine((DiffPart(text),)) for text in (change.title, *change.evidence))
    return [title, *change.diff, *evidence]


def _comparisons(run: Run, key: str) -> list[Measured]:
    found = [
        Measured(test, event["event"], event["comparison"])
        for test, event in run.calls_of(key)
        if "comparison" in event
    ]
    return sorted(found, key=lambda measured: measured.total_db)


def _findings(run: Run, key: str, comparisons: Sequence[Measured]) -> list[Found]:
    """Return the findings of health and of checks, each once."""
    found: dict[tuple[str, ...], str] = {}
    for measured in comparisons:
        for finding in measured.data["health"]:
            found.setdefault((f"{finding['where']}: {finding['message']}",), measured.test)
    for test, event in run.calls_of(key):
        for each in findings_in(event):
            found.setdefault(tuple(each.lines), test)
    return [Found(test, first, "\n".join(rest)) for (first, *rest), test in found.items()]


def _stages(comparison: Record | None) -> tuple[Chart | None, str]:
    if comparison is None:
        return None, ""
    outputs = noise_by_output(comparison["stages"])
    if outputs:
        return stage_bar(outputs), stage_sentence(outputs[0])
    total = decibels(number_of(comparison["stages"]["total"]["sqnr_db"]))
    if len(comparison["stages"]) < 3:
        why = (
            "The loss was measured from end to end alone; for its stages call "
            "edgeq.load(…, float_tflite=…) with the float file beside this one."
        )
        return None, f"SQNR: total {total}. {why}"
    return None, f"SQNR: total {total}. No stage has an error that can be shared out."


def _layers(run: Run, key: str) -> Layers | None:
    found = [(test, event["layers"]) for test, event in run.calls_of(key) if "layers" in event]
    if not found:
        return None
    blaming = [each for each in found if each[1]["culprit"] is not None]
    test, layers = (blaming or found)[-1]
    points = layer_points(layers)
    return Layers(test, layers, None if points is None else layer_chart(points))


def _outputs(
    model: Record, comparison: Record, limits: PageLimits, points: int
) -> list[OutputView]:
    totals = comparison["stages"]["total"]["outputs"]

    def badness(name: str) -> float:
        value = float(totals[name]["sqnr_db"])
        return -math.inf if math.isnan(value) else value

    names = sorted(comparison["points"], key=badness)[: limits.outputs_per_model]
    return [
        _output(model, name, totals[name], comparison["points"][name], points) for name in names
    ]


def _output(
    model: Record, name: str, errors: Record, recorded: Mapping[str, Sequence[Any]], most: int
) -> OutputView:
    borders = [border for border in model["outputs"] if border["name"] == name]
    # Signatures may share a name, and differ in the scale.
    border = next((each for each in borders if each["scale"] == errors.get("scale")), None)
    limits = None if border is None else limits_of(border)
    found = points_of(recorded)
    kept = len(next(iter(recorded.values()), ()))
    charts: tuple[Chart | None, Chart | None] = (None, None)
    if found is not None:
        charts = _charts_of(found, limits, None if border is None else border["scale"], most)
    return OutputView(
        name=name,
        dtype="?" if border is None else border["dtype"],
        histogram=charts[0],
        scatter=charts[1],
        limits=[] if limits is None else [f"{value:.4g}".replace("-", "−") for value in limits],
        shown=0 if found is None else min(most, kept - found.dropped),
        kept=kept,
        dropped=kept if found is None else found.dropped,
    )


def _charts_of(
    found: Points, limits: tuple[float, float] | None, scale: float | None, most: int
) -> tuple[Chart, Chart]:
    thinned = found.thinned(most)
    return (
        histogram(distribution(found, limits, scale)),
        scatter(thinned["float"], thinned["edge"]),
    )


def _samples(comparison: Record | None, limits: PageLimits) -> tuple[list[Sample], bool]:
    if comparison is None:
        return [], False
    samples, left_out = [], False
    for each in comparison["worst_samples"]:
        pictures = {}
        for position, picture in each["pictures"].items():
            url = png_url(picture)
            if len(url) > limits.picture_bytes:
                left_out = True
                continue
            limits.picture_bytes -= len(url)
            pictures[position] = url
        samples.append(Sample(each["index"], decibels(number_of(each["sqnr_db"])), pictures))
    return samples, left_out
