"""
Errors of one tensor: sums and extremes by sample, pooled over samples.

Squares are summed in float32 within pieces that fit a processor's cache and in float64 over them:
a piece's sum is off by some 1e-6 of itself at most, a few millionths of a dB. If squares leave the
range of float32, all are summed in float64. Channels are the last axis, as in TFLite.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pytest_edgeq.numerics.health import CLIPPED_LSB
from pytest_edgeq.tflite.boundary import code_range, qparams
from pytest_edgeq.tflite.constants import shape_along
from pytest_edgeq.tflite.subgraph import Op, Tensor

Array = npt.NDArray[Any]

# Elements of one piece: 256 kB in each of a few arrays.
_PIECE = 1 << 16

#: Maximum number of elements of a tensor that is summed together with others.
SMALL = 1 << 12

# A matrix product with a row of ones sums in half of einsum's time.
_ONES: Array = np.ones(_PIECE, np.float32)

# Mean squares whose sums float32 represents without overflow or underflow.
_SMALLEST, _LARGEST = 1e-28, 1e28


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

    def value(self, code: int) -> float:
        """Return the float32 value of a code."""
        return float(np.float32(code - self.zero_point) * np.float32(self.scale))

    @property
    def fuzz(self) -> float:
        """Maximum float32 error of a difference of codes."""
        return (self.high - self.low) * 2.0**-22


class Ends(NamedTuple):
    """Least and greatest codes of a tensor, and how many are at the limits."""

    least: int  # the least code in use
    greatest: int  # the greatest code in use
    low: int  # how many are the least of the dtype
    high: int  # how many are the greatest of the dtype


def ends_of(stored: Array, codes: Codes) -> Ends:
    """Return the extremes of stored codes, a quarter of the memory of their values."""
    least, greatest = int(stored.min()), int(stored.max())
    low = int(np.count_nonzero(stored == codes.low)) if least <= codes.low else 0
    high = int(np.count_nonzero(stored == codes.high)) if greatest >= codes.high else 0
    return Ends(least, greatest, low, high)


@dataclass(slots=True)
class Sums:
    """Sums and extremes of one tensor on one sample."""

    noise: float = 0.0  # sum of the squared differences of the file and the float op
    channels: Array | None = None  # the same by channel; None for fewer than two axes
    signal: float = 0.0  # sum of the squares of the float op
    least: float = math.inf  # the least value of the float op
    greatest: float = -math.inf
    below: int = 0
    above: int = 0  # how many lie above the greatest
    cumulative_noise: float = 0.0
    cumulative_signal: float = 0.0  # sum of the squares of the whole float form
    cumulative_off: float = 0.0  # greatest difference of these two; for codes only
    off: float = 0.0
    steps: float = 0.0  # greatest difference of their codes
    peak: float = 0.0  # greatest magnitude of the op with the file's constants; for floats only


class PairedTensors(NamedTuple):
    """One tensor of the file and its float counterparts: float32 arrays of one shape."""

    made: Array  # the file's
    floats: Array  # the float op's, on the file's own inputs
    rounded: Array  # the same with the file's constants; may be the same array
    whole: Array  # that of a run of the whole float form
    codes: Codes | None  # range and scale of the file's codes; None for floats


def summed(pairs: Sequence[PairedTensors]) -> list[Sums]:
    """
    Sum over all elements of each tensor; NaN counts as infinite.

    Small tensors are concatenated and summed in one go, since one by one the numpy calls take far
    longer than the sums.
    """
    found = [Sums() for _ in pairs]
    small = [pair for pair in zip(pairs, found, strict=True) if 0 < pair[0].made.size <= SMALL]
    with np.errstate(all="ignore"):
        if small:
            _sum_together([each for each, _ in small], [sums for _, sums in small])
        for each, sums in zip(pairs, found, strict=True):
            if each.made.size > SMALL:
                _sum(sums, each)
    return found


def _sum_together(pairs: Sequence[PairedTensors], found: Sequence[Sums]) -> None:
    """Sum small tensors as segments of one array; differences are float32."""
    made = _in_a_row([each.made for each in pairs])
    floats = _in_a_row([each.floats for each in pairs])
    whole = _in_a_row([each.whole for each in pairs])
    same = all(each.rounded is each.floats for each in pairs)
    rounded = floats if same else _in_a_row([each.rounded for each in pairs])
    counts = [each.made.size for each in pairs]
    starts: Any = np.cumsum(counts) - counts

    def squared(values: Array) -> Array:
        return _nonfinite_to_inf(np.add.reduceat(np.square(values, dtype=np.float64), starts))

    def furthest(values: Array) -> Array:
        peak: Array = np.maximum.reduceat(np.abs(values), starts)
        return _nonfinite_to_inf(peak.astype(np.float64))

    noises = np.square(made - floats, dtype=np.float64)
    cumulative_off = made - whole
    codes = [each.codes for each in pairs]
    # Floats have no limits and a step of 1.
    scales = np.array([1.0 if c is None else c.scale for c in codes])
    ends = [(-math.inf, math.inf) if c is None else (c.floor, c.ceiling) for c in codes]
    floor, ceiling = (np.repeat(each.astype(np.float32), counts) for each in np.array(ends).T)
    off = np.clip(rounded, floor, ceiling)
    off -= made
    furthest_off = furthest(off) / scales
    columns = (
        _nonfinite_to_inf(np.add.reduceat(noises, starts)),
        squared(floats),
        np.minimum.reduceat(floats, starts),
        np.maximum.reduceat(floats, starts),
        squared(cumulative_off),
        squared(whole),
        furthest(cumulative_off),
        furthest_off,
        np.maximum.reduceat(np.abs(rounded), starts),
    )
    start = 0
    for place, values in enumerate(zip(*(each.tolist() for each in columns), strict=True)):
        sums, limits, shape = found[place], codes[place], pairs[place].made.shape
        sums.noise, sums.signal, sums.least, sums.greatest = values[:4]
        sums.cumulative_noise, sums.cumulative_signal, sums.cumulative_off = values[4:7]
        sums.off, sums.peak = values[7:]
        segment = slice(start, start + counts[place])
        if len(shape) > 1:
            sums.channels = noises[segment].reshape(-1, shape[-1]).sum(axis=0)
        if limits is not None:
            _count_beyond(sums, floats[segment], sums.least, sums.greatest, limits)
            if _may_differ(sums.off, limits):
                sums.steps = _steps(off[segment], rounded[segment], made[segment], limits)
        start += counts[place]


def _nonfinite_to_inf(values: Array) -> Array:
    """Replace non-finite values by infinity, which exceeds every bound."""
    return np.where(np.isfinite(values), values, math.inf)


def _in_a_row(values: Sequence[Array]) -> Array:
    row: Array = np.concatenate(values, axis=None, dtype=np.float32)
    return row


def _sum(sums: Sums, pair: PairedTensors) -> None:
    made, floats, rounded, whole, codes = pair
    # `rounded` is summed separately only if it is another array.
    values = (made, floats, whole) if rounded is floats else (made, floats, whole, rounded)
    width = made.shape[-1] if made.ndim > 1 else 1
    lines = [each.reshape(-1, width) for each in values]
    by_channel: list[Array] = []
    spare: list[Array] = []
    for piece in _pieces(lines):
        if not spare:
            spare = [np.empty_like(piece[0]) for _ in range(2)]
        noise, other = (each[: len(piece[0])] for each in spare)
        np.subtract(piece[0], piece[1], out=noise)
        if codes is None:
            _add_floats(sums, piece, noise, other)
        else:
            _add_codes(sums, piece, noise, other, codes)
        squares = np.square(noise, out=other)
        by_channel.append(np.dot(_ONES[: len(squares)], squares))
        sums.signal += _square(piece[1])
        sums.cumulative_signal += _square(piece[2])
        cumulative_off = np.subtract(piece[0], piece[2], out=noise)
        sums.cumulative_noise += _square(cumulative_off)
        if codes is not None:
            sums.cumulative_off = _greater(sums.cumulative_off, cumulative_off)
    noises = np.asarray(by_channel, np.float64).sum(axis=0)
    sums.noise = float(noises.sum())
    if not _fits_float32(sums.noise, made, floats):
        noises = np.square(lines[0].astype(np.float64) - lines[1]).sum(axis=0)
        sums.noise = _finite(float(noises.sum()))
    sums.channels = noises if made.ndim > 1 else None
    if not _fits_float32(sums.signal, floats):
        sums.signal = _exact(floats)
    if not _fits_float32(sums.cumulative_noise, made, whole):
        sums.cumulative_noise = _exact(made, whole)
    if not _fits_float32(sums.cumulative_signal, whole):
        sums.cumulative_signal = _exact(whole)


def _add_codes(
    sums: Sums, piece: Sequence[Array], noise: Array, spare: Array, codes: Codes
) -> None:
    made, floats, rounded = piece[0], piece[1], piece[-1 if len(piece) > 3 else 1]
    least, greatest = float(floats.min()), float(floats.max())
    sums.least, sums.greatest = _lesser(sums.least, least), -_lesser(-sums.greatest, -greatest)
    _count_beyond(sums, floats, least, greatest, codes)
    off = noise
    if rounded is not floats or not (least >= codes.floor and greatest <= codes.ceiling):
        off = np.clip(rounded, codes.floor, codes.ceiling, out=spare)
        off -= made
    furthest = _greater(0.0, off) / codes.scale
    sums.off = max(sums.off, furthest)
    if _may_differ(furthest, codes):
        sums.steps = max(sums.steps, _steps(off, rounded, made, codes))


def _add_floats(sums: Sums, piece: Sequence[Array], noise: Array, spare: Array) -> None:
    made, floats, rounded = piece[0], piece[1], piece[-1 if len(piece) > 3 else 1]
    sums.peak = _peak(sums.peak, rounded)
    off = noise if rounded is floats else np.subtract(made, rounded, out=spare)
    sums.off = _greater(sums.off, off)


def _count_beyond(sums: Sums, floats: Array, least: float, greatest: float, codes: Codes) -> None:
    """Count values beyond the codes; NaN fails every comparison with the limits."""
    beyond = CLIPPED_LSB * codes.scale
    if not least >= codes.floor - beyond:
        sums.below += int(np.count_nonzero(floats < codes.floor - beyond))
    if not greatest <= codes.ceiling + beyond:
        sums.above += int(np.count_nonzero(floats > codes.ceiling + beyond))


def _may_differ(off: float, codes: Codes) -> bool:
    """Whether codes may differ: a value within half a step rounds to the code."""
    return off + codes.fuzz >= 0.5


def _steps(off: Array, rounded: Array, made: Array, codes: Codes) -> float:
    """Return the greatest difference of the file's codes from the rounded reference."""
    far = np.flatnonzero(~(np.abs(off) < (0.5 - codes.fuzz) * codes.scale))
    wanted, own = rounded.reshape(-1)[far], made.reshape(-1)[far]
    exact = np.clip(wanted / codes.scale + codes.zero_point, codes.low, codes.high)
    steps = np.rint(exact) - (np.rint(own / codes.scale) + codes.zero_point)
    return _greater(0.0, steps) if len(far) else 0.0


