"""Elements of outputs, chosen evenly and kept on all sides, for histograms and scatter charts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

_PER_SAMPLE = 256
_LIMIT = 2048


class PointSample:
    """
    Keeps some elements of one output, the same ones of each side.

    Of a sample these are up to 256, evenly spaced. Of the samples they are those whose index is a
    multiple of 1, 2, 4, …: the least power of two at which no more than 2,048 elements are kept.
    So any split of the samples over threads keeps the same elements.
    """

    def __init__(self) -> None:
        self._every = 1
        self._kept: dict[int, dict[str, npt.NDArray[np.float64]]] = {}

    def update(self, index: int, sides: Mapping[str, npt.NDArray[Any]]) -> None:
        """Add one sample."""
        if index % self._every:
            return
        size = next(iter(sides.values())).size
        chosen = np.linspace(0, size - 1, min(size, _PER_SAMPLE), dtype=np.intp)
        self._kept[index] = {
            name: array.reshape(-1)[chosen].astype(np.float64) for name, array in sides.items()
        }
        self._thin()

    def merge(self, other: PointSample) -> None:
        """Add what another one has kept."""
        self._every = max(self._every, other._every)
        self._kept |= other._kept
        self._kept = {i: points for i, points in self._kept.items() if not i % self._every}
        self._thin()

    def result(self) -> dict[str, npt.NDArray[np.float64]]:
        """Return the elements by side, in the order of the samples."""
        ordered = [self._kept[index] for index in sorted(self._kept)]
        names = ordered[0] if ordered else ()
        return {name: np.concatenate([points[name] for points in ordered]) for name in names}

    def _thin(self) -> None:
        while len(self._kept) > 1 and self._count() > _LIMIT:
            self._every *= 2
            self._kept = {i: points for i, points in self._kept.items() if not i % self._every}

    def _count(self) -> int:
        return sum(next(iter(points.values())).size for points in self._kept.values())
