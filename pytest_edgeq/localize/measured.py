"""Errors of one tensor, pooled over samples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.localize.sums import Codes, Ends, Sums
from pytest_edgeq.tflite.graph import Op

__all__ = ["Measured", "channel_maxima", "is_at_limit"]

Array = npt.NDArray[Any]


@dataclass(slots=True, eq=False)
class Measured:
    """
    Errors of one tensor, pooled over all samples, whatever their shapes.

    Attributes:
        local_lsb: Greatest |code of the re-run reference − code of the file|.
        excess_lsb: Greatest distance of the unrounded reference from the code, beyond ½ LSB and the
            kernel's own bound. Of a float op: of the two values, beyond the bound, in units of it.
        signal: Sum of the squares of the float reference on the op's own inputs.
        noise: Sum of the squared differences from it.
        cumulative_lsb: Greatest difference from the float model, in LSB.
        cumulative_signal: Sum of the squares of the float model's values.
        cumulative_noise: Sum of the squared differences from them.
        elements: How many values were measured.
        low: How many codes are the least there is.
        high: How many are the greatest.
        beyond_low: How many of the float reference's values lie below what codes reach.
        beyond_high: How many lie above.
        smallest: The least value of the float reference.
        largest: The greatest.
        least: The least code met.
        greatest: The greatest code met.
        nonfinite: How many of the file's values are not finite, and not so in torch.
        channel_noise: `noise` by channel, the last axis; empty where samples differ in the
            number of channels.
    """

    local_lsb: float = 0.0
    excess_lsb: float = -math.inf
    signal: float = 0.0
    noise: float = 0.0
    cumulative_lsb: float = 0.0
    cumulative_signal: float = 0.0
    cumulative_noise: float = 0.0
    elements: int = 0
    low: int = 0
    high: int = 0
    beyond_low: int = 0
    beyond_high: int = 0
    smallest: float = math.inf
    largest: float = -math.inf
    least: float = math.inf
    greatest: float = -math.inf
    nonfinite: int = 0
    channel_noise: npt.NDArray[np.float64] | None = None

    @property
    def beyond(self) -> float:
        """Share of the float reference's values outside of what codes reach."""
        return (self.beyond_low + self.beyond_high) / max(self.elements, 1)

    @property
    def rms(self) -> float:
        """Root mean square of the differences from the float reference; 0 without elements."""
        return math.sqrt(self.noise / max(self.elements, 1))

    @property
    def loss(self) -> float:
        """How far the file is from the float reference, in dB below it."""
        return -_decibels(self.signal, self.noise)

    @property
    def cumulative_loss(self) -> float:
        """How far the file is from the float model, in dB below it."""
        return -_decibels(self.cumulative_signal, self.cumulative_noise)

    def rmse(self, scale: float | None, *, cumulative: bool = False) -> float | None:
        """
        Return the root mean square of differences, in LSB; None without a scale or elements.

        Args:
            scale: Of the tensor.
            cumulative: From the float model, and not on the op's own inputs.
        """
        if scale is None or not self.elements:
            return None
        noise = self.cumulative_noise if cumulative else self.noise
        return math.sqrt(noise / self.elements) / scale

    @classmethod
    def of_sample(
        cls, elements: int, sums: Sums, ends: Ends | None, limits: Codes | None
    ) -> Measured:
        """
        Give the errors on one sample.

        Args:
            elements: How many values the tensor has.
            sums: Of them.
            ends: How far their codes reach, where there are any.
            limits: What codes stand for.
        """
        found = cls(
            elements=elements,
            signal=sums.signal,
            noise=sums.noise,
            cumulative_signal=sums.apart_signal,
            cumulative_noise=sums.apart_noise,
            channel_noise=sums.channels,
        )
        if limits is not None and ends is not None:
            found.cumulative_lsb = sums.apart / limits.scale
            found.smallest, found.largest = sums.least, sums.greatest
            found.beyond_low, found.beyond_high = sums.below, sums.above
            found.least, found.greatest = ends.least, ends.greatest
            found.low, found.high = ends.low, ends.high
        return found

    def merge(self, other: Measured) -> None:
        """Take in errors of the same tensor on other samples."""
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
    *("low", "high", "beyond_low", "beyond_high", "nonfinite"),
)
_GREATEST = ("local_lsb", "excess_lsb", "cumulative_lsb", "largest", "greatest")
_LEAST = ("smallest", "least")


def _decibels(signal: float, noise: float) -> float:
    """A ratio of two sums of squares in dB; without noise it is infinite."""
    if not noise:
        return math.inf
    if not signal or math.isinf(noise):
        return -math.inf
    return 10 * math.log10(signal / noise)


def is_at_limit(values: Array) -> Array:
    """Return where codes of a bias are the least or the greatest of INT32."""
    info = np.iinfo(np.int32)
    limited: Array = (values.ravel() == info.min) | (values.ravel() == info.max)
    return limited


def channel_maxima(op: Op, floats: Array) -> tuple[float, ...]:
    """Return the largest weight of each output channel of an op."""
    axis = floats.ndim - 1 if op.name == "DEPTHWISE_CONV_2D" else 0
    others = tuple(i for i in range(floats.ndim) if i != axis)
    return tuple(np.abs(floats).max(axis=others).tolist()) if floats.ndim > 1 else ()
