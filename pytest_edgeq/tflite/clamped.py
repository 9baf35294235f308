"""Write a copy of a float `.tflite` file with tensors clamped to ranges."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np

from pytest_edgeq.tflite.flatbuffer import aligned_buffer
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.model_objects import packed, unpacked


def write_clamped(file: OpGraph, subgraph: int, ranges: Mapping[int, tuple[float, float]]) -> bytes:
    """Write a file that clamps the outputs of some ops by MINIMUM and MAXIMUM."""
    from ai_edge_litert import schema_py_generated as schema

    model = unpacked(file)
    graph = model.subgraphs[subgraph]
    codes = {}
    for name in ("MINIMUM", "MAXIMUM"):
        code = schema.OperatorCodeT()
        code.builtinCode = code.deprecatedBuiltinCode = getattr(schema.BuiltinOperator, name)
        code.version = 1
        model.operatorCodes.append(code)
        codes[name] = len(model.operatorCodes) - 1

    def added(like: Any) -> int:
        graph.tensors.append(like)
        return len(graph.tensors) - 1

    def constant(value: float) -> int:
        tensor = schema.TensorT()
        tensor.type, tensor.shape, tensor.name = (
            schema.TensorType.FLOAT32,
            np.zeros(0, np.int32),
            "end",
        )
        model.buffers.append(aligned_buffer(np.array(value, np.float32)))
        tensor.buffer = len(model.buffers) - 1
        return added(tensor)

    def clamp(name: str, source: int, end: float, result: int) -> Any:
        op = schema.OperatorT()
        op.opcodeIndex = codes[name]
        op.inputs = np.array([source, constant(end)], np.int32)
        op.outputs = np.array([result], np.int32)
        op.builtinOptionsType = schema.BuiltinOptions.MaximumMinimumOptions
        op.builtinOptions = schema.MaximumMinimumOptionsT()
        return op

    operators = []
    for op in graph.operators:
        operators.append(op)
        outputs = [int(index) for index in op.outputs]
        for place, index in enumerate(outputs):
            if index not in ranges:
                continue
            low, high = ranges[index]
            whole, below = (added(copy.copy(graph.tensors[index])) for _ in range(2))
            outputs[place] = whole
            operators += [
                clamp("MINIMUM", whole, high, below),
                clamp("MAXIMUM", below, low, index),
            ]
        op.outputs = np.array(outputs, np.int32)
    graph.operators = operators
    return packed(model)
