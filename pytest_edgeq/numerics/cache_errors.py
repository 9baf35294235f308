"""Errors of a key-value cache by tensor and position."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from .metrics import Array, json_number, sqnr_db


class CacheError(NamedTuple):
    """One position of one cache tensor."""

    tensor: str
    position: int
    sqnr_db: float

    def __str__(self) -> str:
        return f"{self.tensor} at position {self.position}: {self.sqnr_db:.3g} dB"


class CacheErrors:
    """Signal and noise of each position of each tensor, summed over sequences; mergeable."""

    def __init__(self) -> None:
        self._sums: dict[str, Array] = {}  # [2, positions]: signal and noise

    def __bool__(self) -> bool:
        """Return whether anything was measured."""
        return bool(self._sums)

    def add(self, reference: Mapping[str, Array], actual: Mapping[str, Array]) -> None:
        """Add one sequence, [positions, values] by tensor, where both sides have that shape."""
        for name, expected in reference.items():
            got = actual.get(name)
            if got is None or got.shape != expected.shape:
                continue
            wanted = expected.astype(np.float64)
            with np.errstate(over="ignore", invalid="ignore"):
                noise = np.square(wanted - got).sum(axis=1)
            sums = np.stack([np.square(wanted).sum(axis=1), noise])
            self._add(name, sums)

    def merge(self, other: CacheErrors) -> None:
        """Add the sequences of another one."""
        for name, sums in other._sums.items():
            self._add(name, sums)

    def _add(self, name: str, sums: Array) -> None:
        known = self._sums.get(name)
        if known is not None:
            longest = max(known.shape[1], sums.shape[1])
            known, sums = (
                np.pad(each, ((0, 0), (0, longest - each.shape[1]))) for each in (known, sums)
            )
            sums = known + sums
        self._sums[name] = sums

    @property
    def worst(self) -> CacheError:
        """The position with the least SQNR; NaN is less than any."""
        return min(self._all(), key=lambda each: (not math.isnan(each.sqnr_db), each.sqnr_db))

    def first_below(self, db: float) -> CacheError | None:
        """Return the first position below a bound, and of its tensors that of the first layer."""
        bad = [each for each in self._all() if not each.sqnr_db >= db]
        return min(bad, key=lambda each: (each.position, _layer(each.tensor)), default=None)

    def _all(self) -> list[CacheError]:
        """Return the SQNR of each position of each tensor."""
        return [
            # Zero on both sides, as no token was read there, is no error.
            CacheError(name, position, sqnr_db(*pair) if pair.any() else math.inf)
            for name, sums in self._sums.items()
            for position, pair in enumerate(sums.T)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return plain, JSON-able data with sorted keys."""
        worst = self.worst
        return {
            "position": worst.position,
            "sqnr_db": json_number(worst.sqnr_db),
            "tensor": worst.tensor,
        }


def _layer(tensor: str) -> tuple[int, str]:
    return int(tensor.rsplit("_", 1)[1]), tensor
