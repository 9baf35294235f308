"""Arrays in row-major order."""

from __future__ import annotations

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
