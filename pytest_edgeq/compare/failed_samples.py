"""The samples that show a failed assertion, handed from the assertion to the bundle of its test."""

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
    """
    The samples on which a file and what it was held against differ most.

    Attributes:
        model: The file and its references.
        runtime: Kernels that gave the outputs that failed.
        expected_by: Runtime that gave the outputs expected; None for the float reference.
        worst: The samples, the worst first.
        n_samples: How many the assertion was given.
    """

    model: QuantizedModel
    runtime: str
    expected_by: str | None
    worst: Sequence[WorstSample]
    n_samples: int


def attach_samples(error: AssertionError, samples: FailedSamples) -> None:
    """Let an error carry the samples that show it; its class stays the one that pytest prints."""
    error.__dict__[_ATTRIBUTE] = samples


def attached_samples(error: BaseException) -> FailedSamples | None:
    """Return the samples that an error carries."""
    found: FailedSamples | None = vars(error).get(_ATTRIBUTE)
    return found


def compared_samples(comparison: Comparison) -> FailedSamples:
    """Return the worst samples of a comparison, whose model must be known."""
    return FailedSamples(
        comparison.quantized,
        comparison.runtime,
        None,
        comparison.worst_samples,
        comparison.total.n_samples,
    )
