"""Decide what of a comparison is stored, whether its limits can fail, and the budget of it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from pytest_edgeq.baselines.paired_limits import (
    FEWEST_SAMPLES,
    FLOAT_NOISE_DB,
    FLOOR_DB_POSITION,
    at_least,
    floor_db,
)
from pytest_edgeq.errors import failure
from pytest_edgeq.numerics.bootstrap import CHOICE_METRICS, RESAMPLES, SEED, limits
from pytest_edgeq.numerics.budget import Budget, loosened
from pytest_edgeq.numerics.comparison import Comparison
from pytest_edgeq.numerics.findings import (
    NONFINITE,
    NOT_STORED,
    USELESS,
    ZERO_OUTPUT,
    Finding,
    Place,
    counted,
    text_of,
)
from pytest_edgeq.numerics.metric_table import LEVEL, METRICS, OF_TOKENS, UPPER_BOUNDED
from pytest_edgeq.numerics.metrics import json_number
from pytest_edgeq.numerics.results import OutputErrors, is_below_a_step, wiped
from pytest_edgeq.numerics.token_errors import WORST

_MOST_SAMPLES: Final = 1 << 13  # maximum number of samples to consider as sufficient
# Metrics whose limits are reported: a maximum, or one sample, may vary without bound.
_REPORTED: Final = ("sqnr_db", "cosine_similarity", "top1_agreement", *OF_TOKENS)
# Of parts of a sequence: few positions hold too few tokens for margins of the others.
_PART_METRICS: Final = ("sqnr_db",)
_UNEVEN: Final = (
    "the error differs so much between these samples that a rebuild may move it by more than the "
    "SQNR itself"
)

_SHOWN: Final = 2  # how many limits of a baseline a text lists
_LOCALIZE: Final = "find the layer to blame with edgeq.localize(quantized, samples)"

Limits = Mapping[str, float]

_NO_SIGNAL = (
    "the reference is zero in all elements, so that no bound could fail; give samples in which it "
    "is not"
)


def errors_to_remember(comparison: Comparison) -> dict[str, Any]:
    """Return the content of the baseline of a comparison."""
    _require_sound(comparison)
    flow, stages = comparison.flow, comparison.stages
    rows = []
    for stage, output, metrics in _outputs_to_remember(comparison):
        floor = floor_db(flow, stage, output.sqnr_db)
        is_position = output.name == WORST
        if is_position:
            floor = max(floor, FLOOR_DB_POSITION)
        for metric, limit in limits(output, metrics=metrics).items():
            numbers = {key: json_number(number) for key, number in limit._asdict().items()}
            row = {"stage": stage, "output": output.name, "metric": metric, **numbers}
            limited = at_least(row, floor)
            name = METRICS[metric].by_sample
            # The next build may have another worst position.
            if name and not is_position:
                # The sums by sample, for a paired comparison with the next build. 5 digits are
                # exact to 0.0004 dB and keep the file readable.
                limited["samples"] = [
                    float(f"{getattr(each, name):.5g}") for each in output.samples
                ]
            rows.append(limited)
    return {
        **build_to_remember(comparison),
        "flow": flow,
        "n_samples": comparison.total.n_samples,
        "fingerprint": comparison.fingerprint,
        "margin": {
            "of": "a rebuild on the same samples",
            "bootstrap": {"resamples": RESAMPLES, "seed": SEED, "level": LEVEL},
            "paired": {"by": "sample", "level": LEVEL},
            "floor_db": {each: floor_db(flow, each, -math.inf) for each in stages},
            "float_noise_db": FLOAT_NOISE_DB,
        },
        "errors": rows,
    }


def _outputs_to_remember(
    comparison: Comparison,
) -> Iterator[tuple[str, OutputErrors, Collection[str] | None]]:
    """Yield stage, output and the metrics that are stored of it (None: all that it has)."""
    for stage, errors in comparison.stages.items():
        for output in errors.outputs.values():
            yield stage, output, CHOICE_METRICS if output.chosen else None
        if stage in comparison.positions:
            for output in comparison.positions[stage].outputs.values():
                if not output.degenerate:
                    yield stage, output, _PART_METRICS


def build_to_remember(comparison: Comparison) -> dict[str, Any]:
    """Return the stored description of the build, and of the kernels that ran it."""
    target = {} if comparison.target is None else {"target": comparison.target.kernels}
    return {"runtime": comparison.runtime, **target, **comparison.build()}


def notes_on(comparison: Comparison) -> list[str]:
    """Return notes on samples that are few, equal or constant, and those of the comparison."""
    total, different, constant = comparison.evaluated
    notes = []
    enough = f"give {FEWEST_SAMPLES} or more that differ"
    if different == 1 < total:
        notes.append(
            f"the {total} evaluation samples are one and the same: nothing is known of others; "
            f"{enough}"
        )
    elif different == 1:
        notes.append(f"1 evaluation sample: nothing is known of others; {enough}")
    elif 0 < different < FEWEST_SAMPLES:
        of = f" of {total} given" if total > different else ""
        notes.append(
            f"{different} different evaluation samples{of}: too few for paired, per-sample "
            f"limits, so the limits are wide; {enough}"
        )
    if total and constant == total:
        which = "the evaluation sample is" if total == 1 else "all evaluation samples are"
        notes.append(
            f"{which} constant, as a black image: every input has one value in all elements; give "
            "samples with content"
        )
    return [*notes, *comparison.notes]


class Evaluation:
    """Judges limits on total errors by whether an all-zero output would satisfy them."""

    def __init__(self, comparison: Comparison) -> None:
        self._flow = comparison.flow
        self._outputs = comparison.total.outputs
        self.notes: Sequence[str] = notes_on(comparison)

    def refusal(self, data: Mapping[str, Any]) -> Finding | None:
        """Return why errors must not be stored, if limits would accept zeros."""
        for name, output, bounds in self._judged(data):
            found = broken(output, self._flow) or too_wide(output, self._flow, bounds)
            if found is not None:
                headline = f"errors not stored: total, output {name!r}: {found.summary}"
                return replace(found, headline=found.headline or headline)
        return None

    def remark(self, data: Mapping[str, Any]) -> str:
        """Name limits that wrong outputs would satisfy, and a sufficient number of samples."""
        texts = [
            f"output {name!r}: {metric}: {cannot_fail(output, self._flow, metric)}"
            for name, output, bounds in self._judged(data)
            for metric in accepted(output, bounds)
            if metric in _REPORTED
        ]
        texts += [
            f"output {name!r}: sqnr_db: the mean over the samples would pass as a constant output"
            for name, output, bounds in self._judged(data)
            if 0 < bounds.get("sqnr_db", math.inf) <= output.sqnr_db - output.spread_db
        ]
        left = len(texts) - _SHOWN
        return "; ".join([*texts[:_SHOWN], *([f"and {left} more"] if left > 0 else [])])

    def _judged(self, data: Mapping[str, Any]) -> Iterator[tuple[str, OutputErrors, Limits]]:
        """Yield the outputs for which zeros are wrong, with their total limits."""
        for name, output in self._outputs.items():
            bounds = {
                row["metric"]: float(row["worst"])
                for row in data["errors"]
                if (row["stage"], row["output"]) == ("total", name)
            }
            if not is_below_a_step(output):
                yield name, output, bounds


def too_wide(output: OutputErrors, flow: str, bounds: Limits) -> Finding | None:
    """
    Return a finding if zeros satisfy the SQNR limit or all limits.

    The SQNR limit alone counts if more samples would narrow it. If no number would, a single sample
    bears the error, and the other limits have to do.
    """
    kept = accepted(output, bounds)
    if "sqnr_db" not in kept:
        return None
    if len(kept) < len(bounds) and samples_needed(output, flow, "sqnr_db") is None:
        return None
    return passes_zeros(output, flow, bounds["sqnr_db"])


def passes_zeros(output: OutputErrors, flow: str, limit_db: float) -> Finding:
    """Return the finding on an SQNR limit that an all-zero output satisfies."""
    n, place = len(output.samples), Place("output", output.name)
    needed = samples_needed(output, flow, "sqnr_db")
    zeros = (
        f"an output of zeros would pass: the SQNR limit is {limit_db:.3g} dB (measured "
        f"{output.sqnr_db:.3g} dB on {counted(n, 'sample')})"
    )
    if needed is None:
        fix = f"no number up to {_MOST_SAMPLES} would do: {_LOCALIZE}"
        return Finding(kind=NOT_STORED, place=place, symptom=zeros, causes=(_UNEVEN,), fix=fix)
    few = f"{counted(n, 'sample')} {'is' if n == 1 else 'are'} too few"
    give = f"give at least {max(needed, FEWEST_SAMPLES)}"
    return Finding(
        kind=NOT_STORED,
        place=place,
        symptom=f"{few}: {give}",
        headline=f"{few} to remember the errors of {output.name!r}: {give}",
        causes=(f"{zeros}; {_UNEVEN}",),
    )


def broken(output: OutputErrors, flow: str) -> Finding | None:
    """Return a finding if an output's error is as large as its signal."""
    # No number of samples results in an SQNR limit above 0 dB then: a rebuild may lose as much.
    floor = floor_db(flow, "total", output.sqnr_db)
    # Zeros are right without a signal, and expected for values below a step.
    if output.chosen or not wiped(output) or is_below_a_step(output) or output.sqnr_db > floor:
        return None
    return Finding(
        kind=NOT_STORED,
        place=Place("output", output.name),
        symptom=f"the error is as large as the signal: expected an SQNR above {floor:.3g} dB, "
        f"which a rebuild alone may lose, got {output.sqnr_db:.3g} dB on "
        f"{counted(len(output.samples), 'sample')}",
        harm=USELESS,
        causes=("the file does not compute what the reference does; more samples do not help",),
        fix=_LOCALIZE,
    )


