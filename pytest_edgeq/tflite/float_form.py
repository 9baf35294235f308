"""
Write a quantized `.tflite` file in float: the same ops, without quantized activations.

QUANTIZE and DEQUANTIZE ops go, constants are dequantized, all else stays as it is. What is left
rounds its weights as the file does, and its activations not at all.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.tflite.constants import dequantized
from pytest_edgeq.tflite.flatbuffer import aligned_buffer
from pytest_edgeq.tflite.graph import Op, OpGraph, Subgraph, Tensor
from pytest_edgeq.tflite.roles import roles_of

__all__ = ["CASTS", "FloatForm", "write_in_float"]

# A user's test shows the user's line and the message, not how we came to it.
__tracebackhide__ = True

CASTS = frozenset({"QUANTIZE", "DEQUANTIZE"})
"""Ops that change how a value is held, and not what it is."""

_BIAS_DTYPES = ("int32", "int64")


@dataclass(frozen=True, slots=True, eq=False)
class FloatForm:
    """
    A file in float.

    A tensor that both hold has one index in both.

    Attributes:
        content: The file.
        ops: By subgraph, for each op the index that it has in the quantized file; None of one that
            was added.
        held: By subgraph, for each tensor of the quantized file that a QUANTIZE or DEQUANTIZE
            gives, the tensor whose value it holds.
    """

    content: bytes
    ops: tuple[tuple[int | None, ...], ...]
    held: tuple[Mapping[int, int], ...]


def write_in_float(
    graph: OpGraph, constants: Mapping[tuple[int, int], npt.NDArray[Any]] | None = None
) -> FloatForm:
    """
    Write a file in float.

    A QUANTIZE of what depends on no input stays, with a DEQUANTIZE behind it: the converter folds
    most of these, so that their rounding is part of the constant.

    Args:
        graph: The file.
        constants: By index of the subgraph and of the tensor, floats to write in place of what a
            quantized constant stands for, of its shape.

    Raises:
        ValueError: A constant whose values cannot be read: a sparse one, one in a file of its own.
    """
    return _Writer(graph, constants or {}).write()


@dataclass(slots=True, eq=False)
class _Writer:
    graph: OpGraph
    constants: Mapping[tuple[int, int], npt.NDArray[Any]]
    model: Any = field(init=False)
    _opcode: int | None = field(init=False, default=None)

    def write(self) -> FloatForm:
        import flatbuffers  # type: ignore[import-untyped] # ships no types
        from ai_edge_litert import schema_py_generated as schema

        whole = schema.Model.GetRootAs(self.graph.buffer, 0)
        self.model = schema.ModelT.InitFromObj(whole)
        self.model.metadata, self.model.metadataBuffer = None, None
        self.model.buffers = [schema.BufferT()]
        written = [self._write(subgraph) for subgraph in self.graph.subgraphs]
        for signature in self.model.signatureDefs or ():
            held = written[signature.subgraphIndex][1]
            for entry in signature.outputs or ():
                entry.tensorIndex = held.get(entry.tensorIndex, entry.tensorIndex)
        builder = flatbuffers.Builder(1024)
        builder.Finish(self.model.Pack(builder), b"TFL3")
        ops, held_by_subgraph = zip(*written, strict=True)
        return FloatForm(bytes(builder.Output()), ops, held_by_subgraph)

    def _write(self, subgraph: Subgraph) -> tuple[tuple[int | None, ...], dict[int, int]]:
        raw = self.model.subgraphs[subgraph.index]
        live = _live(subgraph)
        held: dict[int, int] = {}
        operators: list[Any] = []
        ops: list[int | None] = []
        # A QUANTIZE that stays gives a tensor of its own, which keeps its dtype.
        for op in subgraph.ops:
            operator = raw.operators[op.index]
            operator.inputs = [held.get(index, index) for index in op.inputs]
            operator.debugMetadataIndex = -1
            if not _is_cast(subgraph, op):
                operators.append(operator)
                ops.append(op.index)
            elif op.name == "QUANTIZE" and op.inputs[0] not in live:
                made = op.outputs[0]
                raw.tensors.append(copy.copy(raw.tensors[made]))
                operator.outputs = [len(raw.tensors) - 1]
                operators += [operator, self._dequantize(operator.outputs[0], made)]
                ops += [op.index, None]
            else:
                source = op.inputs[0]
                held[op.outputs[0]] = held.get(source, source)
        for tensor in subgraph.tensors:
            self._write_tensor(subgraph, tensor, raw.tensors[tensor.index])
        for record in raw.tensors[len(subgraph.tensors) :]:
            record.buffer = 0
        raw.operators = operators
        raw.outputs = [held.get(index, index) for index in subgraph.outputs]
        return tuple(ops), held

    def _write_tensor(self, subgraph: Subgraph, tensor: Tensor, record: Any) -> None:
        from ai_edge_litert import schema_py_generated as schema

        values = None
        if tensor.is_constant:
            values = self._floats(subgraph, tensor)
            content = np.asarray(self.graph.constant(tensor)) if values is None else values
            self.model.buffers.append(aligned_buffer(content))
            record.buffer = len(self.model.buffers) - 1
        else:
            record.buffer = 0
        if values is not None or tensor.is_quantized:
            record.type, record.quantization = schema.TensorType.FLOAT32, None

    def _floats(self, subgraph: Subgraph, tensor: Tensor) -> npt.NDArray[np.float32] | None:
        """Dequantize a constant; return None if it is not quantized."""
        given = self.constants.get((subgraph.index, tensor.index))
        if given is not None:
            return np.ascontiguousarray(given, np.float32)
        scales = _bias_scales(self.graph, subgraph, tensor)
        if scales is not None:
            codes = self.graph.constant(tensor).view(np.dtype(tensor.dtype))
            return (codes * scales).astype(np.float32)
        if not tensor.is_quantized:
            return None
        return dequantized(self.graph, subgraph.index, tensor).astype(np.float32)

    def _dequantize(self, source: int, result: int) -> Any:
        from ai_edge_litert import schema_py_generated as schema

        operator = schema.OperatorT()
        operator.opcodeIndex = self._dequantize_code()
        operator.inputs, operator.outputs = [source], [result]
        return operator

    def _dequantize_code(self) -> int:
        if self._opcode is None:
            from ai_edge_litert import schema_py_generated as schema

            code = schema.OperatorCodeT()
            code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.DEQUANTIZE
            code.version = 2
            self.model.operatorCodes.append(code)
            self._opcode = len(self.model.operatorCodes) - 1
        return self._opcode


def _is_cast(subgraph: Subgraph, op: Op) -> bool:
    """Whether an op only changes in which codes a value is held; float16 is none."""
    if op.name not in CASTS:
        return False
    return any(subgraph.tensors[index].is_quantized for index in (op.inputs[0], op.outputs[0]))


def _live(subgraph: Subgraph) -> set[int]:
    """Return the tensors that depend on an input or on a state."""
    live = {index for index in subgraph.inputs if not subgraph.tensors[index].is_constant}
    live |= {tensor.index for tensor in subgraph.tensors if tensor.is_variable}
    for op in subgraph.ops:
        if not op.inputs or any(index in live for index in op.inputs):
            live.update(op.outputs)
    return live


def _bias_scales(
    graph: OpGraph, subgraph: Subgraph, tensor: Tensor
) -> npt.NDArray[np.float64] | None:
    """
    Return the scale of each code of a quantized bias; None of what is none.

    Kernels add the codes to sums of input × weight: the scale that is stored with them is not read.
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
