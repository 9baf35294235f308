"""
Errors of one tensor: sums and extremes of a sample beside what it is held against, pooled.

Squares are summed in float32 within pieces that a processor keeps at hand and in float64 over them:
a piece's sum is off by some 1e-6 of itself at most, a few millionths of a dB. Where squares leave
what float32 holds, all are summed in float64. Channels are the last axis, as TFLite has them.
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

# Elements that are looked at together: a quarter of a MB each of a few arrays.
_PIECE = 1 << 16

#: Elements of a tensor that is summed together with others.
SMALL = 1 << 12

# Rows of ones: a matrix product with them sums up, in half of einsum's time.
_ONES: Array = np.ones(_PIECE, np.float32)

# Mean squares that float32 holds with all those that matter beside them.
_SMALLEST, _LARGEST = 1e-28, 1e28


class Codes(NamedTuple):
    """
    What codes stand for.

    Attributes:
        low: The least there is.
        high: The greatest.
        scale: Of one step.
        zero_point: The code of 0.
    """

    low: int
    high: int
    scale: float
    zero_point: int

    @property
    def floor(self) -> float:
        """The value of the least code."""
        return (self.low - self.zero_point) * self.scale

    @property
    def ceiling(self) -> float:
        """The value of the greatest code."""
        return (self.high - self.zero_point) * self.scale

    def value(self, code: int) -> float:
        """Return the value of a code, as float32 has it."""
        return float(np.float32(code - self.zero_point) * np.float32(self.scale))

    @property
    def fuzz(self) -> float:
        """By how much float32 may be off in a difference of codes."""
        return (self.high - self.low) * 2.0**-22


class Ends(NamedTuple):
    """
    How far a tensor's codes reach.

    Attributes:
        least: The least code met.
        greatest: The greatest.
        low: How many are the least there is.
        high: How many are the greatest.
    """

    least: int
    greatest: int
    low: int
    high: int


def ends_of(stored: Array, codes: Codes) -> Ends:
    """Return how far codes reach: they take a quarter of the memory of their values."""
    least, greatest = int(stored.min()), int(stored.max())
    low = int(np.count_nonzero(stored == codes.low)) if least <= codes.low else 0
    high = int(np.count_nonzero(stored == codes.high)) if greatest >= codes.high else 0
    return Ends(least, greatest, low, high)


@dataclass(slots=True)
class Sums:
    """
    What is known of one tensor of one sample.

    Attributes:
        noise: Sum of the squared differences of the file and the float op.
        channels: The same by channel; None of fewer than two axes.
        signal: Sum of the squares of the float op.
        least: The least value of the float op.
        greatest: The greatest.
        below: How many of the float op's values lie more than `CLIPPED_LSB` below the least code.
        above: How many lie above the greatest.
        apart_noise: Sum of the squared differences of the file and the whole float form.
        apart_signal: Sum of the squares of the whole float form.
        apart: Greatest difference of these two; where there are codes.
        off: Greatest difference of the file and the op with the file's constants, cut to what codes
            reach; of codes in LSB.
        steps: Greatest difference of their codes.
        peak: Greatest magnitude of the op with the file's constants; where there are no codes.
    """

    noise: float = 0.0
    channels: Array | None = None
    signal: float = 0.0
    least: float = math.inf
    greatest: float = -math.inf
    below: int = 0
    above: int = 0
    apart_noise: float = 0.0
    apart_signal: float = 0.0
    apart: float = 0.0
    off: float = 0.0
    steps: float = 0.0
    peak: float = 0.0


class Beside(NamedTuple):
    """
    One tensor of the file and what it is held against: float32 arrays of one shape.

    Attributes:
        made: The file's.
        floats: What the float op gives on the file's own inputs.
        rounded: What it gives with the file's constants; may be the same array.
        whole: What the whole float form gives.
        codes: What the file's codes stand for, None of floats.
    """

    made: Array
    floats: Array
    rounded: Array
    whole: Array
    codes: Codes | None


def summed(given: Sequence[Beside]) -> list[Sums]:
    """
    Sum over all elements of each tensor; NaN counts as infinite.

    Small ones are put in a row and summed in one go: one by one, calling numpy takes far longer
    than the sums.
    """
    found = [Sums() for _ in given]
    small = [pair for pair in zip(given, found, strict=True) if 0 < pair[0].made.size <= SMALL]
    with np.errstate(all="ignore"):
        if small:
            _sum_together([each for each, _ in small], [sums for _, sums in small])
        for each, sums in zip(given, found, strict=True):
            if each.made.size > SMALL:
                _sum(sums, each)
    return found


def _sum_together(given: Sequence[Beside], found: Sequence[Sums]) -> None:
    """Sum small tensors, each a segment of a row, in float64 but for the differences."""
    made = _in_a_row([each.made for each in given])
    floats = _in_a_row([each.floats for each in given])
    whole = _in_a_row([each.whole for each in given])
    same = all(each.rounded is each.floats for each in given)
    rounded = floats if same else _in_a_row([each.rounded for each in given])
    counts = [each.made.size for each in given]
    starts: Any = np.cumsum(counts) - counts

    def squared(values: Array) -> Array:
        return _finite_ones(np.add.reduceat(np.square(values, dtype=np.float64), starts))

    def furthest(values: Array) -> Array:
        peak: Array = np.maximum.reduceat(np.abs(values), starts)
        return _finite_ones(peak.astype(np.float64))

    noises = np.square(made - floats, dtype=np.float64)
    apart = made - whole
    codes = [each.codes for each in given]
    # Array have no end, and a step of 1.
    scales = np.array([1.0 if c is None else c.scale for c in codes])
    ends = [(-math.inf, math.inf) if c is None else (c.floor, c.ceiling) for c in codes]
    floor, ceiling = (np.repeat(each.astype(np.float32), counts) for each in np.array(ends).T)
    off = np.clip(rounded, floor, ceiling)
    off -= made
    furthest_off = furthest(off) / scales
    columns = (
        _finite_ones(np.add.reduceat(noises, starts)),
        squared(floats),
        np.minimum.reduceat(floats, starts),
        np.maximum.reduceat(floats, starts),
        squared(apart),
        squared(whole),
        furthest(apart),
        furthest_off,
        np.maximum.reduceat(np.abs(rounded), starts),
    )
    start = 0
    for place, values in enumerate(zip(*(each.tolist() for each in columns), strict=True)):
        sums, limits, shape = found[place], codes[place], given[place].made.shape
        sums.noise, sums.signal, sums.least, sums.greatest = values[:4]
        sums.apart_noise, sums.apart_signal, sums.apart, sums.off, sums.peak = values[4:]
        segment = slice(start, start + counts[place])
        if len(shape) > 1:
            sums.channels = noises[segment].reshape(-1, shape[-1]).sum(axis=0)
        if limits is not None:
            _count_beyond(sums, floats[segment], sums.least, sums.greatest, limits)
            if _may_part(sums.off, limits):
                sums.steps = _steps(off[segment], rounded[segment], made[segment], limits)
        start += counts[place]


def _finite_ones(values: Array) -> Array:
    """Replace what is not finite by infinity, which exceeds every bound."""
    return np.where(np.isfinite(values), values, math.inf)


def _in_a_row(values: Sequence[Array]) -> Array:
    row: Array = np.concatenate(values, axis=None, dtype=np.float32)
    return row


def _sum(sums: Sums, given: Beside) -> None:
    made, floats, rounded, whole, codes = given
    # The op with the file's constants once more only where it is another.
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
            _take_floats(sums, piece, noise, other)
        else:
            _take_codes(sums, piece, noise, other, codes)
        squares = np.square(noise, out=other)
        by_channel.append(np.dot(_ONES[: len(squares)], squares))
        sums.signal += _square(piece[1])
        sums.apart_signal += _square(piece[2])
        apart = np.subtract(piece[0], piece[2], out=noise)
        sums.apart_noise += _square(apart)
        if codes is not None:
            sums.apart = _greater(sums.apart, apart)
    noises = np.asarray(by_channel, np.float64).sum(axis=0)
    sums.noise = float(noises.sum())
    if not _is_held(sums.noise, made, floats):
        noises = np.square(lines[0].astype(np.float64) - lines[1]).sum(axis=0)
        sums.noise = _finite(float(noises.sum()))
    sums.channels = noises if made.ndim > 1 else None
    if not _is_held(sums.signal, floats):
        sums.signal = _exact(floats)
    if not _is_held(sums.apart_noise, made, whole):
        sums.apart_noise = _exact(made, whole)
    if not _is_held(sums.apart_signal, whole):
        sums.apart_signal = _exact(whole)


def _take_codes(
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
    if _may_part(furthest, codes):
        sums.steps = max(sums.steps, _steps(off, rounded, made, codes))


def _take_floats(sums: Sums, piece: Sequence[Array], noise: Array, spare: Array) -> None:
    made, floats, rounded = piece[0], piece[1], piece[-1 if len(piece) > 3 else 1]
    sums.peak = _peak(sums.peak, rounded)
    off = noise if rounded is floats else np.subtract(made, rounded, out=spare)
    sums.off = _greater(sums.off, off)


def _count_beyond(sums: Sums, floats: Array, least: float, greatest: float, codes: Codes) -> None:
    """Count values beyond the codes. NaN is within no limits; within them there are none."""
    beyond = CLIPPED_LSB * codes.scale
    if not least >= codes.floor - beyond:
        sums.below += int(np.count_nonzero(floats < codes.floor - beyond))
    if not greatest <= codes.ceiling + beyond:
        sums.above += int(np.count_nonzero(floats > codes.ceiling + beyond))


def _may_part(off: float, codes: Codes) -> bool:
    """Whether codes may differ: a value that is nearer than halfway rounds to the code."""
    return off + codes.fuzz >= 0.5


def _steps(off: Array, rounded: Array, made: Array, codes: Codes) -> float:
    """Return the greatest difference of the file's codes from those that values round to."""
    far = np.flatnonzero(~(np.abs(off) < (0.5 - codes.fuzz) * codes.scale))
    wanted, own = rounded.reshape(-1)[far], made.reshape(-1)[far]
    exact = np.clip(wanted / codes.scale + codes.zero_point, codes.low, codes.high)
    apart = np.rint(exact) - (np.rint(own / codes.scale) + codes.zero_point)
    return _greater(0.0, apart) if len(far) else 0.0


