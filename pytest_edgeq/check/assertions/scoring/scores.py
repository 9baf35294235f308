"""Scores of two models on the same samples."""

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
    Scores of both models, and the confidence of their difference.

    Attributes:
        name: Of the metric.
        float_score: Of the reference.
        edge_score: Of the file.
        evidence: The drop, counted so that more is worse, with its bounds.
        higher_is_better: Else the drop is a rise.
        worst: Up to five samples that lost most: index, float and edge score; empty if a Metric
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
        """Return the scores of one sample, which `add` accepts and which can be pickled."""

    def lost(self, scored: Any) -> float:
        """Return how much of the float score a sample lost; 0 without one."""

    def add(self, scored: Any) -> None:
        """Add the result of `score` for the next sample."""

    def result(self) -> Scores:
        """Return the scores over all samples."""
