"""
Run a model of one op, and print the machine and the releases of Python, numpy and ai-edge-litert.

A script for the Python of an emulated root: an import alone does not start LiteRT's kernels, which
look for the cores of the CPU first.
"""

from __future__ import annotations

import importlib.metadata
import platform

import flatbuffers  # type: ignore[import-untyped] # ships no types
import numpy as np
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter

model, graph, op, code = (
    schema.ModelT(),
    schema.SubGraphT(),
    schema.OperatorT(),
    schema.OperatorCodeT(),
)
for name in ("x", "y"):
    tensor = schema.TensorT()
    tensor.name, tensor.shape = name, [1]
    graph.tensors = [*(graph.tensors or ()), tensor]
code.builtinCode = schema.BuiltinOperator.NEG
op.inputs, op.outputs = [0], [1]
graph.inputs, graph.outputs, graph.operators = [0], [1], [op]
model.version, model.operatorCodes, model.subgraphs = 3, [code], [graph]
model.buffers = [schema.BufferT()]
builder = flatbuffers.Builder()
builder.Finish(model.Pack(builder), b"TFL3")

interpreter = Interpreter(model_content=bytes(builder.Output()))
interpreter.allocate_tensors()
interpreter.set_tensor(0, np.array([3], np.float32))
interpreter.invoke()
result = interpreter.get_tensor(1).tolist()
if result != [-3.0]:
    raise SystemExit(f"NEG of 3: expected -3, got {result}")
releases = [importlib.metadata.version(each) for each in ("numpy", "ai-edge-litert")]
print(platform.machine(), platform.python_version(), *releases)
