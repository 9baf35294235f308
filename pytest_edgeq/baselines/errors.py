"""
Baselines of errors: their validation, regressions and improvements.

A metric is compared with the limits that were derived when it was stored, `worst` and `best`, or
with narrower ones derived from the paired samples of both builds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from pytest_edgeq.baselines.build import (
    BUILD,
    data_changes,
    describe_build,
    fewer_samples,
    has_range_of,
    other_input,
)
from pytest_edgeq.baselines.paired_limits import floor_db, narrowed, on_other_kernels
from pytest_edgeq.baselines.shape import ShapeCheck, is_number, shape_problem
from pytest_edgeq.numerics.findings import (
    BUILD_CHANGED,
    ERRORS_REGRESSED,
    FILE,
    LOSS_KINDS,
    NO_HARM,
    NOT_COMPARED,
    OTHER_DATA,
    Finding,
    Harm,
    aligned,
    counted,
    first_of,
)
from pytest_edgeq.numerics.metric_table import BY_SAMPLE, LOWER_BOUNDED, METRICS

_SHOWN_ROWS: Final = 4  # the others are metrics of the same loss

# Of stages that gained as much noise, the one that explains the others first.
_STAGES: Final = ("lowering", "quantization", "conversion", "total")

_Row = Mapping[str, Any]
_RowKey = tuple[str, str, str]

_SUM = ShapeCheck(lambda value: is_number(value) and value >= 0, "a sum of a sample")
_FIGURE = ShapeCheck(lambda value: is_number(value) or value in ("inf", "-inf"), "a number")
_METRIC = ShapeCheck(
    lambda value: isinstance(value, str) and value in METRICS, f"one of {', '.join(METRICS)}"
)
_ROW = {
    **dict.fromkeys(("stage", "output"), str),
    "metric": _METRIC,
    **dict.fromkeys(("value", "worst", "best"), _FIGURE),
    "samples?": [_SUM],
}
_ERRORS = {
    **dict.fromkeys(("flow", "runtime", "fingerprint"), str),
    "n_samples": int,
    "target?": dict,
    "errors": [_ROW],
    **BUILD,
}


def problem(data: Mapping[str, Any]) -> str:
    """Return why stored errors are invalid; empty if they are valid."""
    if wrong := shape_problem(data, _ERRORS, "data"):
        return wrong
    keys = [_key(row) for row in data["errors"]]
    if not keys or len(set(keys)) < len(keys):
        return "data.errors has one metric twice" if keys else "data.errors is empty"
    return ""


def summarize(data: Mapping[str, Any]) -> str:
    """Return the SQNR of the stage total, its limit and the number of samples, in one line."""
    rows = [row for row in data["errors"] if (row["stage"], row["metric"]) == ("total", "sqnr_db")]
    samples = counted(data["n_samples"], "sample")
    if not rows:
        return samples
    row = min(rows, key=lambda each: float(each["worst"]))
    return (
        f"output {row['output']!r}: sqnr {_figure(row, 'value')} dB, fails below "
        f"{_figure(row, 'worst')} dB ({samples})"
    )


def describe_change(old: Mapping[str, Any], new: Mapping[str, Any]) -> Finding | None:
    """Return the regressions, or why nothing can be compared; None if all is within its margin."""
    if old["fingerprint"] != new["fingerprint"]:
        by_sample = [str(side["fingerprint"]).startswith(BY_SAMPLE) for side in (old, new)]
        if by_sample[0] != by_sample[1]:
            return _not_compared(
                f"data hashed in another way: expected {_data(old)}, got {_data(new)}",
                "samples of edgeq.samples(factory, n), which workers read, are hashed one by one, "
                "those of any other iterable in one go",
                "give them as they were given when the errors were stored",
            )
        differ = other_input(old, new) or f"expected {_data(old)}, got {_data(new)}"
        return Finding(
            kind=OTHER_DATA,
            place=FILE,
            headline=f"the evaluation samples are not the baseline's: {differ}",
            causes=("errors on other samples say nothing about the model",),
            fix="give the same samples in the same order, unshuffled and unaugmented",
        )
    if old["flow"] != new["flow"]:
        return _not_compared(
            f"measured in another flow: expected {old['flow']}, got {new['flow']}",
            "another flow has other stages, and rounds in another way",
        )
    after = {_key(row): row for row in new["errors"]}
    before = _limits(old, new)
    rank = _rank(before, after)
    worse = _worse(before, after)
    gone = sorted(before.keys() - after.keys(), key=rank)
    came = sorted(after.keys() - before.keys(), key=rank)
    built, fewer = describe_build(old, new), fewer_samples(old, new)
    if not (worse or gone or came or built or fewer):
        return None
    lines = _change_lines(before, after, worse, gone, came)
    # Changes of the build are causes if errors are worse, else they are the finding.
    lines[1:1] = [] if worse else [*built, *fewer]
    return Finding(
        kind=ERRORS_REGRESSED if worse else BUILD_CHANGED,
        place=FILE,
        headline=lines[0],
        harm=_harm(before, after, worse),
        causes=tuple(built) if worse else (),
        evidence=tuple(lines[1:]),
    )


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str | None]:
    """Return changes of runtime, weights and calibration, on which errors depend."""
    is_same = _kernels(old) == _kernels(new)
    runtime = "" if is_same else f"runtime: {' → '.join(_runtimes(old, new))}"
    return {"runtime": runtime, **data_changes(old, new)}


def is_explained_by(layer: Finding, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """
    Whether a finding on layers can be why errors are worse than in the baseline.

    A loss by quantization cannot if the worse stage quantizes nothing, or if weights and range are
    the same.
    """
    if layer.kind not in LOSS_KINDS:
        return True
    worse = regressed(old, new)
    if worse and worse[0][0] in ("lowering", "conversion"):
        return False
    has_weights = changes(old, new)["weights"] == ""
    return not (has_weights and has_range_of(layer.place, old, new))


def regressed(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[_RowKey]:
    """Return stage, output and metric of every value worse than its limit."""
    return _worse(_limits(old, new), {_key(row): row for row in new["errors"]})


def _worse(before: Mapping[_RowKey, _Row], after: Mapping[_RowKey, _Row]) -> list[_RowKey]:
    """Return the keys worse than their limits, the stage that gained most noise first."""
    keys = (key for key in before if key in after and _is_worse(before[key], after[key]))
    return sorted(keys, key=_rank(before, after))


def _not_compared(symptom: str, cause: str, fix: str = "") -> Finding:
    return Finding(
        kind=NOT_COMPARED,
        place=FILE,
        headline=f"errors not compared: {symptom}",
        causes=(cause,),
        fix=fix,
    )


_EXACT_DB: Final = 150.0  # SQNR of what differs by float32's rounding alone


def _harm(
    before: Mapping[_RowKey, _Row], after: Mapping[_RowKey, _Row], worse: Sequence[_RowKey]
) -> Harm:
    """Return the most dB that an output lost."""
    pairs = ((before[key], after[key]) for key in worse if key[2] == "sqnr_db")
    values = ((float(was["value"]), float(now["value"])) for was, now in pairs)
    lost = (Harm.decibels(min(was, _EXACT_DB) - now) for was, now in values)
    return max(lost, default=NO_HARM)


def loose(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return a line for each metric better than its margin, of errors that did not regress."""
    before = _limits(old, new)
    return [
        f"{row['stage']}, output {row['output']!r}: {row['metric']} {_figure(was, 'value')} → "
        f"{_figure(row, 'value')}"
        for row in new["errors"]
        if (was := before.get(_key(row))) is not None and _is_better(was, row)
    ]


