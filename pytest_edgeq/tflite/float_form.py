"""
Write a quantized `.tflite` file in float: the same ops, without quantized activations.

QUANTIZE and DEQUANTIZE ops are removed, constants are dequantized, also those in float16.
Weights keep the values to which the file rounds them; activations are not rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.numerics.arrays import contiguous
from pytest_edgeq.tflite.constants import dequantized
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.ops import QDQ
from pytest_edgeq.tflite.roles import roles_of
from pytest_edgeq.tflite.subgraph import Op, Subgraph, Tensor
from pytest_edgeq.tflite.writing import add_buffer, packed, unpacked

_BIAS_DTYPES = ("int32", "int64")


def write_in_float(
    graph: OpGraph, constants: Mapping[tuple[int, int], npt.NDArray[Any]] | None = None
) -> bytes:
    """
    Write a file in float; each tensor keeps its index.

    Raises:
        UnreadableError: A constant whose values cannot be read, such as one in a file of its own.
    """
    from ai_edge_litert import schema_py_generated as schema

    model = unpacked(graph)
    model.metadata, model.metadataBuffer = None, None
    model.buffers = [schema.BufferT()]
    sources = [_without_casts(graph, model, subgraph) for subgraph in graph.subgraphs]
    for subgraph in graph.subgraphs:
        for tensor in subgraph.tensors:
            floats = _floats(graph, subgraph, tensor, constants or {})
            _write_tensor(graph, model, subgraph, tensor, floats)
    for signature in model.signatureDefs or ():
        known = sources[signature.subgraphIndex]
        for entry in signature.outputs or ():
            entry.tensorIndex = known.get(entry.tensorIndex, entry.tensorIndex)
    return packed(model)


def _without_casts(graph: OpGraph, model: Any, subgraph: Subgraph) -> dict[int, int]:
    """Remove the casts of a subgraph; return the input of each, by its output."""
    raw = model.subgraphs[subgraph.index]
    sources: dict[int, int] = {}
    operators: list[Any] = []
    for op in subgraph.ops:
        operator = raw.operators[op.index]
        operator.inputs = [sources.get(index, index) for index in op.inputs]
        operator.debugMetadataIndex = -1
        if not is_cast(graph, op):
            operators.append(operator)
        else:
            source = op.inputs[0]
            sources[op.outputs[0]] = sources.get(source, source)
    raw.operators = operators
    raw.outputs = [sources.get(index, index) for index in subgraph.outputs]
    return sources


def _write_tensor(
    graph: OpGraph,
    model: Any,
    subgraph: Subgraph,
    tensor: Tensor,
    floats: npt.NDArray[np.float32] | None,
) -> None:
    from ai_edge_litert import schema_py_generated as schema

    record = model.subgraphs[subgraph.index].tensors[tensor.index]
    record.buffer = 0
    if tensor.is_constant:
        content = np.asarray(graph.constant(tensor)) if floats is None else floats
        record.buffer = add_buffer(model, content)
        record.sparsity = None
    if floats is not None or tensor.is_quantized:
        record.type, record.quantization = schema.TensorType.FLOAT32, None


def _floats(
    graph: OpGraph,
    subgraph: Subgraph,
    tensor: Tensor,
    constants: Mapping[tuple[int, int], npt.NDArray[Any]],
) -> npt.NDArray[np.float32] | None:
    """Dequantize a constant; return None for other tensors, and if it is not quantized."""
    if not tensor.is_constant:
        return None
    values = constants.get((subgraph.index, tensor.index))
    if values is not None:
        return contiguous(values, np.float32)
    scales = bias_scales(graph, subgraph, tensor)
    if scales is not None:
        codes = graph.constant(tensor).view(np.dtype(tensor.dtype))
        return (codes * scales).astype(np.float32)
    if not (tensor.is_quantized or _is_half_constant(subgraph, tensor)):
        return None
    return dequantized(graph, subgraph.index, tensor).astype(np.float32)


def is_cast(graph: OpGraph, op: Op) -> bool:
    """Return whether an op only quantizes, dequantizes or widens a float16 constant."""
    if op.name not in QDQ:
        return op.name == "DENSIFY"
    subgraph = graph.subgraphs[op.subgraph]
    source, result = (subgraph.tensors[index] for index in (op.inputs[0], op.outputs[0]))
    if source.is_quantized or result.is_quantized:
        return True
    dense = subgraph.producer.get(source.index)
    if dense is not None and dense.name == "DENSIFY":
        source = subgraph.tensors[dense.inputs[0]]
    return _is_half_constant(subgraph, source)


def _is_half_constant(subgraph: Subgraph, tensor: Tensor) -> bool:
    """Return whether a float16 constant is only widened."""
    if not tensor.is_constant or tensor.dtype != "float16":
        return False
    readers = subgraph.consumers[tensor.index]
    further = [
        o for op in readers if op.name == "DENSIFY" for o in subgraph.consumers[op.outputs[0]]
    ]
    return all(op.name in ("DEQUANTIZE", "DENSIFY") for op in (*readers, *further))


def bias_scales(
    graph: OpGraph, subgraph: Subgraph, tensor: Tensor
) -> npt.NDArray[np.float64] | None:
    """
    Return the scale of each code of a quantized bias; None for other tensors.

    Kernels add the codes to sums of input × weight: they do not read the stored scale of the bias.
    """
    if tensor.dtype not in _BIAS_DTYPES:
        return None
    for op in subgraph.consumers[tensor.index]:
        roles = roles_of(graph, op)
        if len(roles.weights) != 1 or not any(b.operand is tensor for b in roles.biases):
            continue
        weight, inputs = roles.weights[0].tensor, roles.inputs
        if not inputs or len(inputs[0].scales) != 1 or not len(weight.scales):
            continue
        return weight.scales.astype(np.float64) * float(inputs[0].scales[0])
    return None
