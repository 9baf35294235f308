"""
Fixed-point multiplication of TFLite.

A real multiplier is stored as significand · 2^(shift − 31), significand in [2^30, 2^31)
(`internal/quantization_util.cc`, `QuantizeMultiplier`). `internal/common.cc`,
`MultiplyByQuantizedMultiplier`, applies it in one of two ways, both with rounding to nearest:

- to int32: the product's high half is rounded to an integer, and that is shifted right by
  k = −shift and rounded again. The first rounding is off by 1/2 before the shift, 2^−(k + 1)
  after it; where k ≤ 0 there is no second one.
- to int64 (sums of 16×8): the significand is cut to 16 bits, the product rounded once. The cut is
  off by up to 2^−15, relative.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def quantized_multiplier(real: npt.ArrayLike) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
    """Return significand and shift of positive multipliers; below 2^−32 they are zero."""
    mantissa, shift = np.frexp(np.asarray(real, np.float64))
    significand = np.rint(mantissa * 2.0**31).astype(np.int64)
    full = significand == 1 << 31
    significand = np.where(full, 1 << 30, significand)
    shift = np.where(full, shift + 1, shift)
    flushed = shift < -31
    return np.where(flushed, 0, significand), np.where(flushed, 0, shift)


def double_rounding(shift: npt.ArrayLike) -> Floats:
    """Return the error of the first of two roundings, in LSB of the result."""
    shift = np.asarray(shift, np.float64)
    return np.where(shift < 0, 2.0 ** (shift - 1), 0.0)


def rescale_excess(real: npt.ArrayLike, reach: float, *, wide: bool = False) -> float:
    """Return the error of a fixed-point product beyond 1/2, in LSB."""
    real = np.asarray(real, np.float64)
    significand, shift = quantized_multiplier(real)
    if wide:
        cut = np.where(significand < 0x7FFF0000, (significand + (1 << 15)) >> 16, 0x7FFF)
        stored, first = np.ldexp(cut.astype(np.float64), shift - 15), np.zeros_like(real)
    else:
        stored, first = np.ldexp(significand.astype(np.float64), shift - 31), double_rounding(shift)
    return float(np.max(first + np.abs(stored / real - 1) * reach))
