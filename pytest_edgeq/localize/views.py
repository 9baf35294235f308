"""How a tensor of the file reads as the value of a torch node: the same elements, laid out anew."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

__all__ = ["View", "best_view", "distance"]

# Elements that a layout is told by.
_PROBE = 1 << 15


@dataclass(frozen=True, slots=True)
class View:
    """
    From the file's layout to a node's.

    Attributes:
        axes: The file's axes in the node's order; None for the order in memory.
        shape: The node's.
    """

    axes: tuple[int, ...] | None
    shape: tuple[int, ...]

    def read(self, value: torch.Tensor) -> torch.Tensor:
        """A tensor of the file in the node's layout."""
        turned = value if self.axes is None else value.permute(self.axes)
        return turned.reshape(self.shape)

    def read_together(self, values: torch.Tensor) -> torch.Tensor:
        """Tensors of several samples, along an axis of their own, as a row in the node's layout."""
        turned = values
        if self.axes is not None:
            turned = values.permute(0, *(axis + 1 for axis in self.axes))
        first, *rest = self.shape or (1,)
        return turned.reshape(len(values) * first, *rest)


def best_view(
    file: torch.Tensor, value: torch.Tensor, preferred: Sequence[View] = ()
) -> tuple[float, View] | None:
    """
    The layout in which a tensor of the file is nearest to a node's value.

    Args:
        file: The file's tensor, as floats.
        value: The node's value, clipped to what the file's tensor can hold.
        preferred: Taken first where several are as near.

    Returns:
        The root mean square of the difference, and the layout; None where the sizes differ.
    """
    if file.numel() != value.numel():
        return None
    best: tuple[float, View] | None = None
    for view in (*preferred, *views(tuple(file.shape), tuple(value.shape))):
        if view.shape != tuple(value.shape):
            continue
        found = distance(view.read(file), value)
        if best is None or found < best[0]:
            best = (found, view)
        if found == 0:
            break
    return best


def views(file: tuple[int, ...], node: tuple[int, ...]) -> Iterator[View]:
    """Every layout that turns one shape into the other by turning axes longer than 1."""
    yield View(None, node)
    long = [axis for axis, size in enumerate(file) if size != 1]
    ones = [axis for axis, size in enumerate(file) if size == 1]
    wanted = [size for size in node if size != 1]
    if sorted(file[axis] for axis in long) != sorted(wanted):
        return
    for axes in itertools.permutations(long):
        if list(axes) != long and [file[axis] for axis in axes] == wanted:
            yield View((*ones, *axes), node)


def distance(first: torch.Tensor, second: torch.Tensor) -> float:
    """Root mean square of the difference, over part of a large tensor; inf where not finite."""
    if first.numel() > _PROBE:
        step = first.numel() // _PROBE
        # Rows of the longest axis alone would miss what is exchanged along it.
        index = torch.arange(0, first.numel(), step | 1)
        first, second = first.reshape(-1)[index], second.reshape(-1)[index]
    difference = (first.double() - second.double()).square().mean().sqrt()
    return float(difference) if torch.isfinite(difference) else float("inf")
