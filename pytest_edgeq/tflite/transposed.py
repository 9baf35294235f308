"""Write a copy of a `.tflite` file in which a tensor's axes are permuted."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np

from pytest_edgeq.tflite.flatbuffer import aligned_buffer
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.model_objects import packed, unpacked
from pytest_edgeq.tflite.subgraph import Op


def write_transposed(file: OpGraph, op: Op, order: Sequence[int]) -> bytes:
    """Write a file with a TRANSPOSE between an op's output and its consumers."""
    from ai_edge_litert import schema_py_generated as schema

    model = unpacked(file)
    subgraph = model.subgraphs[op.subgraph]
    code, axes, transpose = schema.OperatorCodeT(), schema.TensorT(), schema.OperatorT()
    code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.TRANSPOSE
    code.version = 1
    model.operatorCodes.append(code)
    model.buffers.append(aligned_buffer(np.array(order, np.int32).view(np.uint8)))
    axes.name, axes.type, axes.shape = "order", schema.TensorType.INT32, [len(order)]
    axes.buffer = len(model.buffers) - 1
    source = op.outputs[0]
    result = copy.copy(subgraph.tensors[source])
    result.name = "transposed"
    subgraph.tensors += [axes, result]
    count = len(subgraph.tensors)
    transpose.opcodeIndex = len(model.operatorCodes) - 1
    transpose.inputs, transpose.outputs = [source, count - 2], [count - 1]
    transpose.builtinOptionsType = schema.BuiltinOptions.TransposeOptions
    transpose.builtinOptions = schema.TransposeOptionsT()
    for reader in subgraph.operators[op.index + 1 :]:
        reader.inputs = [count - 1 if each == source else int(each) for each in reader.inputs]
    subgraph.operators.insert(op.index + 1, transpose)
    return packed(model)
