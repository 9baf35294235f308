"""
Errors of one tensor: sums and extremes by sample, pooled over samples.

All are computed in float64, in pieces that fit a processor's cache. Channels are the last axis, as
in TFLite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pytest_edgeq.numerics.health import CLIPPED_LSB
from pytest_edgeq.tflite.boundary import code_range, qparams, shape_along
from pytest_edgeq.tflite.subgraph import Op, Tensor

Array = npt.NDArray[Any]

_PIECE = 1 << 16  # elements of one piece: half a MB in each of a few arrays


class Codes(NamedTuple):
    """Range, scale and zero point of a tensor's codes."""

    low: int  # the least code of the dtype
    high: int
    scale: float
    zero_point: int  # the code of 0

    @property
    def floor(self) -> float:
        """The value of the least code."""
        return (self.low - self.zero_point) * self.scale

    @property
    def ceiling(self) -> float:
        """The value of the greatest code."""
        return (self.high - self.zero_point) * self.scale

    @property
    def reach(self) -> tuple[float, float]:
        """The values of the least and the greatest code."""
        return self.floor, self.ceiling

    @property
    def fuzz(self) -> float:
        """Maximum float32 error of a difference of codes."""
        return (self.high - self.low) * 2.0**-22


def peak(values: Array) -> float:
    """Return the greatest magnitude of finite floats; 0 for integers."""
    if values.dtype.kind != "f" or not values.size:
        return 0.0
    greatest = max(-float(values.min()), float(values.max()))
    if math.isfinite(greatest):
        return greatest
    return float(np.abs(values[np.isfinite(values)]).max(initial=0.0))


def difference(one: Array, other: Array) -> Array:
    """Return the distance of values; 0 of equal infinities."""
    with np.errstate(invalid="ignore"):
        found: Array = np.where(one == other, 0.0, np.abs(one - other))
    return found


def code_limits(tensor: Tensor) -> Codes | None:
    """Return range and scale of a tensor's codes; None without a single scale."""
    parameters = qparams(tensor)
    return None if parameters is None else Codes(*code_range(tensor.dtype), *parameters)


def channel_steps(tensor: Tensor) -> npt.NDArray[np.float32]:
    """Return the scale of each channel, shaped to broadcast to the tensor."""
    shape = shape_along(len(tensor.scales), len(tensor.shape), tensor.quantized_dimension)
    return tensor.scales.astype(np.float32).reshape(shape)


@dataclass(slots=True, eq=False)
class TensorErrors:
    """
    Errors of one tensor, pooled over all samples, whatever their shapes.

    The file's values are compared with the float op on the op's own inputs, and (`cumulative_…`)
    with a run of the whole float form. Extremes and shares are known for codes alone.
    """

    elements: int = 0
    signal: float = 0.0  # sum of the squares of the float op
    noise: float = 0.0  # sum of the squared differences from it
    channel_noise: npt.NDArray[np.float64] | None = None  # by the last axis; empty if lengths vary
    cumulative_signal: float = 0.0
    cumulative_noise: float = 0.0
    cumulative_lsb: float = 0.0  # greatest difference
    local_lsb: float = 0.0  # greatest difference of the rounded float op's codes
    excess_lsb: float = -math.inf  # beyond ½ LSB and the kernel's bound; of floats in units of it
    low: int = 0  # how many codes are the least of the dtype
    high: int = 0
    least: float = math.inf  # code in use
    greatest: float = -math.inf
    smallest: float = math.inf  # value of the float op
    largest: float = -math.inf
    beyond_low: int = 0  # how many finite values lie `CLIPPED_LSB` below the range of the codes
    beyond_high: int = 0
    nonfinite: int = 0  # how many of the file's values are not finite, although torch's are
    nonfinite_by_rounding: int = 0  # `nonfinite`, if the float op returns the same
    whole_least: float = math.inf  # of the whole form, for ops that `Consumers` reads it of
    whole_greatest: float = -math.inf
    # Of the op with the file's constants on one sample: its greatest difference from the file's
    # values, clipped to the range of the codes and in LSB, and its greatest magnitude.
    off: float = 0.0
    peak: float = 0.0

    @property
    def loss(self) -> float:
        """Noise over signal of the float reference, in dB."""
        return -_decibels(self.signal, self.noise)

    @property
    def cumulative_loss(self) -> float:
        """Noise over signal of the float model, in dB."""
        return -_decibels(self.cumulative_signal, self.cumulative_noise)

    def rmse(self, scale: float | None, *, cumulative: bool = False) -> float | None:
        """Return the RMS difference in LSB; None without a scale or elements."""
        if scale is None or not self.elements:
            return None
        noise = self.cumulative_noise if cumulative else self.noise
        return math.sqrt(noise / self.elements) / scale

    def add_codes(self, stored: Array, codes: Codes) -> None:
        """Add the extremes of stored codes, a quarter of the memory of their values."""
        self.least, self.greatest = int(stored.min()), int(stored.max())
        if self.least <= codes.low:
            self.low = int(np.count_nonzero(stored == codes.low))
        if self.greatest >= codes.high:
            self.high = int(np.count_nonzero(stored == codes.high))

    def merge(self, other: TensorErrors) -> None:
        """Add the errors of the same tensor on other samples."""
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in _GREATEST:
            setattr(self, name, max(getattr(self, name), getattr(other, name)))
        for name in _LEAST:
            setattr(self, name, min(getattr(self, name), getattr(other, name)))
        one, two = self.channel_noise, other.channel_noise
        if one is not None and two is not None:
            self.channel_noise = one + two if one.shape == two.shape else np.empty(0)
        else:
            self.channel_noise = two if one is None else one


