"""Bound the output error that the unknown rounding of constants explains."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit

DRAWS = 16
"""Number of draws of the constants; their mean square has at least as many degrees of freedom."""

FEW_DRAWS = 4  # number of draws after which differences far within the limit are accepted

_FAR_WITHIN = 0.25

_CHANCE = 1e-6  # probability that a sound file exceeds one limit
_ELEMENTS = 4096  # elements of a large output from which the degrees of freedom are estimated


class ConstantRounding:
    """
    Changes of the outputs as constants of unknown rounding vary within half a step.

    Given its code, the float that a constant was rounded from is uniform within half a step of the
    code's value. So the reference is one more draw: its squared distance from the file in float,
    summed over elements and samples, has the distribution of the draws' own sums.

    Such a sum is Σ λᵢ·zᵢ² of independent zᵢ of variance 1. Its mean is estimated by the mean over
    the draws, its degrees of freedom ν = (Σλᵢ)² / Σλᵢ² by products of pairs of draws (Chen and Qin,
    A two-sample test for high-dimensional data, 2010). Of all λ with this ν the heaviest tail has
    one of 1/√ν of the mean among many that are small: the limit is the mean times
    1 + (q − 1) / √ν, with q the quantile of t² of as many degrees of freedom as the mean has.
    """

    def __init__(self) -> None:
        self._squares: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
        self._vectors: defaultdict[tuple[int, int], list[npt.NDArray[np.float64]]]
        self._vectors = defaultdict(list)

    def add(self, output: int, sample: int, moved: npt.NDArray[Any]) -> None:
        """Add the change of one output on one sample by one draw."""
        moved = np.nan_to_num(moved.astype(np.float64).reshape(-1), posinf=0.0, neginf=0.0)
        self._squares[output, sample].append(float(moved @ moved))
        if moved.size > _ELEMENTS:
            chosen = np.random.default_rng(0).choice(moved.size, _ELEMENTS, replace=False)
            moved = moved[chosen]
        self._vectors[output, sample].append(moved)

    def limit(self, output: int, samples: Sequence[int]) -> float:
        """Return the limit of an output's squared distance, summed over samples."""
        squares = np.sum([self._squares[output, each] for each in samples], axis=0)
        vectors = np.concatenate([self._vectors[output, each] for each in samples], axis=1)
        freedom = _degrees_of_freedom(vectors @ vectors.T)
        known = DRAWS * freedom
        quantile = float(stdtrit(known, 1 - _CHANCE / 2)) ** 2
        limit = float(squares.mean()) * (1 + (quantile - 1) / math.sqrt(freedom))
        return limit if len(squares) == DRAWS else _FAR_WITHIN * limit


def _degrees_of_freedom(products: npt.NDArray[np.float64]) -> float:
    """Return the degrees of freedom of a sum of squares from products of draws."""
    count = len(products)
    own = np.diag(products)
    squares = float(np.square(products).sum() - np.square(own).sum()) / (count * (count - 1))
    return max(1.0, float(own.mean()) ** 2 / squares) if squares else 1.0
