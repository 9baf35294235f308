"""A `.tflite` file taken apart, for defects to be written into it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from ai_edge_litert import schema_py_generated as schema

from fixtures.tflite.writer import pack, unpack

Array = npt.NDArray[Any]

_NUMPY = {
    schema.TensorType.FLOAT32: np.float32,
    schema.TensorType.INT8: np.int8,
    schema.TensorType.INT16: np.int16,
    schema.TensorType.INT32: np.int32,
    schema.TensorType.INT64: np.int64,
}
_OPERATORS = {code: name for name, code in vars(schema.BuiltinOperator).items() if name[0] != "_"}
_WITH_WEIGHTS = ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED")
QUANTIZED = (schema.TensorType.INT8, schema.TensorType.INT16)


class Stored(NamedTuple):
    """A constant of an op: who reads it, and where it stands (behind a DEQUANTIZE or not)."""

    ops: frozenset[int]
    tensor: int
    kind: str


class FlatFile:
    """The objects of a file with one subgraph; `content()` puts it together again."""

    def __init__(self, content: bytes) -> None:
        self.model = unpack(content)
        for buffer in self.model.buffers:
            # 0 and 1 stand for none there (schema.fbs).
            if buffer.offset > 1:
                end = buffer.offset + buffer.size
                buffer.data = np.frombuffer(content[buffer.offset : end], np.uint8)
                buffer.offset = buffer.size = 0
        (self.graph,) = self.model.subgraphs
        self.origins: list[int | None] = list(range(len(self.graph.operators)))

    def content(self) -> bytes:
        """Give the file's bytes."""
        return pack(self.model)

    @property
    def operators(self) -> list[Any]:
        """Operators in execution order."""
        found: list[Any] = self.graph.operators
        return found

    def name(self, op: int) -> str:
        """Name of an operator."""
        code = self.model.operatorCodes[self.operators[op].opcodeIndex]
        return str(_OPERATORS[max(code.builtinCode, code.deprecatedBuiltinCode)])

    def tensor(self, index: int) -> Any:
        """A tensor's object."""
        return self.graph.tensors[index]

    def producer(self, tensor: int) -> int | None:
        """The op that makes a tensor, None for inputs and constants."""
        for position, op in enumerate(self.operators):
            if tensor in op.outputs:
                return position
        return None

    def readers(self, tensor: int) -> list[int]:
        """The ops that read a tensor."""
        return [i for i, op in enumerate(self.operators) if tensor in op.inputs]

    def constant(self, tensor: int) -> Array | None:
        """A constant's values in its own shape, a copy; None where there are none."""
        record = self.tensor(tensor)
        data = self.model.buffers[record.buffer].data
        dtype = _NUMPY.get(record.type)
        if data is None or len(data) == 0 or dtype is None:
            return None
        raw = np.asarray(data, np.uint8).tobytes()
        shape = [] if record.shape is None else list(record.shape)
        return np.frombuffer(raw, dtype).reshape(shape).copy()

    def store(self, tensor: int, values: Array) -> None:
        """Write a constant's values; a buffer that others share is left as it was."""
        record = self.tensor(tensor)
        if sum(other.buffer == record.buffer for other in self.graph.tensors) > 1:
            record.buffer = len(self.model.buffers)
            self.model.buffers.append(schema.BufferT())
        raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        self.model.buffers[record.buffer].data = raw

    def constants(self, *kinds: str) -> Iterator[Stored]:
        """Weights and biases of convolutions and linear layers, each once."""
        found: dict[int, tuple[set[int], str]] = {}
        for position, op in enumerate(self.operators):
            if self.name(position) not in _WITH_WEIGHTS:
                continue
            for kind, tensor in zip(("weight", "bias"), list(op.inputs)[1:3], strict=False):
                if tensor < 0:
                    continue
                ops, at = {position}, int(tensor)
                before = self.producer(at)
                if before is not None and self.name(before) == "DEQUANTIZE":
                    ops.add(before)
                    at = int(self.operators[before].inputs[0])
                if self.constant(at) is not None:
                    known = found.setdefault(at, (set(), kind))
                    known[0].update(ops)
        for at, (ops, kind) in found.items():
            if kind in kinds:
                yield Stored(frozenset(ops), at, kind)

    def weights(self) -> list[Stored]:
        """Integer weights."""
        return [each for each in self.constants("weight") if self.is_quantized(each.tensor)]

    def biases(self) -> list[Stored]:
        """Integer biases."""
        integer = (schema.TensorType.INT32, schema.TensorType.INT64)
        return [each for each in self.constants("bias") if self.tensor(each.tensor).type in integer]

    def activations(self) -> list[int]:
        """Quantized tensors that an op makes."""
        made = [int(t) for op in self.operators for t in op.outputs]
        return [t for t in made if self.is_quantized(t)]

    def is_quantized(self, tensor: int) -> bool:
        """Whether a tensor holds codes."""
        record = self.tensor(tensor)
        return record.type in QUANTIZED and len(self.scales(tensor)) > 0

    def scales(self, tensor: int) -> list[float]:
        """A tensor's scales, none of a float one."""
        quantization = self.tensor(tensor).quantization
        if quantization is None or quantization.scale is None:
            return []
        return [float(scale) for scale in quantization.scale]

    def channel_axis(self, weight: Stored) -> int:
        """The axis of output channels."""
        if len(self.scales(weight.tensor)) > 1:
            return int(self.tensor(weight.tensor).quantization.quantizedDimension)
        names = {self.name(op) for op in weight.ops}
        return 3 if "DEPTHWISE_CONV_2D" in names else 0

    def add_tensor(self, like: int, name: str, **fields: Any) -> int:
        """Add a tensor of the shape of another, without data unless `buffer` says so."""
        record = self.tensor(like)
        fresh = schema.TensorT()
        fresh.name = name.encode()
        fresh.shape = record.shape
        fresh.shapeSignature = record.shapeSignature
        fresh.hasRank = record.hasRank
        fresh.type = record.type
        fresh.quantization = record.quantization
        fresh.buffer = 0
        for field, value in fields.items():
            setattr(fresh, field, value)
        self.graph.tensors.append(fresh)
        return len(self.graph.tensors) - 1

    def add_buffer(self, values: Array) -> int:
        """Add a buffer."""
        fresh = schema.BufferT()
        fresh.data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        self.model.buffers.append(fresh)
        return len(self.model.buffers) - 1

    def insert(self, position: int, name: str, source: int, target: int, origin: int) -> None:
        """Insert a QUANTIZE or DEQUANTIZE that belongs to an op of the original file."""
        code = schema.OperatorCodeT()
        code.builtinCode = code.deprecatedBuiltinCode = getattr(schema.BuiltinOperator, name)
        # From 2 on both take what int8 and int16 models hold; 5 is DEQUANTIZE's per-channel one.
        code.version = 2
        self.model.operatorCodes.append(code)
        op = schema.OperatorT()
        op.opcodeIndex = len(self.model.operatorCodes) - 1
        op.inputs, op.outputs = [source], [target]
        self.operators.insert(position, op)
        self.origins.insert(position, origin)

    def reread(self, old: int, new: int, ops: list[int]) -> None:
        """Let ops read another tensor, by their positions."""
        for position in ops:
            op = self.operators[position]
            op.inputs = [new if int(t) == old else int(t) for t in op.inputs]

    def rename_output(self, old: int, new: int) -> None:
        """Let the file's output be another tensor."""
        self.graph.outputs = [new if int(t) == old else int(t) for t in self.graph.outputs]
        self._resign("outputs", {old: new})

    def rename_input(self, old: int, new: int) -> None:
        """Let the file's input be another tensor."""
        self.graph.inputs = [new if int(t) == old else int(t) for t in self.graph.inputs]
        self._resign("inputs", {old: new})

    def _resign(self, side: str, change: dict[int, int]) -> None:
        for signature in self.model.signatureDefs or ():
            for entry in getattr(signature, side):
                entry.tensorIndex = change.get(entry.tensorIndex, entry.tensorIndex)


def shuffled(items: list[Any], rng: random.Random) -> list[Any]:
    """Give a shuffled copy."""
    return rng.sample(items, len(items))
