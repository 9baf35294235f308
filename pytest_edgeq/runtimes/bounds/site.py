"""An op with its tensors and its options at hand."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from pytest_edgeq.tflite.boundary import code_range
from pytest_edgeq.tflite.flatbuffer import enum_names
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.subgraph import Op, Tensor

#: Half a unit in the last place of float32, relative: what one float32 operation may be off.
ULP = 2.0**-24

_CODES = ("int8", "uint8", "int16")


@dataclass(frozen=True, slots=True)
class Site:
    """
    An op whose output has one scale.

    Attributes:
        graph: The file.
        op: The op.
        output: The output in question.
        scale: Of the output.
        zero_point: Of the output.
        reach: How many LSB the output's codes reach from the zero point at most.
    """

    graph: OpGraph
    op: Op
    output: Tensor
    scale: float
    zero_point: int
    reach: float

    def input(self, position: int) -> Tensor | None:
        """The input in this place, None where it was left out."""
        if position >= len(self.op.inputs) or self.op.inputs[position] < 0:
            return None
        return self.graph.tensor(self.op, self.op.inputs[position])


def site_of(graph: OpGraph, op: Op, output: int) -> Site | None:
    """The op and this output of it; None for one without a scale and codes of 8 or 16 bits."""
    tensor = graph.tensor(op, op.outputs[output])
    if tensor.dtype not in _CODES or len(tensor.scales) != 1:
        return None
    low, high = code_range(tensor.dtype)
    zero_point = int(tensor.zero_points[0])
    reach = max(high - zero_point, zero_point - low)
    return Site(graph, op, tensor, float(tensor.scales[0]), zero_point, float(reach))


def option(graph: OpGraph, op: Op, name: str) -> Any:
    """
    A field of the op's options by its name in the schema's reader, `AsymmetricQuantizeInputs`.

    None where the file gives the op no options.

    Raises:
        AttributeError: The op's options have no such field.
    """
    from ai_edge_litert import schema_py_generated as schema

    model = schema.Model.GetRootAs(graph.buffer, 0)
    operator = model.Subgraphs(op.subgraph).Operators(op.index)
    table = operator.BuiltinOptions()
    if table is None:
        return None
    reader = getattr(schema, enum_names("BuiltinOptions")[operator.BuiltinOptionsType()])()
    reader.Init(table.Bytes, table.Pos)
    return getattr(reader, name)()


def elements(tensor: Tensor) -> int:
    """How many values the tensor holds."""
    return math.prod(tensor.shape)


def scale_of(tensor: Tensor | None) -> float | None:
    """The one scale of a quantized tensor, else None."""
    return float(tensor.scales[0]) if tensor is not None and len(tensor.scales) == 1 else None


def reach_of(tensor: Tensor) -> float:
    """How far the tensor's codes reach from their zero point at most; its own bits for int4."""
    low, high = code_range(tensor.dtype)
    zero_points = tensor.zero_points if len(tensor.zero_points) else [0]
    return float(max(max(high - zero, zero - low) for zero in zero_points))


def magnitude(site: Site) -> float:
    """How far the op's activations reach together, its output too, in LSB of the output."""
    taken = [site.input(position) for position in range(len(site.op.inputs))]
    reaches = [
        reach_of(tensor) * scale / site.scale
        for tensor in taken
        if tensor is not None and tensor.dtype in _CODES and (scale := scale_of(tensor)) is not None
    ]
    return site.reach + sum(reaches)
