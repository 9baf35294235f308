"""An op with its tensors."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_edgeq.tflite.boundary import code_range, qparams
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.subgraph import Op, Tensor

#: Half a unit in the last place of float32, relative: the error of one float32 operation.
ULP = 2.0**-24

_CODES = ("int8", "uint8", "int16")


@dataclass(frozen=True, slots=True)
class Site:
    """An op whose output has one scale."""

    graph: OpGraph
    op: Op
    output: Tensor
    scale: float
    reach: float  # greatest distance of the output codes from the zero point, in LSB

    @property
    def operands(self) -> list[Tensor]:
        """The operands that were not left out."""
        return [self.graph.tensor(self.op, index) for index in self.op.inputs if index >= 0]

    def input(self, position: int) -> Tensor:
        """Return a required operand by position."""
        return self.graph.tensor(self.op, self.op.inputs[position])


def site_of(graph: OpGraph, op: Op, output: int) -> Site | None:
    """Return an op's output as a site; None without one scale and such codes."""
    tensor = graph.tensor(op, op.outputs[output])
    if tensor.dtype not in _CODES or len(tensor.scales) != 1:
        return None
    return Site(graph, op, tensor, float(tensor.scales[0]), reach_of(tensor))


def scale_of(tensor: Tensor) -> float | None:
    """Return the scale of a tensor quantized per tensor, else None."""
    found = qparams(tensor)
    return None if found is None else found[0]


def reach_of(tensor: Tensor) -> float:
    """Return the greatest distance of a tensor's codes from the zero point."""
    low, high = code_range(tensor.dtype)
    zero_points = tensor.zero_points if len(tensor.zero_points) else [0]
    return float(max(max(high - zero, zero - low) for zero in zero_points))


def magnitude(site: Site) -> float:
    """Return the summed ranges of the op's activations, in LSB of the output."""
    reaches = [
        reach_of(tensor) * scale / site.scale
        for tensor in site.operands
        if tensor.dtype in _CODES and (scale := scale_of(tensor)) is not None
    ]
    return site.reach + sum(reaches)
