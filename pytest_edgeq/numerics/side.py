"""One side of a comparison: an array, and what several stages and checks compute of it, once."""

from __future__ import annotations

import functools
import math

import numpy as np

from .sums import Array, dot

__all__ = ["Side"]


class Side:
    """
    An array whose derived figures are computed when they are first asked for.

    In a comparison the reference is part of two stages and of the health checks, and so is the
    output of the file: each is converted and scanned once.

    Args:
        array: of any shape and dtype.
    """

    def __init__(self, array: Array) -> None:
        self.array = np.asarray(array)

    @classmethod
    def of(cls, values: Array | Side) -> Side:
        """Return the side itself, or an array as one."""
        return values if isinstance(values, cls) else cls(values)  # type: ignore[arg-type]

    @functools.cached_property
    def flat(self) -> Array:
        """The elements in float64, flattened."""
        return self.array.astype(np.float64, copy=False).ravel()

    @functools.cached_property
    def power(self) -> float:
        """The sum of the squares; not finite where an element is not, or where it overflows."""
        with np.errstate(over="ignore", invalid="ignore"):
            return dot(self.flat, self.flat)

    @functools.cached_property
    def finite(self) -> Array | None:
        """Where the elements are finite; None where all are."""
        if math.isfinite(self.power):
            return None
        finite: Array = np.isfinite(self.flat)
        return None if finite.all() else finite

    @property
    def n_nonfinite(self) -> int:
        """How many elements are not finite."""
        return 0 if self.finite is None else self.flat.size - int(np.count_nonzero(self.finite))

    @functools.cached_property
    def ends(self) -> tuple[float, float]:
        """The least and the greatest finite element; +inf and −inf where there is none."""
        values = self.flat if self.finite is None else self.flat[self.finite]
        return (float(values.min()), float(values.max())) if values.size else (math.inf, -math.inf)

    @functools.cached_property
    def rows(self) -> Array:
        """The array with all axes but the last in one."""
        return self.array.reshape(-1, self.array.shape[-1])

    @functools.cached_property
    def first_maxima(self) -> Array:
        """Index of the first maximum of each row."""
        return np.asarray(self.rows.argmax(axis=1))

    @functools.cached_property
    def maxima(self) -> Array:
        """Maximum of each row."""
        return np.asarray(self.rows.max(axis=1))