def limits_of(
    output: OutputErrors, flow: str, times: int = 1, metrics: Collection[str] | None = None
) -> dict[str, float]:
    """Return the limit of each metric of an output in the stage total."""
    floor = floor_db(flow, "total", output.sqnr_db)
    found = {}
    for metric, limit in limits(output, times, metrics).items():
        numbers = {key: json_number(getattr(limit, key)) for key in ("value", "worst", "best")}
        found[metric] = float(at_least({"metric": metric, **numbers}, floor)["worst"])
    return found


def samples_needed(output: OutputErrors, flow: str, metric: str) -> int | None:
    """
    Estimate how many samples make a limit that zeros exceed.

    Repetitions of the same samples stand in for more of their kind: sums over samples then
    spread by 1/√n, as those of other samples would.
    """
    number = n = len(output.samples)
    while accepted(output, limits_of(output, flow, number // n, [metric])):
        number *= 2
        if number > _MOST_SAMPLES:
            return None
    return number


def cannot_fail(output: OutputErrors, flow: str, metric: str) -> str:
    """Return a text on a limit that accepts zeros, with a sufficient sample count."""
    subject = "zeros or a guess" if metric == "top1_agreement" else "zeros"
    needed = samples_needed(output, flow, metric)
    do = "" if needed is None else f" ({max(needed, FEWEST_SAMPLES)} samples would do)"
    return f"{subject} would pass{do}"


def accepted(output: OutputErrors, given: Limits) -> list[str]:
    """Return the metrics whose limits an all-zero output would satisfy."""
    zeros = wiped(output)
    return [
        metric
        for metric, limit in given.items()
        if metric in zeros and METRICS[metric].accepts(zeros[metric], limit)
    ]


def budget_to_suggest(comparison: Comparison) -> tuple[Budget, list[str]]:
    """Return the budget for the stage `total` that a comparison supports, and notes."""
    _require_sound(comparison)
    flow, outputs = comparison.flow, list(comparison.total.outputs.values())

    def refused(output: OutputErrors, why: Finding | str) -> ValueError:
        title = f"no budget for {comparison.name}: total, output {output.name!r}: "
        if isinstance(why, str):
            return ValueError(f"{title}{why}")
        return ValueError(text_of([replace(why, headline=f"{title}{why.summary}")]))

    of_choices = all(output.chosen for output in outputs)
    metrics = CHOICE_METRICS if of_choices else None
    limits = [limits_of(output, flow, metrics=metrics) for output in outputs]
    for output, given in zip(outputs, limits, strict=True):
        found = broken(output, flow)
        if found is None and not (output.chosen or is_below_a_step(output)):
            found = too_wide(output, flow, given)
        if found is not None:
            raise refused(output, found)
    bounds: dict[str, float] = {}
    notes = notes_on(comparison)
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
            raise refused(outputs[0], cannot_fail(outputs[0], flow, "top1_agreement"))
        output, given = min(zip(outputs, limits, strict=True), key=lambda pair: pair[1]["sqnr_db"])
        is_zero = not wiped(output)
        raise refused(
            output, _NO_SIGNAL if is_zero else passes_zeros(output, flow, given["sqnr_db"])
        )
    return Budget(**bounds), notes


def _wanted(outputs: list[OutputErrors]) -> list[str]:
    """Return the metrics to bound; each detects another defect."""
    if all(output.kl is not None for output in outputs):
        return ["sqnr_db", "top1_agreement", *OF_TOKENS]
    scaled = all(output.max_lsb_error is not None for output in outputs)
    wanted = ["sqnr_db", "cosine_similarity", "max_lsb_error" if scaled else "max_abs_error"]
    # If every sample is one row, the last axis holds classes.
    is_classified = all(
        each.samples and all(sample.rows == 1 for sample in each.samples) for each in outputs
    )
    return [*wanted, "top1_agreement"] if is_classified else wanted


def _require_sound(comparison: Comparison) -> None:
    for stage, errors in comparison.stages.items():
        for output in errors.outputs.values():
            where, place = f"{comparison.name}: {stage}, output", Place("output", output.name)
            sums = (each for sample in output.samples for each in sample)
            if output.nonfinite or not output.samples or not all(map(math.isfinite, sums)):
                found = Finding(
                    kind=NONFINITE,
                    place=place,
                    headline=f"{where} {output.name!r}: expected finite values, got "
                    f"{output.nonfinite} of {output.n_elements} elements that are not, or sums "
                    "beyond float64",
                    causes=("errors that are not numbers can be neither stored nor bounded",),
                    harm=USELESS,
                )
            elif output.degenerate:
                found = Finding(
                    kind=ZERO_OUTPUT,
                    place=place,
                    headline=f"{where} {output.name!r}: reference and actual are zero in all "
                    f"{output.n_elements} elements: nothing was tested",
                    fix="give samples for which this output is not zero",
                )
            else:
                continue
            raise failure([found])
