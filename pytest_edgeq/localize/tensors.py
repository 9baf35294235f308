"""The file's tensors of one run, or of several, as torch holds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pytest_edgeq.localize.codes import by_channel, channel_ends, code_limits
from pytest_edgeq.localize.kernels import Halves
from pytest_edgeq.localize.matches import Reading
from pytest_edgeq.localize.sums import Codes, Ends, Sums, in_channels_last
from pytest_edgeq.localize.views import View
from pytest_edgeq.tflite.graph import Tensor

__all__ = ["Limits", "Met", "Tensors", "plainly_strided"]

Node = torch.fx.Node

# Elements that are dequantized together: what a processor keeps at hand.
_PIECE = 1 << 16


class Limits(dict[int, "Codes | None"]):
    """
    What the codes of a subgraph's tensors stand for, by index; None of what has not one scale.

    Args:
        tensors: Of the subgraph.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.tensors = tensors

    def __missing__(self, index: int) -> Codes | None:
        """Look it up once."""
        limits = code_limits(self.tensors[index])
        self[index] = None if limits is None else Codes(*limits)
        return self[index]

    def has_channels(self, index: int) -> bool:
        """Whether a tensor has a scale a channel, as a weight that is computed at each run has."""
        return len(self.tensors[index].scales) > 1


@dataclass(slots=True, eq=False)
class Met:
    """
    What is known of a tensor of the file that was measured.

    Attributes:
        view: How it was read.
        whole: What the float model gives for it.
        sums: Beside that; None until they are known.
        ends: How far its codes reach, where it has any.
        halves: Of a kernel that rounds its own input, by source, where that is halfway between two
            codes.
    """

    view: View
    whole: torch.Tensor
    sums: Sums | None = None
    ends: Ends | None = None
    halves: dict[int, Halves] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Held:
    """
    One tensor of the file.

    Attributes:
        stored: As the file has it, samples along the first axis.
        real: Dequantized.
        double: The same in float64.
        read: As it is stored, by view, in a row.
        turned: The same with channels last in memory.
        placed: Dequantized, as the value of a node, in a row.
        peak: Greatest magnitude.
    """

    stored: torch.Tensor
    real: torch.Tensor | None = None
    double: torch.Tensor | None = None
    read: dict[View, torch.Tensor] = field(default_factory=dict)
    turned: dict[View, torch.Tensor] = field(default_factory=dict)
    placed: dict[Node, torch.Tensor] = field(default_factory=dict)
    peak: float | None = None