def _pieces(lines: Sequence[Array]) -> Iterator[Sequence[Array]]:
    """Yield the same rows of all arrays, piece by piece."""
    count, width = lines[0].shape
    step = max(_PIECE // width, 1)
    for start in range(0, count, step):
        yield [each[start : start + step] for each in lines]


def _square(values: Array) -> float:
    flat = values.reshape(-1)
    return float(np.dot(flat, flat))


def _fits_float32(total: float, first: Array, second: Array | None = None) -> bool:
    """Whether float32 holds the sum of the squares, or of the squared differences."""
    if not total:
        return np.array_equal(first, second) if second is not None else not first.any()
    return _SMALLEST * first.size <= total <= _LARGEST * first.size


def _exact(first: Array, second: Array | None = None) -> float:
    """Sum the squares, or the squared differences, in float64."""
    values = first.astype(np.float64)
    if second is not None:
        values -= second
    # A float64 dot product starts threads, which take longer than the sum.
    return _finite(float(np.square(values, out=values).sum()))


def _finite(total: float) -> float:
    return total if math.isfinite(total) else math.inf


def _peak(known: float, values: Array) -> float:
    """Return the greatest magnitude, NaN if there is one."""
    return -_lesser(-known, -max(-float(values.min()), float(values.max())))


def _lesser(first: float, second: float) -> float:
    """Return the lesser number, NaN if one is."""
    return first if math.isnan(first) or second >= first else second


def _greater(known: float, values: Array) -> float:
    """Return the greatest magnitude, or the known one; non-finite values count as infinite."""
    return max(known, _finite(max(-float(values.min()), float(values.max()))))


def code_limits(tensor: Tensor) -> Codes | None:
    """Return range and scale of a tensor's codes; None without a single scale."""
    parameters = qparams(tensor)
    return None if parameters is None else Codes(*code_range(tensor.dtype), *parameters)


def by_channel(tensor: Tensor, codes: Array) -> npt.NDArray[np.float32]:
    """Dequantize codes of a tensor that has a scale for each channel."""
    scales = channel_steps(tensor)
    points = tensor.zero_points.astype(np.float32).reshape(scales.shape)
    return (codes.astype(np.float32) - points) * scales


def channel_steps(tensor: Tensor) -> npt.NDArray[np.float32]:
    """Return the scale of each channel, shaped to broadcast to the tensor."""
    shape = shape_along(len(tensor.scales), len(tensor.shape), tensor.quantized_dimension)
    return tensor.scales.astype(np.float32).reshape(shape)


@dataclass(slots=True, eq=False)
class TensorErrors:
    """Errors of one tensor, pooled over all samples, whatever their shapes."""

    local_lsb: float = 0.0  # greatest |code of the re-run reference − code of the file|
    excess_lsb: float = -math.inf
    signal: float = 0.0  # sum of the squares of the float reference on the op's own inputs
    noise: float = 0.0  # sum of the squared differences from it
    cumulative_lsb: float = 0.0  # greatest difference from the float model, in LSB
    cumulative_signal: float = 0.0  # sum of the squares of the float model's values
    cumulative_noise: float = 0.0  # sum of the squared differences from them
    elements: int = 0
    low: int = 0  # how many codes are the least of the dtype
    high: int = 0  # how many are the greatest
    beyond_low: int = 0  # how many of the float reference's values lie below the range of the codes
    beyond_high: int = 0  # how many lie above
    smallest: float = math.inf  # the least value of the float reference
    largest: float = -math.inf
    least: float = math.inf  # the least code in use
    greatest: float = -math.inf  # the greatest code in use
    nonfinite: int = 0  # how many of the file's values are not finite, although torch's are
    nonfinite_by_rounding: int = 0
    whole_least: float = math.inf
    whole_greatest: float = -math.inf
    channel_noise: npt.NDArray[np.float64] | None = None  # `noise` by channel, the last axis

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

    @classmethod
    def of_sample(
        cls, elements: int, sums: Sums, ends: Ends | None, limits: Codes | None
    ) -> TensorErrors:
        """Return the errors on one sample."""
        found = cls(
            elements=elements,
            signal=sums.signal,
            noise=sums.noise,
            cumulative_signal=sums.cumulative_signal,
            cumulative_noise=sums.cumulative_noise,
            channel_noise=sums.channels,
        )
        if limits is not None and ends is not None:
            found.cumulative_lsb = sums.cumulative_off / limits.scale
            found.smallest, found.largest = sums.least, sums.greatest
            found.beyond_low, found.beyond_high = sums.below, sums.above
            found.least, found.greatest = ends.least, ends.greatest
            found.low, found.high = ends.low, ends.high
        return found

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


def _decibels(signal: float, noise: float) -> float:
    """Return the ratio of two sums of squares in dB; infinite without noise."""
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
