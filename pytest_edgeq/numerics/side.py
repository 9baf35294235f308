"""One side of a comparison: an array, and what several stages and checks compute of it, once."""

from __future__ import annotations

import math

import numpy as np

from .sums import Array, dot

__all__ = ["Side"]


class Side:
    """
    An array whose derived figures are computed when they are first asked for.

    In a comparison the reference is part of two stages and of the health checks, and so is the
    output of the file: each is converted and scanned once. Not by `functools.cached_property`,
    whose lock all threads share before Python 3.12.

    Args:
        array: of any shape and dtype.
    """

    __slots__ = ("_ends", "_finite", "_first_maxima", "_flat", "_maxima", "_power", "array")

    def __init__(self, array: Array) -> None:
        self.array = np.asarray(array)
        self._flat: Array | None = None
        self._power: float | None = None
        self._finite: Array | None = None
        self._ends: tuple[float, float] | None = None
        self._first_maxima: Array | None = None
        self._maxima: Array | None = None

    @classmethod
    def of(cls, values: Array | Side) -> Side:
        """Return the side itself, or an array as one."""
        return values if isinstance(values, cls) else cls(values)  # type: ignore[arg-type]

    @property
    def flat(self) -> Array:
        """The elements in float64, flattened."""
        if self._flat is None:
            self._flat = self.array.astype(np.float64, copy=False).ravel()
        return self._flat

    @property
    def power(self) -> float:
        """The sum of the squares; not finite where an element is not, or where it overflows."""
        if self._power is None:
            with np.errstate(over="ignore", invalid="ignore"):
                self._power = dot(self.flat, self.flat)
        return self._power

    @property
    def finite(self) -> Array | None:
        """Where the elements are finite; None where all are."""
        if math.isfinite(self.power):
            return None
        if self._finite is None:
            self._finite = np.isfinite(self.flat)
        return None if self._finite.all() else self._finite

    @property
    def n_nonfinite(self) -> int:
        """How many elements are not finite."""
        finite = self.finite
        return 0 if finite is None else self.flat.size - int(np.count_nonzero(finite))

    @property
    def ends(self) -> tuple[float, float]:
        """The least and the greatest finite element; +inf and −inf where there is none."""
        if self._ends is None:
            values = self.flat if self.finite is None else self.flat[self.finite]
            self._ends = (math.inf, -math.inf)
            if values.size:
                self._ends = (float(values.min()), float(values.max()))
        return self._ends

    @property
    def rows(self) -> Array:
        """The array with all axes but the last in one."""
        return self.array.reshape(-1, self.array.shape[-1])

    @property
    def first_maxima(self) -> Array:
        """Index of the first maximum of each row."""
        if self._first_maxima is None:
            self._first_maxima = np.asarray(self.rows.argmax(axis=1))
        return self._first_maxima

    @property
    def maxima(self) -> Array:
        """Maximum of each row."""
        if self._maxima is None:
            self._maxima = np.asarray(self.rows.max(axis=1))
        return self._maxima
