"""Write copies of a `.tflite` file with ops inserted."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.tflite.flatbuffer import aligned_buffer
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.model_objects import packed, unpacked
from pytest_edgeq.tflite.subgraph import Op


def write_clamped(file: OpGraph, subgraph: int, ranges: Mapping[int, tuple[float, float]]) -> bytes:
    """Write a file that clamps the outputs of some ops by MINIMUM and MAXIMUM."""
    model = unpacked(file)
    graph = model.subgraphs[subgraph]
    minimum, maximum = (_add_code(model, name) for name in ("MINIMUM", "MAXIMUM"))
    operators = []
    for op in graph.operators:
        operators.append(op)
        outputs = [int(index) for index in op.outputs]
        for place, index in enumerate(outputs):
            if index not in ranges:
                continue
            whole, below = (_add_tensor(graph, copy.copy(graph.tensors[index])) for _ in range(2))
            outputs[place] = whole
            results = (minimum, whole, below), (maximum, below, index)
            for end, (code, source, result) in zip(reversed(ranges[index]), results, strict=True):
                limit = _add_constant(model, graph, np.array(end, np.float32), "FLOAT32")
                operators.append(_op(code, "MaximumMinimum", [source, limit], result))
        op.outputs = np.array(outputs, np.int32)
    graph.operators = operators
    return packed(model)


def write_transposed(file: OpGraph, op: Op, order: Sequence[int]) -> bytes:
    """Write a file with a TRANSPOSE between an op's output and its consumers."""
    model = unpacked(file)
    graph = model.subgraphs[op.subgraph]
    source = op.outputs[0]
    axes = _add_constant(model, graph, np.array(order, np.int32), "INT32")
    result = _add_tensor(graph, copy.copy(graph.tensors[source]))
    transpose = _op(_add_code(model, "TRANSPOSE"), "Transpose", [source, axes], result)
    for reader in graph.operators[op.index + 1 :]:
        reader.inputs = [result if each == source else int(each) for each in reader.inputs]
    graph.operators.insert(op.index + 1, transpose)
    return packed(model)


def _add_code(model: Any, name: str) -> int:
    from ai_edge_litert import schema_py_generated as schema

    code = getattr(schema.BuiltinOperator, name)
    added = schema.OperatorCodeT(deprecatedBuiltinCode=code, builtinCode=code, version=1)
    model.operatorCodes.append(added)
    return len(model.operatorCodes) - 1


def _add_tensor(graph: Any, tensor: Any) -> int:
    graph.tensors.append(tensor)
    return len(graph.tensors) - 1


def _add_constant(model: Any, graph: Any, values: npt.NDArray[Any], dtype: str) -> int:
    from ai_edge_litert import schema_py_generated as schema

    model.buffers.append(aligned_buffer(values))
    kind, buffer = getattr(schema.TensorType, dtype), len(model.buffers) - 1
    shape = np.array(values.shape, np.int32)
    return _add_tensor(graph, schema.TensorT(shape, kind, buffer, "inserted"))


def _op(code: int, options: str, inputs: list[int], output: int) -> Any:
    from ai_edge_litert import schema_py_generated as schema

    return schema.OperatorT(
        opcodeIndex=code,
        inputs=np.array(inputs, np.int32),
        outputs=np.array([output], np.int32),
        builtinOptionsType=getattr(schema.BuiltinOptions, f"{options}Options"),
        builtinOptions=getattr(schema, f"{options}OptionsT")(),
    )
