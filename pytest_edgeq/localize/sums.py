"""
Sums and extremes of one tensor of the file beside what torch gives for it, in one go.

Squares are summed in float32 within pieces that a processor keeps at hand and in float64 over them:
a piece's sum is off by some 1e-6 of itself at most, a few millionths of a dB. Where squares leave
what float32 holds, all are summed in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pytest_edgeq.numerics.health import CLIPPED_LSB

__all__ = ["SMALL", "Beside", "Codes", "Ends", "Sums", "ends_of", "in_channels_last", "summed"]

Floats = npt.NDArray[Any]

# Elements that are looked at together: a quarter of a MB each of a few arrays.
_PIECE = 1 << 16

#: Elements of a tensor that is summed together with others.
SMALL = 1 << 12

# Rows of ones: what a matrix product with them gives are sums, in half of einsum's time.
_ONES: Floats = np.ones(_PIECE, np.float32)

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
        """What the least code stands for."""
        return (self.low - self.zero_point) * self.scale

    @property
    def ceiling(self) -> float:
        """What the greatest code stands for."""
        return (self.high - self.zero_point) * self.scale

    def value(self, code: int) -> float:
        """What a code stands for, as float32 has it."""
        return float(np.float32(code - self.zero_point) * np.float32(self.scale))

    @property
    def fuzz(self) -> float:
        """What float32 may be off by in a difference of codes."""
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


def ends_of(stored: Floats, codes: Codes) -> Ends:
    """
    Look how far codes reach: they are a quarter of what they stand for.

    Args:
        stored: The codes, one of them at least.
        codes: What they stand for.
    """
    least, greatest = int(stored.min()), int(stored.max())
    low = int(np.count_nonzero(stored == codes.low)) if least <= codes.low else 0
    high = int(np.count_nonzero(stored == codes.high)) if greatest >= codes.high else 0
    return Ends(least, greatest, low, high)


@dataclass(slots=True)
class Sums:
    """
    What is known of one tensor of one sample.

    Attributes:
        noise: Sum of the squared differences of the file and the float reference.
        channels: The same by channel, the second axis; None where there is none.
        signal: Sum of the squares of the float reference.
        least: The least value of the float reference.
        greatest: The greatest.
        own_signal: Sum of the squares of the file's values.
        below: How many of the float reference's values lie more than `CLIPPED_LSB` below what codes
            reach.
        above: How many lie above.
        apart_noise: Sum of the squared differences of the file and the float model.
        apart_signal: Sum of the squares of the float model.
        apart: Greatest difference of these two; where there are codes.
        off: Greatest difference of the file and the quantized reference, cut to what codes reach.
        steps: Greatest difference of their codes, where it is more than was known.
        peak: Greatest magnitude of the quantized reference; where there are no codes.
        own_least: The least value of the file; of codes it is `Ends` that tell.
        own_greatest: The greatest.
    """

    noise: float = 0.0
    channels: Floats | None = None
    signal: float = 0.0
    least: float = math.inf
    greatest: float = -math.inf
    own_signal: float = 0.0
    below: int = 0
    above: int = 0
    apart_noise: float = 0.0
    apart_signal: float = 0.0
    apart: float = 0.0
    off: float = 0.0
    steps: float = 0.0
    peak: float = 0.0
    own_least: float = math.inf
    own_greatest: float = -math.inf

    @property
    def own_peak(self) -> float:
        """Greatest magnitude of the file's values, NaN where there is one."""
        return max(-self.own_least, self.own_greatest, 0.0)


class Beside(NamedTuple):
    """
    One tensor of the file and all that it is held against, in the node's layout.

    Attributes:
        made: What the file gives.
        floats: What the float reference gives for the op's own inputs.
        quantized: What the quantized one gives; may be the same tensor.
        whole: What the float model gives.
        codes: What the file's codes stand for, None of floats.
        known: Differences of codes up to this one are not looked for.
        own: Whether the sum of the file's squares is asked for.
        told: Sums of the tensor of the file that `floats` is, beside the same `whole`, if it is
            one: what they tell is not looked for again.
    """

    made: torch.Tensor
    floats: torch.Tensor
    quantized: torch.Tensor
    whole: torch.Tensor
    codes: Codes | None
    known: float
    own: bool = True
    told: Sums | None = None


