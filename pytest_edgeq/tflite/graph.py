"""
The op graph of a `.tflite` file, read from its flatbuffer.

Everything is read with the schema that ai-edge-litert ships. Buffers are not copied: constants are
looked at only when asked for.
The schema: https://github.com/tensorflow/tensorflow/blob/master/tensorflow/compiler/mlir/lite/schema/schema.fbs
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.tflite.source import Buffer, TflitePath, open_tflite

__all__ = [
    "Op",
    "OpGraph",
    "Signature",
    "SignatureTensor",
    "Subgraph",
    "Tensor",
    "operator_names",
    "tensor_types",
]


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """
    One tensor of a subgraph.

    Attributes:
        index: Position in the subgraph's tensor list.
        name: The name in the file.
        dtype: Lower-case name of the schema's `TensorType`, for instance `int8`, `int4`, `float32`.
        shape: As stored; a dynamic dimension is stored as 1.
        shape_signature: With −1 at each dynamic dimension.
        scales: One scale, or one a channel; empty where the tensor is not quantized. float32.
        zero_points: As many as scales. int64.
        quantized_dimension: The axis of the scales.
        block_size: Elements a scale for blockwise quantization, else 0.
        block_scales: Index of the tensor that holds the scales of blocks, else −1.
        is_constant: Has data in the file.
        is_sparse: Stored in a sparse format.
        is_variable: Keeps its value from one run to the next.
    """

    index: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    shape_signature: tuple[int, ...]
    scales: npt.NDArray[np.float32]
    zero_points: npt.NDArray[np.int64]
    quantized_dimension: int
    block_size: int
    block_scales: int
    is_constant: bool
    is_sparse: bool
    is_variable: bool
    buffer: int

    @property
    def is_quantized(self) -> bool:
        """An integer tensor with scales, or one whose scales stand in a tensor of their own."""
        return (len(self.scales) > 0 or self.block_size > 0) and "float" not in self.dtype

    @property
    def granularity(self) -> str | None:
        """`per_tensor`, `per_channel`, `blockwise_<size>`, or None where not quantized."""
        if not self.is_quantized:
            return None
        if self.block_size:
            return f"blockwise_{self.block_size}"
        return "per_tensor" if len(self.scales) == 1 else "per_channel"

    @property
    def n_channels(self) -> int | None:
        """Length of the quantized dimension, None where the tensor is not quantized."""
        if not self.is_quantized or not self.shape:
            return None
        return self.shape[self.quantized_dimension]


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """
    One operator, in execution order.

    Attributes:
        index: Position in the subgraph.
        subgraph: Index of the subgraph.
        name: The schema's `BuiltinOperator`, or `CUSTOM:<code>`.
        inputs: Tensor indices; −1 stands for an optional input that was left out.
        outputs: Tensor indices.
        fused_activation: `RELU`, `RELU6`, …, or None.
    """

    index: int
    subgraph: int
    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    fused_activation: str | None


@dataclass(frozen=True, slots=True, eq=False)
class Subgraph:
    """Tensors, ops and borders of one subgraph; `producer` maps a tensor to the op making it."""

    index: int
    name: str
    tensors: tuple[Tensor, ...]
    ops: tuple[Op, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    producer: dict[int, Op] = field(repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class SignatureTensor:
    """An input or an output by the name under which users know it."""

    name: str
    tensor: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Signature:
    """
    An entry point of the file.

    Attributes:
        key: The signature's key, None for a file without signatures.
        subgraph: Index of the subgraph that it runs.
        inputs: In the subgraph's own order.
        outputs: In the subgraph's own order, which is the order of the torch model's outputs; the
            interpreter's signature runner sorts them by name instead.
    """

    key: str | None
    subgraph: int
    inputs: tuple[SignatureTensor, ...]
    outputs: tuple[SignatureTensor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class OpGraph:
    """
    All subgraphs and signatures of one file.

    Build it with `OpGraph.read(path_or_bytes)`.
    """

    subgraphs: tuple[Subgraph, ...]
    signatures: tuple[Signature, ...]
    _model: Any = field(repr=False)
    _buffer: Buffer = field(repr=False)

    @classmethod
    def read(cls, source: TflitePath | bytes) -> OpGraph:
        """
        Read the graph of a file.

        Raises:
            FileNotFoundError, ValueError, TypeError: As `open_tflite` says.
        """
        return _read(open_tflite(source))

    @property
    def ops(self) -> tuple[Op, ...]:
        """Every op of every subgraph, in execution order within its subgraph."""
        return tuple(op for subgraph in self.subgraphs for op in subgraph.ops)

    @property
    def buffer(self) -> Buffer:
        """The file's content."""
        return self._buffer

    def tensor(self, op: Op, index: int) -> Tensor:
        """The tensor with this index in the op's subgraph."""
        return self.subgraphs[op.subgraph].tensors[index]

    def constant(self, tensor: Tensor) -> npt.NDArray[np.uint8]:
        """The raw bytes of a constant, a view into the file."""
        buffer = self._model.Buffers(tensor.buffer)
        if buffer.Size() > 1:
            return np.frombuffer(self._buffer, np.uint8, buffer.Size(), buffer.Offset())
        data = buffer.DataAsNumpy()
        return data if isinstance(data, np.ndarray) else np.empty(0, np.uint8)

    def scales(self, op: Op, tensor: Tensor) -> npt.NDArray[np.float32]:
        """Every scale of a tensor of the op's subgraph; blocks keep theirs in a float16 tensor."""
        if tensor.block_scales < 0:
            return tensor.scales
        holder = self.tensor(op, tensor.block_scales)
        return self.constant(holder).view(np.dtype(holder.dtype)).astype(np.float32)


