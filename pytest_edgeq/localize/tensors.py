"""The file's tensors of one run, as torch holds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from pytest_edgeq.localize.match import Reading, code_limits
from pytest_edgeq.localize.sums import Codes, Sums, in_channels_last
from pytest_edgeq.localize.views import View
from pytest_edgeq.tflite.graph import Tensor

if TYPE_CHECKING:
    from pytest_edgeq.tflite.runtimes import Runner

__all__ = ["Limits", "Met", "Tensors", "plainly_strided"]

Node = torch.fx.Node


class Limits(dict[int, "Codes | None"]):
    """
    What the codes of a subgraph's tensors stand for, by index; None of what has not one scale.

    Args:
        tensors: Of the subgraph.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def __missing__(self, index: int) -> Codes | None:
        """Look it up once."""
        limits = code_limits(self._tensors[index])
        self[index] = None if limits is None else Codes(*limits)
        return self[index]


@dataclass(slots=True, eq=False)
class Met:
    """
    What is known of a tensor of the file that was measured.

    Attributes:
        view: How it was read.
        whole: What the float model gives for it.
        sums: Beside that, as soon as they are known.
    """

    view: View
    whole: torch.Tensor
    sums: Sums = field(default_factory=Sums)


class Tensors:
    """
    The file's tensors of one run, each read once and held until it is dropped.

    Args:
        runner: Has run.
        limits: What codes stand for.

    Attributes:
        met: By tensor, what was measured of it.
    """

    def __init__(self, runner: Runner, limits: Limits) -> None:
        self._runner = runner
        self._limits = limits
        self._known: dict[int, dict[tuple[bool, bool], torch.Tensor]] = {}
        self._placed: dict[int, dict[Node, torch.Tensor]] = {}
        self._peaks: dict[int, float] = {}
        self.met: dict[int, Met] = {}

    def read(self, index: int, *, codes: bool = False, double: bool = False) -> torch.Tensor:
        """
        A tensor of the file as torch holds it.

        Args:
            index: In the subgraph.
            codes: As stored, else dequantized.
            double: Dequantized in float64.
        """
        limits = self._limits[index]
        known = self._known.setdefault(index, {})
        key = (codes or limits is None, double)
        if key not in known:
            if codes or limits is None:
                value = torch.from_numpy(np.asarray(self._runner.tensor(index)))
                known[key] = value.double() if double and value.is_floating_point() else value
            else:
                stored = self.read(index, codes=True)
                known[key] = _dequantized(stored, limits, double=double)
        return known[key]

    def at(self, index: int, reading: Reading, *, last: bool = False) -> torch.Tensor:
        """
        A tensor of the file, dequantized, as the value of a node.

        Args:
            index: In the subgraph.
            reading: Of one of its nodes.
            last: Rather with channels last in memory. Codes are turned to it sooner than floats.
        """
        placed = self._placed.setdefault(index, {})
        if reading.node not in placed:
            limits = self._limits[index]
            if limits is None or (False, False) in self._known.get(index, ()):
                value = reading.view.read(self.read(index))
            else:
                codes = reading.view.read(self.read(index, codes=True))
                if last and codes.ndim == 4:
                    codes = codes.contiguous(memory_format=torch.channels_last)
                value = _dequantized(codes, limits)
            placed[reading.node] = plainly_strided(value)
        return placed[reading.node]

    def place(self, index: int, node: Node, value: torch.Tensor) -> None:
        """Let a tensor's value at a node be this one, which is known to be the same."""
        self._placed.setdefault(index, {})[node] = value

    def peak(self, index: int) -> float:
        """Greatest magnitude, NaN where there is one."""
        if index not in self._peaks:
            least, greatest = torch.aminmax(self.read(index))
            self._peaks[index] = max(-float(least), float(greatest))
        return self._peaks[index]

    def drop(self, index: int) -> None:
        """Let go of a tensor that is not asked for any more."""
        for held in (self._known, self._placed, self._peaks, self.met):
            held.pop(index, None)


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
    real: npt.NDArray[Any] = stored.numpy().astype(np.float64 if double else np.float32)
    real -= codes.zero_point
    real *= codes.scale
    return torch.from_numpy(np.asarray(real))