_SUMMED = (
    *("signal", "noise", "cumulative_signal", "cumulative_noise", "elements"),
    *("low", "high", "beyond_low", "beyond_high", "nonfinite", "nonfinite_by_rounding"),
)
_GREATEST = (
    *("local_lsb", "excess_lsb", "cumulative_lsb"),
    *("largest", "greatest", "whole_greatest"),
)
_LEAST = ("smallest", "least", "whole_least")


def errors_of(
    made: Array, floats: Array, rounded: Array, whole: Array, codes: Codes | None
) -> TensorErrors:
    """
    Compare the values of a tensor on one sample; those not finite count as infinite.

    `floats` is the float op on the file's own inputs, `rounded` the same with the file's constants,
    `whole` a run of the whole float form.
    """
    found = TensorErrors(made.size)
    width = made.shape[-1] if made.ndim > 1 else 1
    arrays = [made, floats, whole] if rounded is floats else [made, floats, whole, rounded]
    lines = [each.reshape(-1, width) for each in arrays] if made.size else []
    channels, step = np.zeros(width), max(_PIECE // max(width, 1), 1)
    with np.errstate(all="ignore"):
        for start in range(0, len(lines[0]) if lines else 0, step):
            value, op, form, *own = (
                each[start : start + step].astype(np.float64) for each in lines
            )
            channels += np.square(value - op).sum(axis=0)
            found.signal += float(np.square(op).sum())
            found.cumulative_signal += float(np.square(form).sum())
            off = value - form
            if codes is not None:
                found.cumulative_lsb = _greater(found.cumulative_lsb, off / codes.scale)
            found.cumulative_noise += float(np.square(off, out=off).sum())
            _add_piece(found, value, op, own[0] if own else op, codes)
        found.noise = float(channels.sum())
    found.channel_noise = channels if made.ndim > 1 else None
    for name in ("noise", "signal", "cumulative_noise", "cumulative_signal"):
        setattr(found, name, _finite(getattr(found, name)))
    return found


def _add_piece(
    found: TensorErrors, made: Array, floats: Array, rounded: Array, codes: Codes | None
) -> None:
    """Add extremes and counts of a piece."""
    found.peak = float(np.maximum(found.peak, np.abs(rounded).max()))
    if codes is None:
        found.off = _greater(found.off, made - rounded)
        return
    found.smallest = float(np.minimum(found.smallest, floats.min()))
    found.largest = float(np.maximum(found.largest, floats.max()))
    beyond = CLIPPED_LSB * codes.scale
    # Infinities are no values to represent: the padding of a MAX_POOL_2D is −inf.
    is_low, is_high = floats < codes.floor - beyond, floats > codes.ceiling + beyond
    found.beyond_low += int(np.count_nonzero(is_low & (floats > -np.inf)))
    found.beyond_high += int(np.count_nonzero(is_high & (floats < np.inf)))
    # Values of codes are float32.
    off = np.clip(rounded, np.float32(codes.floor), np.float32(codes.ceiling)) - made
    furthest = _greater(0.0, off) / codes.scale
    found.off = max(found.off, furthest)
    if furthest + codes.fuzz >= 0.5:  # a value within half a step rounds to the code
        far = ~(np.abs(off) < (0.5 - codes.fuzz) * codes.scale)
        exact = np.clip(rounded[far] / codes.scale + codes.zero_point, codes.low, codes.high)
        steps = np.rint(exact) - (np.rint(made[far] / codes.scale) + codes.zero_point)
        found.local_lsb = _greater(found.local_lsb, steps) if steps.size else found.local_lsb


def _finite(total: float) -> float:
    """Replace NaN and −inf by infinity, which exceeds every bound."""
    return total if math.isfinite(total) else math.inf


def _greater(known: float, values: Array) -> float:
    """Return the greatest magnitude, or the known one."""
    return max(known, _finite(float(np.abs(values).max())))


def _decibels(signal: float, noise: float) -> float:
    """Return the ratio of two sums of squares in dB; infinite without noise."""
    if not noise:
        return math.inf
    if not signal or math.isinf(noise):
        return -math.inf
    return 10 * math.log10(signal / noise)


def channel_maxima(op: Op, floats: Array) -> tuple[float, ...]:
    """Return the largest weight of each output channel of an op."""
    axis = floats.ndim - 1 if op.name == "DEPTHWISE_CONV_2D" else 0
    others = tuple(i for i in range(floats.ndim) if i != axis)
    return tuple(np.abs(floats).max(axis=others).tolist()) if floats.ndim > 1 else ()
