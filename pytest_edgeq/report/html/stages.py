"""Where the loss arises: each stage's share of the noise power."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

_STAGES = ("conversion", "quantization", "lowering")
"""In the order of the pipeline. A flow has at most two of them."""


@dataclasses.dataclass(frozen=True)
class OutputNoise:
    """
    The noise of one output by stage.

    dB do not add up; powers do, up to the part in which the errors of two stages agree or cancel.
    So a stage's share is its noise power (mean squared error) over the sum of all stages'.
    """

    name: str  # the output's
    shares: Mapping[str, float]  # of each stage, 0 to 1; they sum to 1
    rmse: Mapping[str, float]  # of each stage
    decibels: Mapping[str, str]  # the SQNR of each stage and of `total`, as text
    # noise power from end to end over the sum of the stages'; below 1 their errors cancel in part,
    # above 1 they agree
    total_over_sum: float
    total_db: float  # the SQNR from end to end


def noise_by_output(stages: Mapping[str, Mapping[str, Any]]) -> list[OutputNoise]:
    """Return the noise of each output that has any, the worst first."""
    parts = [stage for stage in _STAGES if stage in stages]
    if len(parts) < 2:
        return []
    found = []
    for name, total in stages["total"]["outputs"].items():
        errors = {stage: stages[stage]["outputs"][name] for stage in parts}
        rmse = {stage: float(each["rmse"]) for stage, each in errors.items()}
        powers = {stage: value**2 for stage, value in rmse.items()}
        whole = sum(powers.values())
        if not (math.isfinite(whole) and whole > 0):
            continue
        found.append(
            OutputNoise(
                name=name,
                shares={stage: power / whole for stage, power in powers.items()},
                rmse=rmse,
                decibels={
                    stage: decibels(float(each["sqnr_db"]))
                    for stage, each in {**errors, "total": total}.items()
                },
                total_over_sum=float(total["rmse"]) ** 2 / whole,
                total_db=float(total["sqnr_db"]),
            )
        )
    return sorted(found, key=lambda output: output.total_db)


def stage_sentence(worst: OutputNoise) -> str:
    """Return the figures behind the bar of an output, for its caption."""
    figures = ", ".join(f"{stage} {text}" for stage, text in worst.decibels.items())
    percent = 100 * worst.total_over_sum
    if worst.total_over_sum < _CANCELS:
        how = f"The errors of the stages cancel in part: the total noise is {percent:.0f} % of"
    elif worst.total_over_sum > 1 / _CANCELS:
        how = f"The errors of the stages agree in part: the total noise is {percent:.0f} % of"
    else:
        how = f"The total noise is {percent:.0f} % of"
    return f"SQNR of {worst.name}: {figures}. {how} the sum over the stages."


_CANCELS = 0.9


def decibels(value: float | None) -> str:
    """Return an SQNR as text: `42.1 dB`, `∞ dB` for no error, `–` where there is none."""
    if value is None:
        return "–"
    if math.isinf(value):
        return "∞ dB" if value > 0 else "−∞ dB"
    return f"{value:.1f} dB".replace("-", "−")
