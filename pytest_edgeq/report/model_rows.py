"""The rows of a report's tables, one for each model."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pytest_edgeq.numerics.findings import aligned

if TYPE_CHECKING:
    from pytest_edgeq.report.run import Run

Verdict = Literal["failed", "passed", "skipped"]
_VERDICTS: tuple[Verdict, ...] = ("failed", "passed")  # of any test, the first that there is


@dataclasses.dataclass(frozen=True)
class ModelRow:
    """The results of one model in a run."""

    key: str  # in the record
    name: str  # the model's
    quantizer: str  # the quantizer, or the flow of a loaded file
    is_replaced: bool  # whether the file is another one than the flow made
    size_bytes: int  # size of the file
    share_of_float: float | None  # its size divided by the float model's; None if unknown
    quantized_ops: int  # number of ops that compute in a quantized scheme
    float_ops: int  # number of ops that compute in float
    sqnr_db: Mapping[str, float]  # least by stage, over the comparisons of the run
    top1: float | None  # least top-1 agreement, from 0 to 1; None without classes
    verdict: Verdict  # `failed` if any test failed that used the model
    failed: int  # number of those
    tests: int  # number of tests that used the model
    seconds: float  # duration of the calls that worked on it
    cached: tuple[str, ...]  # steps of the conversion that were read from the cache
    made: tuple[str, ...]  # steps that were run


def model_rows(run: Run) -> list[ModelRow]:
    """Return the rows of a run, models with failed tests first, then by SQNR."""
    return sorted(
        (_row(run, key) for key in run.models),
        key=lambda row: (row.verdict != "failed", badness(row.sqnr_db.get("total", math.inf))),
    )


def badness(sqnr_db: float | str) -> float:
    """Return an SQNR of the record to sort by; NaN is the worst."""
    value = float(sqnr_db)
    return -math.inf if math.isnan(value) else value


def number_of(value: Any) -> float | None:
    """Return a number of the record, where `"nan"`, `"inf"` and `"-inf"` are text."""
    return None if value is None else float(value)


def _row(run: Run, key: str) -> ModelRow:
    model = run.models[key]
    schemes = Counter(op["scheme"] for op in model["ops"])
    stages: dict[str, list[float]] = {}
    top1: list[float] = []
    for _, comparison in run.measured(key, "comparison"):
        for stage, errors in comparison["stages"].items():
            stages.setdefault(stage, []).append(float(errors["sqnr_db"]))
        agreement = number_of(comparison["stages"]["total"]["top1_agreement"])
        if agreement is not None:
            top1.append(agreement)
    tests = run.tests_of(key)
    outcomes = [test["outcome"] for test in tests]
    steps = [step for _, made in run.measured(key, "steps") for step in made]
    float_size = model["float_size"]
    return ModelRow(
        key=key,
        name=model["name"],
        quantizer=model["quantizer"] or model["flow"],
        is_replaced=model["replaces"] is not None,
        size_bytes=model["size_bytes"],
        share_of_float=float_size and model["size_bytes"] / float_size["size_bytes"],
        quantized_ops=sum(schemes.values()) - schemes["float"] - schemes["integer"],
        float_ops=schemes["float"],
        sqnr_db={stage: _least(values) for stage, values in stages.items()},
        top1=_least(top1) if top1 else None,
        verdict=next((each for each in _VERDICTS if each in outcomes), "skipped"),
        failed=outcomes.count("failed"),
        tests=len(tests),
        seconds=sum(event["seconds"] for _, event in run.calls_of(key)),
        cached=_kinds(steps, is_cached=True),
        made=_kinds(steps, is_cached=False),
    )


def _least(values: list[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else min(values)


def _kinds(steps: list[Mapping[str, Any]], *, is_cached: bool) -> tuple[str, ...]:
    return tuple(dict.fromkeys(s["kind"] for s in steps if s["is_cached"] == is_cached))


HEADINGS = (
    *("model", "quantizer", "KB", "share", "float ops", "SQNR dB", "quant.", "lower.", "top-1"),
    *("verdict", "s", "cached"),
)
LEFT_ALIGNED = frozenset({0, 1, 9, 11})  # columns of text


def cells(row: ModelRow) -> tuple[str, ...]:
    """Return a row as text, a cell a column of `HEADINGS`."""
    lowering = row.sqnr_db.get("lowering", row.sqnr_db.get("conversion"))
    of_tests = f" {row.failed}/{row.tests}" if row.failed else ""
    return (
        f"{row.name} (another file)" if row.is_replaced else row.name,
        row.quantizer,
        f"{row.size_bytes / 1000:,.1f}",
        "–" if row.share_of_float is None else f"{100 * row.share_of_float:.0f} %",
        f"{row.float_ops}/{row.quantized_ops + row.float_ops}",
        _decibels(row.sqnr_db.get("total")),
        _decibels(row.sqnr_db.get("quantization")),
        _decibels(lowering),
        "–" if row.top1 is None else f"{100 * row.top1:.3g} %",
        f"{row.verdict}{of_tests}",
        f"{row.seconds:.1f}",
        _from_cache(row),
    )


def _decibels(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}".replace("-", "−")


def _from_cache(row: ModelRow) -> str:
    if not row.cached:
        return "nothing" if row.made else "–"
    return "all" if not row.made else ", ".join(row.cached)


def table_lines(run: Run) -> list[tuple[str, bool]]:
    """Return the table of models as lines of text, each with whether its model failed."""
    rows = model_rows(run)
    if not rows:
        return []
    texts = [HEADINGS, *map(cells, rows)]
    # A column in which no row has anything is left out.
    columns = enumerate(zip(*texts[1:], strict=True))
    shown = [i for i, column in columns if i < 2 or not {"–", ""}.issuperset(column)]
    lines = aligned(
        [[row[i] for i in shown] for row in texts],
        numeric=[at for at, i in enumerate(shown) if i not in LEFT_ALIGNED],
    )
    return list(zip(lines, [False, *(row.verdict == "failed" for row in rows)], strict=True))
