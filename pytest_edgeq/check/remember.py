"""Select the data of a comparison to store, and the budget that it supports."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from pytest_edgeq.baselines.paired_limits import FLOAT_NOISE_DB, at_least, floor_db
from pytest_edgeq.check.evaluation import (
    accepted,
    broken,
    cannot_fail,
    limits_of,
    notes_on,
    passes_zeros,
    too_wide,
)
from pytest_edgeq.errors import failure
from pytest_edgeq.numerics.bootstrap import CHOICE_METRICS, RESAMPLES, SEED, remembered
from pytest_edgeq.numerics.budget import Budget, loosened
from pytest_edgeq.numerics.comparison import Comparison
from pytest_edgeq.numerics.confidence import LEVEL
from pytest_edgeq.numerics.findings import NONFINITE, USELESS, ZERO_OUTPUT, Finding, Place, text_of
from pytest_edgeq.numerics.metric_table import METRICS, UPPER_BOUNDED
from pytest_edgeq.numerics.results import OutputErrors, StageErrors, is_below_a_step, wiped

_NO_SIGNAL = (
    "the reference is zero in all elements, so that no bound could fail; give samples in which it "
    "is not"
)


def errors_to_remember(comparison: Comparison) -> dict[str, Any]:
    """Return the content of the baseline of a comparison."""
    _require_sound(comparison)
    return {
        **build_to_remember(comparison),
        "flow": comparison.flow,
        "n_samples": comparison.total.n_samples,
        "fingerprint": comparison.fingerprint,
        "margin": {
            "of": "a rebuild on the same samples",
            "bootstrap": {"resamples": RESAMPLES, "seed": SEED, "level": LEVEL},
            "paired": {"by": "sample", "level": LEVEL},
            "floor_db": {
                each: floor_db(comparison.flow, each, -math.inf) for each in comparison.stages
            },
            "float_noise_db": FLOAT_NOISE_DB,
        },
        "errors": [_with_samples(row, comparison.stages) for row in _rows(comparison)],
    }


def build_to_remember(comparison: Comparison) -> dict[str, Any]:
    """Return the stored description of the build, and of the kernels that ran it."""
    target = {} if comparison.target is None else {"target": comparison.target.kernels}
    return {"runtime": comparison.runtime, **target, **comparison.build()}


def _rows(comparison: Comparison) -> list[dict[str, Any]]:
    """Return every metric of every stage with the margin that a rebuild explains."""
    stages = comparison.stages
    return [
        at_least(
            row,
            floor_db(
                comparison.flow, row["stage"], stages[row["stage"]].outputs[row["output"]].sqnr_db
            ),
        )
        for row in remembered(stages)
    ]


def _with_samples(row: dict[str, Any], stages: dict[str, StageErrors]) -> dict[str, Any]:
    """Add the sums by sample, for a paired comparison with the next build."""
    if not (name := METRICS[row["metric"]].by_sample):
        return row
    samples = stages[row["stage"]].outputs[row["output"]].samples
    # 5 digits are exact to 0.0004 dB and keep the file readable.
    return {**row, "samples": [float(f"{getattr(each, name):.5g}") for each in samples]}


def budget_to_suggest(comparison: Comparison) -> tuple[Budget, list[str]]:
    """Return the budget for the stage `total` that a comparison supports, and notes."""
    _require_sound(comparison)
    flow, outputs = comparison.flow, list(comparison.total.outputs.values())
    for output in outputs:
        if (found := broken(output, flow)) is not None:
            raise ValueError(_no_budget(comparison, output, found))
    of_choices = all(output.chosen for output in outputs)
    metrics = CHOICE_METRICS if of_choices else None
    limits = [limits_of(output, flow, metrics=metrics) for output in outputs]
    for output, given in zip(outputs, limits, strict=True):
        if output.chosen or is_below_a_step(output):
            continue
        if (found := too_wide(output, flow, given)) is not None:
            raise ValueError(_no_budget(comparison, output, found))
    bounds: dict[str, float] = {}
    notes = notes_on(comparison.evaluated)
    for metric in CHOICE_METRICS if of_choices else _wanted(outputs):
        values = [each[metric] for each in limits if metric in each]
        if len(values) < len(outputs):
            continue
        actual = (max if metric in UPPER_BOUNDED else min)(values)
        bound = loosened(metric, actual)
        limit = {metric: actual if bound is None else bound}
        passing = [output for output in outputs if accepted(output, limit)]
        if bound is not None and len(passing) < len(outputs):
            bounds[metric] = bound
        elif passing:
            notes.append(f"{metric} is left out: {cannot_fail(passing[0], flow, metric)}")
    judged = [each for each in outputs if not is_below_a_step(each)]
    if not bounds or any(len(accepted(each, bounds)) == len(bounds) for each in judged):
        if of_choices:
            why = cannot_fail(outputs[0], flow, "top1_agreement")
            raise ValueError(f"no budget for {_place(comparison, outputs[0])}: {why}")
        output, given = min(zip(outputs, limits, strict=True), key=lambda pair: pair[1]["sqnr_db"])
        if not wiped(output):
            raise ValueError(f"no budget for {_place(comparison, output)}: {_NO_SIGNAL}")
        found = passes_zeros(output, flow, given["sqnr_db"])
        raise ValueError(_no_budget(comparison, output, found))
    return Budget(**bounds), notes


def _wanted(outputs: list[OutputErrors]) -> list[str]:
    """Return the metrics to bound; each detects another defect."""
    scaled = all(output.max_lsb_error is not None for output in outputs)
    wanted = ["sqnr_db", "cosine_similarity", "max_lsb_error" if scaled else "max_abs_error"]
    # If every sample is one row, the last axis holds classes.
    is_classified = all(
        each.samples and all(sample.rows == 1 for sample in each.samples) for each in outputs
    )
    return [*wanted, "top1_agreement"] if is_classified else wanted


def _no_budget(comparison: Comparison, output: OutputErrors, found: Finding) -> str:
    title = f"no budget for {_place(comparison, output)}: {found.summary}"
    return text_of([replace(found, headline=title)])


def _place(comparison: Comparison, output: OutputErrors) -> str:
    return f"{comparison.name}: total, output {output.name!r}"


def _require_sound(comparison: Comparison) -> None:
    for stage, errors in comparison.stages.items():
        for output in errors.outputs.values():
            where = f"{comparison.name}: {stage}, output {output.name!r}"
            sums = (each for sample in output.samples for each in sample)
            if output.nonfinite or not output.samples or not all(map(math.isfinite, sums)):
                found = Finding(
                    kind=NONFINITE,
                    place=Place("output", output.name),
                    headline=f"{where}: expected finite values, got {output.nonfinite} of "
                    f"{output.n_elements} elements that are not, or sums beyond float64",
                    causes=("errors that are not numbers can be neither stored nor bounded",),
                    harm=USELESS,
                )
                raise failure([found])
            if output.degenerate:
                found = Finding(
                    kind=ZERO_OUTPUT,
                    place=Place("output", output.name),
                    headline=f"{where}: reference and actual are zero in all {output.n_elements} "
                    "elements: nothing was tested",
                    fix="give samples for which this output is not zero",
                )
                raise failure([found])