@functools.cache
def _enum_names(enum: str) -> dict[int, str]:
    from ai_edge_litert import schema_py_generated as schema

    members = vars(getattr(schema, enum))
    return {value: key for key, value in members.items() if not key.startswith("_")}


def operator_names() -> tuple[str, ...]:
    """Every operator of the schema."""
    return tuple(_enum_names("BuiltinOperator").values())


def tensor_types() -> tuple[str, ...]:
    """Every dtype of the schema, in lower case."""
    return tuple(name.lower() for name in _enum_names("TensorType").values())


def _text(raw: bytes | None) -> str:
    return "" if raw is None else raw.decode("utf-8", "backslashreplace")


def _ints(values: Any) -> tuple[int, ...]:
    # An absent vector reads as the number 0.
    return tuple(values.tolist()) if isinstance(values, np.ndarray) else ()


def _read(buffer: Buffer) -> OpGraph:
    from ai_edge_litert import schema_py_generated as schema

    model = schema.Model.GetRootAs(buffer, 0)
    opcodes = [_op_name(model.OperatorCodes(i)) for i in range(model.OperatorCodesLength())]
    subgraphs = tuple(
        _read_subgraph(model, index, opcodes) for index in range(model.SubgraphsLength())
    )
    if not subgraphs:
        raise ValueError("the .tflite file has no subgraph: there is nothing to run in it")
    return OpGraph(subgraphs, _read_signatures(model, subgraphs), model, buffer)


def _op_name(code: Any) -> str:
    # Files from before 2020 keep the code in a byte; 127 in it means "look at the newer field".
    builtin = max(code.BuiltinCode(), code.DeprecatedBuiltinCode())
    name = _enum_names("BuiltinOperator").get(builtin, f"UNKNOWN_{builtin}")
    return f"CUSTOM:{_text(code.CustomCode())}" if name == "CUSTOM" else name


def _read_subgraph(model: Any, index: int, opcodes: list[str]) -> Subgraph:
    subgraph = model.Subgraphs(index)
    tensors = tuple(
        _read_tensor(model, subgraph.Tensors(i), i) for i in range(subgraph.TensorsLength())
    )
    ops = []
    producer = {}
    for i in range(subgraph.OperatorsLength()):
        raw = subgraph.Operators(i)
        op = Op(
            index=i,
            subgraph=index,
            name=opcodes[raw.OpcodeIndex()],
            inputs=_ints(raw.InputsAsNumpy()),
            outputs=_ints(raw.OutputsAsNumpy()),
            fused_activation=_fused_activation(raw),
        )
        ops.append(op)
        producer.update(dict.fromkeys(op.outputs, op))
    return Subgraph(
        index,
        _text(subgraph.Name()),
        tensors,
        tuple(ops),
        _ints(subgraph.InputsAsNumpy()),
        _ints(subgraph.OutputsAsNumpy()),
        producer,
    )


def _fused_activation(raw: Any) -> str | None:
    from ai_edge_litert import schema_py_generated as schema

    options = _enum_names("BuiltinOptions").get(raw.BuiltinOptionsType(), "NONE")
    reader = getattr(schema, options, None)
    table = raw.BuiltinOptions()
    if reader is None or table is None or not hasattr(reader, "FusedActivationFunction"):
        return None
    parsed = reader()
    parsed.Init(table.Bytes, table.Pos)
    name = _enum_names("ActivationFunctionType")[parsed.FusedActivationFunction()]
    return None if name == "NONE" else name


