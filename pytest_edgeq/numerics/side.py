"""One side of a comparison: an array, and what several stages and checks compute of it, once."""

from __future__ import annotations

import math

import numpy as np

from .sums import Array, dot


class Side:
    """
    An array, and what is computed of it once for all that look at it.

    In a comparison the reference is part of two stages and of the health checks, and so is the
    output of the file. Not by `functools.cached_property`, whose lock all threads share before
    Python 3.12.

    Attributes:
        array: as given.
        flat: its elements in float64, flattened.
        power: the sum of their squares; not finite where an element is not, or where it overflows.
        finite: where the elements are finite; None where all are.
    """

    __slots__ = (
        "_ends",
        "_first_maxima",
        "_magnitude",
        "_maxima",
        "array",
        "finite",
        "flat",
        "power",
    )

    def __init__(self, array: Array) -> None:
        self.array = np.asarray(array)
        # Others, such as complex numbers, are refused by those who know the output's name.
        known = self.array if self.array.dtype.kind in "biuf" else np.empty(0)
        self.flat: Array = known.astype(np.float64, copy=False).ravel()
        with np.errstate(over="ignore", invalid="ignore"):
            self.power = dot(self.flat, self.flat)
        self.finite: Array | None = None
        if not math.isfinite(self.power):
            finite = np.isfinite(self.flat)
            self.finite = None if finite.all() else finite
        self._ends: tuple[float, float] | None = None
        self._first_maxima: Array | None = None
        self._magnitude: float | None = None
        self._maxima: Array | None = None

    @classmethod
    def of(cls, values: Array | Side) -> Side:
        """Return the side itself, or an array as one."""
        return values if isinstance(values, cls) else cls(values)  # type: ignore[arg-type]

    @property
    def n_nonfinite(self) -> int:
        """How many elements are not finite."""
        if self.finite is None:
            return 0
        return self.flat.size - int(np.count_nonzero(self.finite))

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
    def magnitude(self) -> float:
        """The sum of the absolute values."""
        if self._magnitude is None:
            self._magnitude = float(np.abs(self.flat).sum())
        return self._magnitude

    @property
    def has_classes(self) -> bool:
        """Whether it is of rank 2, with several elements a row."""
        return self.array.ndim == 2 and self.array.shape[1] > 1

    @property
    def first_maxima(self) -> Array:
        """Index of the first maximum of each row."""
        if self._first_maxima is None:
            self._first_maxima = np.asarray(self.array.argmax(axis=1))
        return self._first_maxima

    @property
    def maxima(self) -> Array:
        """Maximum of each row."""
        if self._maxima is None:
            self._maxima = np.asarray(self.array.max(axis=1))
        return self._maxima

    @property
    def first(self) -> int:
        """Number of rows whose first element is a maximum; 0 where rows are no classes."""
        if not self.has_classes:
            return 0
        return int(np.count_nonzero(self.array[:, 0] == self.maxima))
