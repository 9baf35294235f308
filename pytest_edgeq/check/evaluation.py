"""Decide whether evaluation samples are enough for limits that can fail."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from pytest_edgeq.baselines.paired_limits import FEWEST_SAMPLES, at_least, floor_db
from pytest_edgeq.numerics.bootstrap import limits
from pytest_edgeq.numerics.comparison import Comparison
from pytest_edgeq.numerics.findings import NOT_STORED, USELESS, Finding, Place
from pytest_edgeq.numerics.metrics import json_number
from pytest_edgeq.numerics.results import OutputErrors, accepts, is_below_a_step, wiped
from pytest_edgeq.numerics.samples import EvaluatedSamples

_MOST_SAMPLES: Final = 1 << 13
"""Maximum number of samples to consider as sufficient."""

_REPORTED: Final = ("sqnr_db", "cosine_similarity", "top1_agreement")
"""Metrics whose limits are reported: a maximum, or one sample, may vary without bound."""

_UNEVEN: Final = (
    "the error differs so much between these samples that a rebuild may move it by more than the "
    "SQNR itself"
)

_SHOWN: Final = 2
"""How many limits of a baseline a text lists."""

Limits = Mapping[str, float]


def notes_on(samples: EvaluatedSamples) -> list[str]:
    """Return notes on evaluation samples that are few, equal or constant."""
    total, different, constant = samples
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
            f"{different} different evaluation samples{of}: too few to hold errors sample by "
            f"sample, so the limits are wide; {enough}"
        )
    if total and constant == total:
        which = "the evaluation sample is" if total == 1 else "all evaluation samples are"
        notes.append(
            f"{which} constant, as a black image: every input has one value in all elements; give "
            "samples with content"
        )
    return notes


class Evaluation:
    """Judges limits on total errors by whether an all-zero output would satisfy them."""

    def __init__(self, comparison: Comparison) -> None:
        self._comparison = comparison
        self._flow = comparison.flow
        self._outputs = comparison.total.outputs
        self.notes: Sequence[str] = notes_on(comparison.evaluated)

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
    n = len(output.samples)
    needed = samples_needed(output, flow, "sqnr_db")
    zeros = (
        f"an output of zeros would pass: the SQNR limit is {limit_db:.3g} dB (measured "
        f"{output.sqnr_db:.3g} dB on {_samples(n)})"
    )
    if needed is None:
        return Finding(
            kind=NOT_STORED,
            place=Place("output", output.name),
            symptom=zeros,
            causes=(_UNEVEN,),
            fix=f"no number up to {_MOST_SAMPLES} would do: find the layer to blame with "
            "edgeq.localize(quantized, samples)",
        )
    few = f"{_samples(n)} {'is' if n == 1 else 'are'} too few"
    give = f"give at least {max(needed, FEWEST_SAMPLES)}"
    return Finding(
        kind=NOT_STORED,
        place=Place("output", output.name),
        symptom=f"{few}: {give}",
        headline=f"{few} to remember the errors of {output.name!r}: {give}",
        causes=(f"{zeros}; {_UNEVEN}",),
    )


def broken(output: OutputErrors, flow: str) -> Finding | None:
    """
    Return a finding if an output's error is as large as its signal.

    Then no number of samples results in an SQNR limit above 0 dB, because a rebuild may lose as
    much.
    """
    floor = floor_db(flow, "total", output.sqnr_db)
    # Zeros are right without a signal, and expected for values below a step.
    if output.chosen or not wiped(output):
        return None
    if is_below_a_step(output) or output.sqnr_db > floor:
        return None
    return Finding(
        kind=NOT_STORED,
        place=Place("output", output.name),
        symptom=f"the error is as large as the signal: expected an SQNR above {floor:.3g} dB, "
        f"which a rebuild alone may lose, got {output.sqnr_db:.3g} dB on "
        f"{_samples(len(output.samples))}",
        harm=USELESS,
        causes=("the file does not compute what the reference does; more samples do not help",),
        fix="find the layer to blame with edgeq.localize(quantized, samples)",
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
    if needed is None:
        return f"{subject} would pass"
    return f"{subject} would pass ({max(needed, FEWEST_SAMPLES)} samples would do)"


def accepted(output: OutputErrors, given: Limits) -> list[str]:
    """Return the metrics whose limits an all-zero output would satisfy."""
    zeros = wiped(output)
    return [
        metric
        for metric, limit in given.items()
        if metric in zeros and accepts(metric, limit, zeros[metric])
    ]


def _samples(n: int) -> str:
    return f"{n} sample{'' if n == 1 else 's'}"