def _pieces(lines: Sequence[Array]) -> Iterator[Sequence[Array]]:
    """Give the same rows of all of them, some at a time."""
    count, width = lines[0].shape
    step = max(_PIECE // width, 1)
    for start in range(0, count, step):
        yield [each[start : start + step] for each in lines]


def _square(values: Array) -> float:
    flat = values.reshape(-1)
    return float(np.dot(flat, flat))


def _is_held(total: float, first: Array, second: Array | None = None) -> bool:
    """Whether float32 holds the sum of the squares, or of those of the difference."""
    if not total:
        return np.array_equal(first, second) if second is not None else not first.any()
    return _SMALLEST * first.size <= total <= _LARGEST * first.size


def _exact(first: Array, second: Array | None = None) -> float:
    """Sum of the squares, or of those of the difference, in float64."""
    values = first.astype(np.float64)
    if second is not None:
        values -= second
    # Of float64 a dot product would call threads in, which take longer than the sum.
    return _finite(float(np.square(values, out=values).sum()))


def _finite(total: float) -> float:
    return total if math.isfinite(total) else math.inf


def _peak(known: float, values: Array) -> float:
    """The greatest magnitude, NaN where there is one."""
    return -_lesser(-known, -max(-float(values.min()), float(values.max())))


def _lesser(first: float, second: float) -> float:
    """The lesser one, NaN where one is."""
    return first if math.isnan(first) or second >= first else second


def _greater(known: float, values: Array) -> float:
    """The greatest magnitude, or what is known; what is not finite is beyond every bound."""
    return max(known, _finite(max(-float(values.min()), float(values.max()))))


def code_limits(tensor: Tensor) -> Codes | None:
    """Return what codes stand for; None of what has not one scale."""
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
        spoilt: As `nonfinite`, where the float op gives these as well for what this one takes.
        whole_least: The least value of the float model, of ops that `Readers` asks for it.
        whole_greatest: The greatest.
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
    spoilt: int = 0
    whole_least: float = math.inf
    whole_greatest: float = -math.inf
    channel_noise: npt.NDArray[np.float64] | None = None

    @property
    def loss(self) -> float:
        """How far the file is from the float reference, in dB below it."""
        return -_decibels(self.signal, self.noise)

    @property
    def cumulative_loss(self) -> float:
        """How far the file is from the float model, in dB below it."""
        return -_decibels(self.cumulative_signal, self.cumulative_noise)

    def rmse(self, scale: float | None, *, cumulative: bool = False) -> float | None:
        """Return the root mean square of differences, in LSB; None without a scale or elements."""
        if scale is None or not self.elements:
            return None
        noise = self.cumulative_noise if cumulative else self.noise
        return math.sqrt(noise / self.elements) / scale

    @classmethod
    def of_sample(
        cls, elements: int, sums: Sums, ends: Ends | None, limits: Codes | None
    ) -> Measured:
        """Give the errors on one sample."""
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
    *("low", "high", "beyond_low", "beyond_high", "nonfinite", "spoilt"),
)
_GREATEST = (
    *("local_lsb", "excess_lsb", "cumulative_lsb"),
    *("largest", "greatest", "whole_greatest"),
)
_LEAST = ("smallest", "least", "whole_least")


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