def tightened(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Replace only the loose rows, so that small losses do not accumulate."""
    before = {_key(row): row for row in old["errors"]}
    limits = _limits(old, new)
    rows = [
        row
        if (was := limits.get(key := _key(row))) is None or _is_better(was, row)
        else before[key]
        for row in new["errors"]
    ]
    return {**new, "errors": rows}


def _limits(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[_RowKey, _Row]:
    """Return the stored rows by key, with limits as narrow as runtime and samples allow."""
    if _kernels(old) != _kernels(new):
        return {_key(row): on_other_kernels(row) for row in old["errors"]}
    after = {_key(row): row for row in new["errors"]}
    rows = {_key(row): row for row in old["errors"]}
    return {
        key: narrowed(row, after[key], _floor(old["flow"], rows, key)) if key in after else row
        for key, row in rows.items()
    }


def _kernels(data: Mapping[str, Any]) -> tuple[object, ...]:
    """Return the identity of the kernels: the runtime, and machine and GPU of a target."""
    target = data.get("target", {})
    return data["runtime"], *(target.get(n) for n in ("machine", "features", "package", "adapter"))


def _runtimes(*sides: Mapping[str, Any]) -> list[str]:
    """Name the runtimes, with targets' machines, or their GPUs or features where these differ."""
    targets = [data.get("target") or {} for data in sides]
    named = [[each.get(n) for n in ("machine", "package", "release")] for each in targets]
    notes = ["{}, {} {}".format(*each) if each[0] else "" for each in named]
    if named[0] == named[-1]:
        adapters = [str(each.get("adapter", "")) for each in targets]
        features = [" ".join(map(str, each.get("features") or [])) for each in targets]
        notes = features if adapters[0] == adapters[-1] else adapters
    pairs = zip((str(data["runtime"]) for data in sides), notes, strict=True)
    return [f"{name} ({note})" if note else name for name, note in pairs]


def _floor(flow: str, rows: Mapping[_RowKey, _Row], key: _RowKey) -> float:
    stage, output, _ = key
    known = rows.get((stage, output, "sqnr_db"))
    return floor_db(flow, stage, -math.inf if known is None else float(known["value"]))


def _change_lines(
    before: Mapping[_RowKey, _Row],
    after: Mapping[_RowKey, _Row],
    worse: Sequence[_RowKey],
    gone: Sequence[_RowKey],
    came: Sequence[_RowKey],
) -> list[str]:
    lines = []
    if worse:
        key = worse[0]
        sense = "at least" if key[2] in LOWER_BOUNDED else "at most"
        more = f" (and {len(worse) - 1} more)" if len(worse) > 1 else ""
        lines.append(
            f"errors regressed: {_place(key)}: expected {sense} {_figure(before[key], 'worst')} "
            f"(remembered {_figure(before[key], 'value')}), "
            f"got {_figure(after[key], 'value')}{more}"
        )
        lines += _worst(before, after, worse)
    for keys, verb in ((gone, "disappeared"), (came, "appeared")):
        if keys:
            lines.append(f"errors {verb}: {first_of(list(map(_place, keys)))}")
    return lines


def _worst(
    before: Mapping[_RowKey, _Row], after: Mapping[_RowKey, _Row], worse: Sequence[_RowKey]
) -> list[str]:
    """Return a table of the first metrics; empty for a single one, which line one shows."""
    if len(worse) == 1:
        return []
    rows = [("stage", "output", "metric", "remembered", "margin", "now")]
    for key in worse[:_SHOWN_ROWS]:
        was = before[key]
        rows.append((*key, _figure(was, "value"), _margin(was), _figure(after[key], "value")))
    left = len(worse) - _SHOWN_ROWS
    return [*aligned(rows, indent="  "), *([f"  … and {left} more"] if left > 0 else [])]


def _place(key: _RowKey) -> str:
    return f"{key[0]}, output {key[1]!r}: {key[2]}"


def _margin(row: _Row) -> str:
    value, worst = float(row["value"]), float(row["worst"])
    if value in (float("inf"), float("-inf")):
        return f"to {_figure(row, 'worst')}"
    return f"{worst - value:+.3g}"


def _rank(
    before: Mapping[_RowKey, _Row], after: Mapping[_RowKey, _Row]
) -> Callable[[_RowKey], tuple[float, int, int, str]]:
    """Return a sort key: the stage that gained most noise first."""
    gained: dict[str, float] = {}
    for key in before:
        stage, _, metric = key
        if metric == "sqnr_db" and key in after and stage != "total":
            more = _noise(after[key]) - _noise(before[key])
            gained[stage] = max(gained.get(stage, 0.0), more)

    def rank(key: _RowKey) -> tuple[float, int, int, str]:
        stage, output, metric = key
        place = _STAGES.index(stage) if stage in _STAGES else len(_STAGES)
        return -gained.get(stage, 0.0), place, METRICS[metric].rank, output

    return rank


def _noise(sqnr: _Row) -> float:
    """Return the noise power relative to the signal, clamped to the range of float64."""
    return math.pow(10.0, -max(float(sqnr["value"]), -3000.0) / 10)


def _is_worse(was: _Row, now: _Row) -> bool:
    return not METRICS[was["metric"]].accepts(float(now["value"]), float(was["worst"]))


def _is_better(was: _Row, now: _Row) -> bool:
    value, best = float(now["value"]), float(was["best"])
    return value != best and METRICS[was["metric"]].accepts(value, best)


def _key(row: _Row) -> _RowKey:
    return row["stage"], row["output"], row["metric"]


def _figure(row: _Row, key: str) -> str:
    """Format a number of a row, with more digits for shares and ratios near 1."""
    number = float(row[key])
    if row["metric"] == "perplexity_ratio":
        return f"{number:.6g}"
    is_share = METRICS[row["metric"]].is_share
    return f"{number:.6f}" if is_share and 0.9 <= number < 1 else f"{number:.4g}"


def _data(data: Mapping[str, Any]) -> str:
    fingerprint = str(data["fingerprint"])
    digest = fingerprint.removeprefix(BY_SAMPLE)
    by = "" if digest == fingerprint else " each"
    return f"{data['n_samples']} sample(s) with SHA-256{by} {digest[:12]}…"
