"""Find the tensor whose few codes round away the change of an input."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pytest_edgeq.localize.consumers import Consumers
from pytest_edgeq.localize.measured import code_limits
from pytest_edgeq.localize.mistakes import BIT_DB
from pytest_edgeq.numerics.static_health import Reason
from pytest_edgeq.tflite.boundary import decode
from pytest_edgeq.tflite.subgraph import Subgraph

if TYPE_CHECKING:
    from pytest_edgeq.compare.samples import Sample
    from pytest_edgeq.localize.localizer import Localizer

FEW_CODES = 4  # codes of a channel that are few: two bits, and mostly two codes inside a range
_LEAST_CHANNELS = 4  # minimum number of channels, so that a majority is more than two


@dataclass(frozen=True, slots=True)
class CoarseTensor:
    """A tensor of which most channels use few codes."""

    op: int | None  # number of the op in the file; None for the input itself
    codes: int  # number of codes of the median coarse channel
    coarse: int  # how many channels use few codes
    channels: int
    wide: tuple[int, ...]  # channels that fill a quarter of the range or more, the widest first
    reach: tuple[float, float]  # the least and the greatest value of the codes
    widened: Reason  # why a consumer widens a range that no channel fills, if known


class _TensorValues(NamedTuple):
    """Codes of a tensor, their values, and the values of the float form."""

    codes: npt.NDArray[Any]
    value: npt.NDArray[Any]
    whole: npt.NDArray[Any]


@dataclass(slots=True, eq=False)
class _Channels:
    """Sums and extremes of the channels along one axis of a tensor."""

    power: npt.NDArray[np.float64]  # sum of the squares of the float form's change, by channel
    noise: npt.NDArray[np.float64]  # the same of the difference of the file's change from it
    least: npt.NDArray[np.float64]  # the least code
    greatest: npt.NDArray[np.float64]  # the greatest code

    def coarse(self) -> npt.NDArray[np.bool_] | None:
        """Return which channels lose the change by few codes; None if a minority."""
        moved = self.power > 0
        lost = moved & (self.noise > self.power * 10 ** (-BIT_DB / 10))
        coarse = lost & (self.spans <= FEW_CODES)
        return coarse if 2 * int(coarse.sum()) > int(moved.sum()) else None

    @property
    def spans(self) -> npt.NDArray[np.int64]:
        """How many codes each channel spans."""
        return (self.greatest - self.least + 1).astype(np.int64)


def first_coarse(
    localizer: Localizer, start: int, end: int, pairs: Sequence[tuple[Sample, Sample]]
) -> CoarseTensor | None:
    """
    Return the first tensor between input and output that rounds the change away.

    More than half of the channels that the change reaches in the float form must lose all but one
    bit of it, and use 4 codes at most on all samples.
    """
    subgraph = localizer.subgraph
    on_way = between(subgraph, start, end)
    known: dict[tuple[int, int], _Channels] = {}
    for first, second in pairs:
        before = dict(_coded(localizer, first, on_way))
        for tensor, after in _coded(localizer, second, on_way):
            if tensor in before and before[tensor].value.shape == after.value.shape:
                _add(known, tensor, before[tensor], after)
    order = {tensor: op.index for op in subgraph.ops for tensor in op.outputs}
    # The last axis first, as channels are last in TFLite.
    for tensor, axis in sorted(known, key=lambda key: (order.get(key[0], -1), -key[1])):
        channels = known[tensor, axis]
        coarse, limits = channels.coarse(), code_limits(subgraph.tensors[tensor])
        if coarse is None or limits is None:
            continue
        spans = channels.spans
        wide = np.flatnonzero(4 * spans > limits.high - limits.low)
        maker = None if len(wide) else subgraph.producer.get(tensor)
        consumers = Consumers(localizer.quantized.graph, subgraph.index)
        return CoarseTensor(
            op=order.get(tensor),
            codes=int(np.median(spans[coarse])),
            coarse=int(coarse.sum()),
            channels=len(spans),
            wide=tuple(wide[np.argsort(-spans[wide], kind="stable")].tolist()),
            reach=limits.reach,
            widened=(maker and consumers.widening_reason(maker)) or Reason(),
        )
    return None


def _coded(
    localizer: Localizer, sample: Sample, wanted: Collection[int]
) -> Iterator[tuple[int, _TensorValues]]:
    """Yield the wanted tensors with one scale, inputs first."""
    quantized, subgraph = localizer.quantized, localizer.subgraph
    edge, names, arrays = quantized.edge, quantized.input_names, sample.arrays()
    codes, inputs = edge.encode(names, arrays), edge.by_input_name(names, arrays)
    for io_tensor in edge.signature.inputs:
        if io_tensor.tensor.index in wanted and code_limits(io_tensor.tensor) is not None:
            whole = edge.layouts.to_file(io_tensor, inputs[io_tensor.name])
            value = decode(codes[io_tensor.name], io_tensor)
            yield io_tensor.tensor.index, _TensorValues(codes[io_tensor.name], value, whole)
    for made in localizer.tensors(sample):
        if made.tensor in wanted and code_limits(subgraph.tensors[made.tensor]) is not None:
            yield made.tensor, _TensorValues(made.codes, made.value, made.whole)


def _add(
    known: dict[tuple[int, int], _Channels],
    tensor: int,
    before: _TensorValues,
    after: _TensorValues,
) -> None:
    """Add one pair of samples to the channels of a tensor, along each axis."""
    for axis, count in enumerate(before.value.shape):
        if count < _LEAST_CHANNELS:
            continue
        old, new = (
            _TensorValues(*(_rows(each, axis) for each in values)) for values in (before, after)
        )
        wanted, got = new.whole - old.whole, new.value - old.value
        codes = np.concatenate([old.codes, new.codes], axis=1)
        power, noise = np.square(wanted).sum(axis=1), np.square(got - wanted).sum(axis=1)
        least, greatest = codes.min(axis=1), codes.max(axis=1)
        channels = known.get((tensor, axis))
        if channels is None:
            known[tensor, axis] = _Channels(power, noise, least, greatest)
        elif len(channels.power) == count:
            channels.power += power
            channels.noise += noise
            channels.least = np.minimum(channels.least, least)
            channels.greatest = np.maximum(channels.greatest, greatest)


def _rows(array: npt.NDArray[Any], axis: int) -> npt.NDArray[np.float64]:
    """Return one row for each channel."""
    return np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1).astype(np.float64)


def between(subgraph: Subgraph, start: int, end: int) -> set[int]:
    """Return the tensors on the paths between two tensors."""
    behind = {start}
    for op in subgraph.ops:
        if behind.intersection(op.inputs):
            behind.update(op.outputs)
    before = {end}
    for op in reversed(subgraph.ops):
        if before.intersection(op.outputs):
            before.update(op.inputs)
    return behind & before
