"""The samples that show a failed assertion, stored for the bundle of its test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_edgeq.compare.quantized import QuantizedModel
    from pytest_edgeq.numerics.comparison import Comparison, WorstSample

_ATTRIBUTE = "edgeq_samples"


@dataclass(frozen=True, slots=True)
class FailedSamples:
    """The samples with the largest errors of a failed assertion."""

    model: QuantizedModel
    runtime: str  # kernels that computed the outputs that failed
    # runtime that computed the expected outputs; None for the float reference
    expected_by: str | None
    worst: Sequence[WorstSample]  # the worst first
    n_samples: int


def attach_samples(error: AssertionError, samples: FailedSamples) -> None:
    """Attach the samples that show a failure to its error."""
    error.__dict__[_ATTRIBUTE] = samples


def attached_samples(error: BaseException) -> FailedSamples | None:
    """Return the samples attached to an error."""
    found: FailedSamples | None = vars(error).get(_ATTRIBUTE)
    return found


def compared_samples(comparison: Comparison) -> FailedSamples:
    """Return the worst samples of a comparison of a known model."""
    return FailedSamples(
        comparison.quantized,
        comparison.runtime,
        None,
        comparison.worst_samples,
        comparison.total.n_samples,
    )