def summed(given: Sequence[Beside]) -> list[Sums]:
    """
    Sums over all elements of each; NaN counts as infinite.

    Small ones are put in a row and summed in one go: one by one, calling numpy takes far longer
    than what is to be done.
    """
    found = [Sums() for _ in given]
    small = [(each, sums) for each, sums in zip(given, found, strict=True) if _is_small(each)]
    with np.errstate(all="ignore"):
        if small:
            _sum_together([each for each, _ in small], [sums for _, sums in small])
        for each, sums in zip(given, found, strict=True):
            if each.made.numel() > SMALL:
                _sum(sums, each)
    return found


def _is_small(each: Beside) -> bool:
    return 0 < each.made.numel() <= SMALL


def _sum_together(given: Sequence[Beside], found: Sequence[Sums]) -> None:
    """All in float64 but for the differences themselves; a row of tensors, each a segment."""
    made = _in_a_row([each.made for each in given])
    floats = _in_a_row([each.floats for each in given])
    whole = _in_a_row([each.whole for each in given])
    same = all(each.quantized is each.floats for each in given)
    quantized = floats if same else _in_a_row([each.quantized for each in given])
    shapes = [each.made.shape for each in given]
    counts = [shape.numel() for shape in shapes]
    starts = _starts(counts)

    def squared(values: Floats, at: Any = starts) -> Floats:
        total: Floats = np.add.reduceat(np.square(values, dtype=np.float64), at)
        return total

    def furthest(values: Floats) -> Floats:
        peak: Floats = np.maximum.reduceat(np.abs(values), starts)
        return _finite_ones(peak.astype(np.float64))

    lines = [math.prod(shape[:2]) if len(shape) > 1 else 1 for shape in shapes]
    sizes = [count // n for n, count in zip(lines, counts, strict=True)]
    by_line = squared(made - floats, _starts(np.repeat(sizes, lines)))
    apart = made - whole
    codes = [each.codes for each in given]
    # Floats have no end, and a step of 1.
    scales = np.array([1.0 if c is None else c.scale for c in codes])
    ends = [(-math.inf, math.inf) if c is None else (c.floor, c.ceiling) for c in codes]
    floor, ceiling = (np.repeat(each.astype(np.float32), counts) for each in np.array(ends).T)
    off = np.clip(quantized, floor, ceiling)
    off -= made
    furthest_off = furthest(off) / scales
    columns = (
        _finite_ones(np.add.reduceat(by_line, _starts(lines))),
        _finite_ones(squared(floats)),
        _finite_ones(squared(made)),
        np.minimum.reduceat(floats, starts),
        np.maximum.reduceat(floats, starts),
        _finite_ones(squared(apart)),
        _finite_ones(squared(whole)),
        furthest(apart),
        furthest_off,
        _steps_together(given, counts, furthest_off, (made, quantized, off)),
        np.maximum.reduceat(np.abs(quantized), starts),
        np.minimum.reduceat(made, starts),
        np.maximum.reduceat(made, starts),
    )
    start = line = 0
    for place, values in enumerate(zip(*(each.tolist() for each in columns), strict=True)):
        sums, shape = found[place], shapes[place]
        sums.noise, sums.signal, sums.own_signal, sums.least, sums.greatest = values[:5]
        sums.apart_noise, sums.apart_signal, sums.apart, sums.off, sums.steps = values[5:10]
        sums.peak, sums.own_least, sums.own_greatest = values[10:]
        if len(shape) > 1:
            channels = by_line[line : line + lines[place]]
            one = shape[0] == 1
            sums.channels = channels if one else channels.reshape(shape[:2]).sum(axis=0)
        limits = codes[place]
        if limits is not None:
            own = floats[start : start + counts[place]]
            _count_beyond(sums, own, sums.least, sums.greatest, limits)
        start += counts[place]
        line += lines[place]


def _starts(counts: Any) -> Any:
    """Where each of some segments in a row begins."""
    ends = np.cumsum(counts)
    return ends - counts


def _finite_ones(values: Floats) -> Floats:
    """What is not finite is beyond every bound."""
    return np.where(np.isfinite(values), values, math.inf)


def _in_a_row(values: Sequence[torch.Tensor]) -> Floats:
    """All elements of all of them, in the order of their axes."""
    row: Floats = np.concatenate([each.numpy() for each in values], axis=None, dtype=np.float32)
    return row


def _steps_together(
    given: Sequence[Beside], counts: Sequence[int], off: Floats, values: tuple[Floats, ...]
) -> Floats:
    """The greatest difference of codes of each, where it is more than was known."""
    steps = np.zeros(len(given))
    near = np.full(len(given), math.inf, np.float32)
    for place, each in enumerate(given):
        if each.codes is not None and _is_news(float(off[place]), each.codes, each.known):
            near[place] = (0.5 - each.codes.fuzz) * each.codes.scale
    if np.isinf(near).all():
        return steps
    far = np.flatnonzero(np.abs(values[2]) >= np.repeat(near, counts))
    owners = np.repeat(np.arange(len(given)), counts)[far]
    known = np.array([each.codes or (0, 0, 1.0, 0) for each in given], np.float32)[owners].T
    apart = _apart_in_codes(values[1][far], values[0][far], Codes(*known))
    np.maximum.at(steps, owners, apart)
    return np.where(np.isfinite(steps), steps, math.inf)


def in_channels_last(value: torch.Tensor) -> bool:
    """Whether channels lie last in memory and the second in the shape."""
    if value.ndim == 4:
        last = value.is_contiguous(memory_format=torch.channels_last)
        return last and not value.is_contiguous()
    return (
        value.ndim > 2
        and not value.is_contiguous()
        and value.permute(0, *range(2, value.ndim), 1).is_contiguous()
    )


def _sum(sums: Sums, given: Beside) -> None:
    made, floats, quantized, whole, codes, known, own, told = given
    last = floats.ndim == 2 or in_channels_last(floats)
    # The quantized reference once more only where it is another.
    values = (made, floats, whole) if quantized is floats else (made, floats, whole, quantized)
    lines = [_lines(each, last=last) for each in values]
    by_channel: list[Floats] = []
    spare: list[Floats] = []
    for piece in _pieces(lines):
        if not spare:
            spare = [np.empty_like(piece[0]) for _ in range(2)]
        noise, other = (each[: len(piece[0])] for each in spare)
        np.subtract(piece[0], piece[1], out=noise)
        if codes is None:
            _take_floats(sums, piece, noise, other)
        else:
            _take_codes(sums, piece, noise, other, codes, known, told)
        squares = np.square(noise, out=other)
        count, size = squares.shape
        by_channel.append(np.dot(_ONES[:count], squares) if last else np.dot(squares, _ones(size)))
        if own:
            sums.own_signal += _square(piece[0])
        if told is None:
            sums.signal += _square(piece[1])
            sums.apart_signal += _square(piece[2])
        apart = np.subtract(piece[0], piece[2], out=noise)
        sums.apart_noise += _square(apart)
        if codes is not None:
            sums.apart = _greater(sums.apart, apart)
    if told is not None:
        sums.signal, sums.apart_signal = told.own_signal, told.apart_signal
    _put_together(sums, by_channel, lines, made.shape, last=last, own=own)


def _put_together(
    sums: Sums,
    by_channel: list[Floats],
    lines: list[Floats],
    shape: torch.Size,
    *,
    last: bool,
    own: bool,
) -> None:
    """Sum up over pieces, all in float64 where squares leave what float32 holds."""
    made, floats, whole = lines[:3]
    if len(by_channel) == 1:
        noises = by_channel[0].astype(np.float64)
    elif last:
        noises = np.asarray(by_channel, np.float64).sum(axis=0)
    else:
        noises = np.concatenate(by_channel).astype(np.float64)
    sums.noise = float(noises.sum())
    if not _is_held(sums.noise, made, floats):
        apart = made.astype(np.float64) - floats
        noises = np.square(apart, out=apart).sum(axis=0 if last else 1)
        sums.noise = _finite(float(noises.sum()))
    if len(shape) > 1:
        # A line for each channel of each image, or one for each channel.
        one = last or shape[0] == 1
        sums.channels = noises if one else noises.reshape(shape[:2]).sum(axis=0)
    if not _is_held(sums.signal, floats):
        sums.signal = _exact(floats)
    if own and not _is_held(sums.own_signal, made):
        sums.own_signal = _exact(made)
    if not _is_held(sums.apart_noise, made, whole):
        sums.apart_noise = _exact(made, whole)
    if not _is_held(sums.apart_signal, whole):
        sums.apart_signal = _exact(whole)


def _take_codes(
    sums: Sums,
    piece: Sequence[Floats],
    noise: Floats,
    spare: Floats,
    codes: Codes,
    known: float,
    told: Sums | None,
) -> None:
    made, floats, quantized = piece[0], piece[1], piece[-1 if len(piece) > 3 else 1]
    if told is None:
        least, greatest = float(floats.min()), float(floats.max())
    else:
        least, greatest = told.own_least, told.own_greatest
    sums.least, sums.greatest = _lesser(sums.least, least), -_lesser(-sums.greatest, -greatest)
    _count_beyond(sums, floats, least, greatest, codes)
    off = noise
    if quantized is not floats or not (least >= codes.floor and greatest <= codes.ceiling):
        off = np.clip(quantized, codes.floor, codes.ceiling, out=spare)
        off -= made
    furthest = _greater(0.0, off) / codes.scale
    sums.off = max(sums.off, furthest)
    if _is_news(furthest, codes, known):
        far = np.flatnonzero(np.abs(off) >= (0.5 - codes.fuzz) * codes.scale)
        steps = _apart_in_codes(quantized.reshape(-1)[far], made.reshape(-1)[far], codes)
        sums.steps = _greater(sums.steps, steps) if len(far) else sums.steps


def _count_beyond(sums: Sums, floats: Floats, least: float, greatest: float, codes: Codes) -> None:
    """NaN is within no limits. Where all values are, there is nothing to count."""
    beyond = CLIPPED_LSB * codes.scale
    if not least >= codes.floor - beyond:
        sums.below += int(np.count_nonzero(floats < codes.floor - beyond))
    if not greatest <= codes.ceiling + beyond:
        sums.above += int(np.count_nonzero(floats > codes.ceiling + beyond))


def _is_news(off: float, codes: Codes, known: float) -> bool:
    """Whether codes may differ by more than is known: what is nearer than halfway rounds to it."""
    return known < math.inf and math.floor(min(off, 1e9) + 0.5 + codes.fuzz) > known


def _apart_in_codes(quantized: Floats, made: Floats, codes: Codes) -> Floats:
    """Differences of the codes that values round to and those that the file has."""
    exact = np.clip(quantized / codes.scale + codes.zero_point, codes.low, codes.high)
    apart: Floats = np.rint(exact) - (np.rint(made / codes.scale) + codes.zero_point)
    return np.abs(apart)


def _take_floats(sums: Sums, piece: Sequence[Floats], noise: Floats, spare: Floats) -> None:
    made, floats, quantized = piece[0], piece[1], piece[-1 if len(piece) > 3 else 1]
    sums.peak = _peak(sums.peak, quantized)
    sums.own_least = _lesser(sums.own_least, float(made.min()))
    sums.own_greatest = -_lesser(-sums.own_greatest, -float(made.max()))
    off = noise if quantized is floats else np.subtract(made, quantized, out=spare)
    sums.off = _greater(sums.off, off)


def _lines(value: torch.Tensor, *, last: bool) -> Floats:
    """The elements in the order of memory: lines of channels, or a line a channel."""
    array: Floats = (value if value.dtype == torch.float32 else value.to(torch.float32)).numpy()
    shape = array.shape
    if last:
        turned = array.transpose(0, *range(2, array.ndim), 1) if array.ndim > 2 else array
        return turned.reshape(-1, shape[1])
    return array.reshape(shape[0] * shape[1] if array.ndim > 1 else 1, -1)


def _pieces(lines: Sequence[Floats]) -> Iterator[Sequence[Floats]]:
    """Some lines of all of them, the same ones."""
    count, size = lines[0].shape
    if count * size <= _PIECE:
        yield lines
        return
    step = max(_PIECE // size, 1)
    for start in range(0, count, step):
        yield [each[start : start + step] for each in lines]


def _ones(count: int) -> Floats:
    return _ONES[:count] if count <= _PIECE else np.ones(count, np.float32)


def _square(values: Floats) -> float:
    flat = values.reshape(-1)
    return float(np.dot(flat, flat))


def _is_held(total: float, first: Floats, second: Floats | None = None) -> bool:
    """Whether float32 holds the sum of the squares, or of those of the difference."""
    if not total:
        return np.array_equal(first, second) if second is not None else not first.any()
    return _SMALLEST * first.size <= total <= _LARGEST * first.size


def _exact(first: Floats, second: Floats | None = None) -> float:
    """Sum of the squares, or of those of the difference, in float64."""
    values = first.astype(np.float64)
    if second is not None:
        values -= second
    # Of float64 a dot product would call threads in, which take longer than the sum.
    return _finite(float(np.square(values, out=values).sum()))


def _finite(total: float) -> float:
    return total if math.isfinite(total) else math.inf


def _peak(known: float, values: Floats) -> float:
    """The greatest magnitude, NaN where there is one."""
    return -_lesser(-known, -max(-float(values.min()), float(values.max())))


def _lesser(first: float, second: float) -> float:
    """The lesser one, NaN where one is."""
    return first if math.isnan(first) or second >= first else second


def _greater(known: float, values: Floats) -> float:
    """The greatest magnitude, or what is known; what is not finite is beyond every bound."""
    return max(known, _finite(max(-float(values.min()), float(values.max()))))
