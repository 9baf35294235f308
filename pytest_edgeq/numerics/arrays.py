"""Arrays in row-major order, and their description in texts."""

from __future__ import annotations

import reprlib
from typing import Any

import numpy as np
import numpy.typing as npt


def contiguous(value: npt.ArrayLike, dtype: npt.DTypeLike | None = None) -> npt.NDArray[Any]:
    """
    Return the values in row-major order, copied only where they are not.

    A scalar keeps its shape; `np.ascontiguousarray` returns shape (1,), which ops refuse that
    compute shapes.
    """
    return np.asarray(value, dtype, order="C")


def kind_of(value: object) -> str:
    """Return the type of a value, with the shape of an array or a tensor."""
    shape = getattr(value, "shape", None)
    of_shape = f" of shape {list(shape)}" if isinstance(shape, tuple) and shape else ""
    return f"{type(value).__name__}{of_shape}"


class _ShortRepr(reprlib.Repr):
    """The repr of a value, cut, with the shape of each array in place of its elements."""

    def repr1(self, x: Any, level: int) -> str:
        """Return the repr of one value, as deep as `level`."""
        is_array = hasattr(x, "dtype") and bool(getattr(x, "shape", None))
        return kind_of(x) if is_array else super().repr1(x, level)


_SHORT = _ShortRepr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200


def short_repr(value: object) -> str:
    """Return the repr of a value that a user passed, never with the elements of an array."""
    return _SHORT.repr(value)