_NO_SCALES = np.empty(0, np.float32)
_NO_ZERO_POINTS = np.empty(0, np.int64)


def _read_tensor(model: Any, raw: Any, index: int) -> Tensor:
    shape = _ints(raw.ShapeAsNumpy())
    signature = _ints(raw.ShapeSignatureAsNumpy())
    scales, zero_points, axis, block_size, block_scales = _read_quantization(raw.Quantization())
    return Tensor(
        index=index,
        name=_text(raw.Name()),
        dtype=_enum_names("TensorType").get(raw.Type(), f"unknown_{raw.Type()}").lower(),
        shape=shape,
        shape_signature=signature if len(signature) == len(shape) else shape,
        scales=scales,
        zero_points=zero_points,
        quantized_dimension=axis,
        block_size=block_size,
        block_scales=block_scales,
        is_constant=_has_data(model, raw),
        is_sparse=raw.Sparsity() is not None,
        is_variable=bool(raw.IsVariable()),
        buffer=raw.Buffer(),
    )


def _has_data(model: Any, raw: Any) -> bool:
    if raw.ExternalBuffer():
        return True
    if not raw.Buffer():
        # Buffer 0 is the empty one by convention (schema.fbs, "Model.buffers").
        return False
    buffer = model.Buffers(raw.Buffer())
    return bool(buffer.DataLength() or buffer.Size() > 1)


def _read_quantization(
    raw: Any,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64], int, int, int]:
    from ai_edge_litert import schema_py_generated as schema

    if raw is None:
        return _NO_SCALES, _NO_ZERO_POINTS, 0, 0, -1
    axis = raw.QuantizedDimension()
    if raw.DetailsType() == schema.QuantizationDetails.BlockwiseQuantization:
        details = schema.BlockwiseQuantization()
        table = raw.Details()
        details.Init(table.Bytes, table.Pos)
        return _NO_SCALES, _NO_ZERO_POINTS, axis, details.BlockSize(), details.Scales()
    if not raw.ScaleLength():
        return _NO_SCALES, _NO_ZERO_POINTS, axis, 0, -1
    scales = np.array(raw.ScaleAsNumpy(), np.float32)
    # A file may leave the zero points out where all are 0.
    zero_points = (
        np.array(raw.ZeroPointAsNumpy(), np.int64)
        if raw.ZeroPointLength()
        else np.zeros(len(scales), np.int64)
    )
    return scales, zero_points, axis, 0, -1


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort `output_10` after `output_9`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _read_signatures(model: Any, subgraphs: tuple[Subgraph, ...]) -> tuple[Signature, ...]:
    count = model.SignatureDefsLength()
    if not count:
        main = subgraphs[0]
        return (
            Signature(
                None,
                0,
                tuple(SignatureTensor(main.tensors[i].name, main.tensors[i]) for i in main.inputs),
                tuple(SignatureTensor(main.tensors[i].name, main.tensors[i]) for i in main.outputs),
            ),
        )
    signatures = []
    for i in range(count):
        raw = model.SignatureDefs(i)
        subgraph = subgraphs[raw.SubgraphIndex()]
        inputs = [raw.Inputs(j) for j in range(raw.InputsLength())]
        outputs = [raw.Outputs(j) for j in range(raw.OutputsLength())]
        signatures.append(
            Signature(
                _text(raw.SignatureKey()),
                raw.SubgraphIndex(),
                _in_order(inputs, subgraph, subgraph.inputs),
                _in_order(outputs, subgraph, subgraph.outputs),
            )
        )
    return tuple(signatures)


def _in_order(
    entries: list[Any], subgraph: Subgraph, order: tuple[int, ...]
) -> tuple[SignatureTensor, ...]:
    """Give the signature's names in the subgraph's order; one tensor may carry several names."""
    names: dict[int, list[str]] = {}
    for entry in sorted(entries, key=lambda entry: _natural(_text(entry.Name()))):
        names.setdefault(entry.TensorIndex(), []).append(_text(entry.Name()))
    ordered = []
    for index in order:
        tensor = subgraph.tensors[index]
        # A border of the subgraph without a name in the signature keeps its tensor's name.
        queue = names.get(index)
        ordered.append(SignatureTensor(queue.pop(0) if queue else tensor.name, tensor))
    return tuple(ordered)
