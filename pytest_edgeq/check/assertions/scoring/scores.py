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
    """Scores of both models, and the confidence of their difference."""

    name: str
    float_score: float  # of the reference
    edge_score: float  # of the file
    evidence: RightWrong | Resampled  # the drop, counted so that more is worse, with its bounds
    higher_is_better: bool  # else the drop is a rise
    worst: tuple[tuple[int, float, float], ...]  # up to five samples that lost most
    detail: str  # how the bounds were found, for texts


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