class Tensors:
    """
    The file's tensors of a stack of samples, each read once and held until it is dropped.

    Args:
        stored: Gives a tensor as the file has it, with the samples along an axis of their own, the
            first.
        limits: What codes stand for.
        count: How many samples there are.

    Attributes:
        count: How many samples there are.
        met: By tensor, what was measured of it.
    """

    def __init__(
        self, stored: Callable[[int], npt.NDArray[Any]], limits: Limits, count: int
    ) -> None:
        self.count = count
        self._stored = stored
        self._limits = limits
        self._held: dict[int, _Held] = {}
        self.met: dict[int, Met] = {}

    def _hold(self, index: int) -> _Held:
        held = self._held.get(index)
        if held is None:
            held = self._held[index] = _Held(torch.from_numpy(self._stored(index)))
        return held

    def read(self, index: int, *, codes: bool = False, double: bool = False) -> torch.Tensor:
        """
        A tensor of the file as torch holds it, samples along an axis of their own, the first.

        Args:
            index: In the subgraph.
            codes: As stored, else dequantized.
            double: Dequantized in float64.
        """
        held, limits = self._hold(index), self._limits[index]
        if limits is None:
            value = held.stored if codes else self._floats(index, held)
            return value.double() if double and value.is_floating_point() else value
        if codes:
            return held.stored
        if double:
            if held.double is None:
                held.double = _dequantized(held.stored, limits, double=True)
            return held.double
        if held.real is None:
            held.real = _dequantized(held.stored, limits)
        return held.real

    def _floats(self, index: int, held: _Held) -> torch.Tensor:
        """What has not one scale: floats, or codes with a scale a channel."""
        if not self._limits.has_channels(index):
            return held.stored
        if held.real is None:
            held.real = by_channel(self._limits.tensors[index], held.stored)
        return held.real

    def codes_at(self, index: int, view: View, *, last: bool = False) -> torch.Tensor:
        """
        A tensor of the file as it is stored, in the layout of a node, samples in a row.

        Args:
            index: In the subgraph.
            view: How it reads as the node's value.
            last: With channels last in memory; they are turned once.
        """
        held = self._hold(index)
        codes = held.read.get(view)
        if codes is None:
            codes = held.read[view] = view.read_together(held.stored)
        if not last or codes.ndim != 4 or codes.is_contiguous(memory_format=torch.channels_last):
            return codes
        turned = held.turned.get(view)
        if turned is None:
            # By numpy, which takes two thirds of the time.
            rows = np.ascontiguousarray(codes.numpy().transpose(0, 2, 3, 1))
            turned = held.turned[view] = torch.from_numpy(rows).permute(0, 3, 1, 2)
        return turned

    def at(self, index: int, reading: Reading, *, last: bool = False) -> torch.Tensor:
        """
        A tensor of the file, dequantized, as the value of a node, samples in a row.

        Args:
            index: In the subgraph.
            reading: Of one of its nodes.
            last: Rather with channels last in memory. Codes are turned to it sooner than floats.
        """
        held = self._hold(index)
        value = held.placed.get(reading.node)
        if value is None:
            limits = self._limits[index]
            if limits is None:
                value = reading.view.read_together(self._floats(index, held))
            elif held.real is not None:
                value = reading.view.read_together(held.real)
            else:
                value = _dequantized(self.codes_at(index, reading.view, last=last), limits)
            value = held.placed[reading.node] = plainly_strided(value)
        return value

    def ends(self, index: int, reading: Reading) -> tuple[torch.Tensor, torch.Tensor]:
        """What a tensor with a scale a channel can hold, as the value of a node of one sample."""
        low, high = (reading.view.read(end) for end in channel_ends(self._limits.tensors[index]))
        return low, high

    def place(self, index: int, node: Node, value: torch.Tensor) -> None:
        """Let a tensor's value at a node be this one, which is known to be the same."""
        self._hold(index).placed[node] = value

    def peak(self, index: int) -> float:
        """Greatest magnitude, NaN where there is one."""
        held = self._hold(index)
        if held.peak is None:
            # numpy looks twice in less time than torch once.
            value = self.read(index).numpy()
            held.peak = max(-float(value.min()), float(value.max()))
        return held.peak

    def keep_peak(self, index: int, peak: float) -> None:
        """Let a tensor's greatest magnitude be this one, which was seen while summing up."""
        self._hold(index).peak = peak

    def drop(self, index: int) -> None:
        """Let go of a tensor that is not asked for any more."""
        self._held.pop(index, None)
        self.met.pop(index, None)


def plainly_strided(value: torch.Tensor) -> torch.Tensor:
    """
    Images with channels last in memory, told so by their strides.

    Of a batch of one its own stride says nothing, and may be anything; torch's layers look at it,
    and give their results in another layout than they would.
    """
    if value.ndim != 4 or not in_channels_last(value):
        return value
    _, channels, height, width = value.shape
    row = width * channels
    return value.as_strided(value.shape, (height * row, 1, row, channels))


def _dequantized(stored: torch.Tensor, codes: Codes, *, double: bool = False) -> torch.Tensor:
    # By numpy, which takes half as long to be called.
    array, dtype = stored.numpy(), np.float64 if double else np.float32
    if array.size <= _PIECE:
        real: npt.NDArray[Any] = array.astype(dtype)
        real -= codes.zero_point
        real *= codes.scale
        return torch.from_numpy(np.asarray(real))
    real = np.empty_like(array, dtype)
    order = sorted(range(real.ndim), key=lambda axis: -real.strides[axis])
    into, given = (each.transpose(order).reshape(-1) for each in (real, array))
    for start in range(0, real.size, _PIECE):
        piece = into[start : start + _PIECE]
        np.copyto(piece, given[start : start + _PIECE])
        piece -= codes.zero_point
        piece *= codes.scale
    return torch.from_numpy(real)
