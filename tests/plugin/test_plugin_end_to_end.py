from __future__ import annotations

from pathlib import Path
from typing import Any

import flatbuffers  # type: ignore[import-untyped]
import pytest
from ai_edge_litert import schema_py_generated as schema

from tests.plugin.conftest import Run


def add_model(dtype: str, path: Path) -> None:
    """Write a `.tflite` of one ADD of its input to itself, in int8 or float32."""
    tensors = []
    for name in ("x", "y"):
        tensor = schema.TensorT()
        tensor.name, tensor.shape, tensor.buffer = name, [1, 4], 0
        tensor.type = schema.TensorType.INT8 if dtype == "int8" else schema.TensorType.FLOAT32
        if dtype == "int8":
            tensor.quantization = schema.QuantizationParametersT()
            tensor.quantization.scale, tensor.quantization.zeroPoint = [0.5], [0]
        tensors.append(tensor)
    operator = schema.OperatorT()
    operator.opcodeIndex, operator.inputs, operator.outputs = 0, [0, 0], [1]
    operator.builtinOptionsType = schema.BuiltinOptions.AddOptions
    operator.builtinOptions = schema.AddOptionsT()
    graph = schema.SubGraphT()
    graph.tensors, graph.operators, graph.inputs, graph.outputs = tensors, [operator], [0], [1]
    code = schema.OperatorCodeT()
    code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.ADD
    code.version = 2 if dtype == "int8" else 1
    model = schema.ModelT()
    model.version, model.subgraphs, model.operatorCodes = 3, [graph], [code]
    model.buffers, model.signatureDefs = [schema.BufferT()], [_signature()]
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), file_identifier=b"TFL3")
    path.write_bytes(bytes(builder.Output()))


def _signature() -> Any:
    maps = []
    for name, index in (("args_0", 0), ("output_0", 1)):
        tensor_map = schema.TensorMapT()
        tensor_map.name, tensor_map.tensorIndex = name, index
        maps.append(tensor_map)
    signature = schema.SignatureDefT()
    signature.signatureKey, signature.subgraphIndex = "serving_default", 0
    signature.inputs, signature.outputs = maps[:1], maps[1:]
    return signature


def test_a_tflite_file_is_remembered(pytester: pytest.Pytester, run_here: Run) -> None:
    """The fixture, the file's own op-dtype map and the memory, all real, through a whole life."""
    add_model("int8", pytester.path / "model.tflite")
    pytester.makepyfile(
        test_x="def test_it(edgeq):\n    edgeq.check_op_dtypes(edgeq.load('model.tflite'))\n"
    )

    missing = run_here()
    missing.assert_outcomes(failed=1)
    missing.stdout.fnmatch_lines(
        ['*no baseline is stored yet: op-dtype map "op_dtypes" (1 op, 0 of them in float)']
    )
    # The user's line, and none of ours.
    missing.stdout.fnmatch_lines([">   *edgeq.check_op_dtypes(*", "test_x.py:2: AssertionError"])

    run_here("--edgeq-update=new").assert_outcomes(passed=1)
    run_here().assert_outcomes(passed=1)

    add_model("float32", pytester.path / "model.tflite")
    changed = run_here()
    changed.assert_outcomes(failed=1)
    changed.stdout.fnmatch_lines(
        [
            "E * AssertionError: ADD #0 went from int8 to float32; input 'args_0' went from int8 *",
            "FAILED test_x.py::test_it - AssertionError: ADD #0 went from int8 to float32*",
        ]
    )
