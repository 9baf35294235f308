"""What of a comparison is remembered, and the budget that it supports."""

from __future__ import annotations

import math
from typing import Any

from pytest_edgeq.numerics.bootstrap import RESAMPLES, SEED, remembered
from pytest_edgeq.numerics.budget import Budget, loosened
from pytest_edgeq.numerics.comparison import Comparison
from pytest_edgeq.numerics.confidence import LEVEL
from pytest_edgeq.numerics.results import UPPER_BOUNDED, OutputErrors, StageErrors
from pytest_edgeq.snapshots.paired_limits import FLOAT_NOISE_DB, SUMS, at_least, floor_db

__all__ = ["budget_to_suggest", "errors_to_remember"]

# A user's test shows the user's line and the message, not how we came to it.
__tracebackhide__ = True


def errors_to_remember(comparison: Comparison) -> dict[str, Any]:
    """
    Give what the file of a comparison holds.

    Raises:
        AssertionError: An output is not finite, or zero on both sides.
    """
    _require_sound(comparison)
    return {
        "flow": comparison.flow,
        "runtime": comparison.runtime,
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
        **comparison.build(),
        "errors": [
            _with_samples(row, comparison.stages) for row in _rows(comparison, comparison.stages)
        ],
    }


def _rows(comparison: Comparison, stages: dict[str, StageErrors]) -> list[dict[str, Any]]:
    """Every metric with the margin that a rebuild explains: one for a memory and for a budget."""
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
    """Add the sums that the next build is held against sample by sample."""
    if (name := SUMS.get(row["metric"])) is None:
        return row
    samples = stages[row["stage"]].outputs[row["output"]].samples
    # 5 digits are 0.0004 dB, and make a file that can be read.
    return {**row, "samples": [float(f"{getattr(each, name):.5g}") for each in samples]}


def budget_to_suggest(comparison: Comparison) -> Budget:
    """
    Give the budget for the stage `total` that a comparison supports.

    Raises:
        AssertionError: An output is not finite, or zero on both sides.
        ValueError: No metric supports a bound.
    """
    _require_sound(comparison)
    outputs = list(comparison.total.outputs.values())
    worst: dict[str, list[float]] = {}
    for row in _rows(comparison, {"total": comparison.total}):
        worst.setdefault(row["metric"], []).append(float(row["worst"]))
    wanted = ["sqnr_db", "cosine_similarity"]
    scaled = all(output.max_lsb_error is not None for output in outputs)
    wanted.append("max_lsb_error" if scaled else "max_abs_error")
    if all(_is_classified(output) for output in outputs):
        wanted.append("top1_agreement")
    bounds: dict[str, float] = {}
    for metric in wanted:
        values = worst.get(metric, [])
        if len(values) == len(outputs):
            bound = loosened(metric, (max if metric in UPPER_BOUNDED else min)(values))
            if bound is not None:
                bounds[metric] = bound
    if not bounds:
        raise ValueError(
            f"{comparison.name}: the errors are as large as the signal or spread over all that is "
            "possible, so that no budget could fail; look at print(comparison), or give more "
            "samples"
        )
    return Budget(**bounds)


def _is_classified(output: OutputErrors) -> bool:
    """Whether every sample is one row: the last axis of an image or a sequence is no classes."""
    return bool(output.samples) and all(sample.rows == 1 for sample in output.samples)


def _require_sound(comparison: Comparison) -> None:
    for stage, errors in comparison.stages.items():
        for output in errors.outputs.values():
            where = f"{comparison.name}: {stage}, output {output.name!r}"
            sums = (each for sample in output.samples for each in sample)
            if output.nonfinite or not output.samples or not all(map(math.isfinite, sums)):
                raise AssertionError(
                    f"{where}: expected finite values, got {output.nonfinite} of "
                    f"{output.n_elements} elements that are not, or sums beyond float64\n"
                    "Errors that are not numbers can be neither remembered nor bounded."
                )
            if output.degenerate:
                raise AssertionError(
                    f"{where}: reference and actual are zero in all {output.n_elements} elements\n"
                    "Nothing was tested; give inputs that make this output speak."
                )
