"""What two models score on the same samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pytest_edgeq.numerics.paired import Resampled, RightWrong

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Scores:
    """
    What both models reach, and how sure the difference is.

    Attributes:
        name: Of the metric.
        float_score: Of the reference.
        edge_score: Of the file.
        evidence: The drop, counted so that more is worse, with its bounds.
        higher_is_better: Else the drop is a rise.
        worst: Up to five samples that lost most: index, float and edge score; empty where a Metric
            has no score for a sample.
        detail: How the bounds were found, for texts.
    """

    name: str
    float_score: float
    edge_score: float
    evidence: RightWrong | Resampled
    higher_is_better: bool
    worst: tuple[tuple[int, float, float], ...]
    detail: str


class Scorer(Protocol):
    """Scores the outputs of both models, sample by sample."""

    wants_tensors: bool
    """Whether outputs come as torch tensors, whatever the reference gives."""

    def score(self, index: int, outputs: tuple[Any, Any], label: Any, batch: set[int]) -> Any:
        """Score one sample; what is returned can be pickled, and is added by `add`."""

    def lost(self, scored: Any) -> float:
        """Return how much of the float score a sample has lost; 0 where it has no score."""

    def add(self, scored: Any) -> None:
        """Add what `score` has returned for the next sample."""

    def result(self) -> Scores:
        """What all samples say."""
