"""
The op graph of a `.tflite` file, read from its flatbuffer.

Buffers are not copied: constants are read on request.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.errors import UnreadableError
from pytest_edgeq.names import readable
from pytest_edgeq.tflite.boundary import numpy_dtype
from pytest_edgeq.tflite.flatbuffer import (
    builtin_option,
    checked,
    enum_names,
    fused_activation,
    has_data,
    indices,
    integers,
    op_name,
    read_quantization,
    text,
)
from pytest_edgeq.tflite.mapped import Buffer, MappedFile, Source, source_of
from pytest_edgeq.tflite.ops import facts_of
from pytest_edgeq.tflite.source import TflitePath, open_tflite
from pytest_edgeq.tflite.sparse import densified
from pytest_edgeq.tflite.subgraph import Op, Signature, SignatureTensor, Subgraph, Tensor
from pytest_edgeq.tflite.verify import verify


@dataclass(frozen=True, eq=False)
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
    def read(
        cls,
        source: TflitePath | bytes,
        build: Callable[[Buffer], None] | None = None,
        section: str | None = None,
    ) -> OpGraph:
        """Read the graph of a file; of a bundle that of a section."""
        from ai_edge_litert import schema_py_generated as schema

        buffer = open_tflite(source, build, section)
        model = schema.Model.GetRootAs(buffer, 0)
        opcodes = [op_name(model.OperatorCodes(i)) for i in range(model.OperatorCodesLength())]
        subgraphs = tuple(
            _read_subgraph(model, index, opcodes, len(buffer))
            for index in range(model.SubgraphsLength())
        )
        if not subgraphs:
            raise ValueError("the .tflite file has no subgraph: there is nothing to run in it")
        verify(model, subgraphs)
        return cls(subgraphs, _read_signatures(model, subgraphs), model, buffer)

    @property
    def ops(self) -> tuple[Op, ...]:
        """Every op of every subgraph, in execution order within its subgraph."""
        return tuple(op for subgraph in self.subgraphs for op in subgraph.ops)

    @property
    def buffer(self) -> Buffer:
        """The file's content."""
        if isinstance(self._buffer, MappedFile):
            self._buffer.check()
        return self._buffer

    @property
    def source(self) -> Source:
        """The path of a mapped file, or the content of one in memory."""
        return source_of(self.buffer)

    @functools.cached_property
    def sha256(self) -> str:
        """Hash of the file's content, in hexadecimal."""
        return hashlib.sha256(self.buffer).hexdigest()

    @property
    def section(self) -> str | None:
        """Name of the section of a bundle; None of a file that is no bundle."""
        return self._buffer.section if isinstance(self._buffer, MappedFile) else None

    @functools.cached_property  # each run asks
    def is_stateful(self) -> bool:
        """Whether a run keeps values for the next one: variables, or resources."""
        return any(facts_of(op.name).stateful for op in self.ops) or any(
            tensor.is_variable for subgraph in self.subgraphs for tensor in subgraph.tensors
        )

    def tensor(self, op: Op, index: int) -> Tensor:
        """Return the tensor with this index in the op's subgraph."""
        if index < 0:
            raise IndexError(f"{op.place}: an input that was left out has no tensor")
        return self.subgraphs[op.subgraph].tensors[index]

    def operator(self, op: Op) -> Any:
        """Return the op's table in the flatbuffer, an `Operator`."""
        return self._model.Subgraphs(op.subgraph).Operators(op.index)

    def option(self, op: Op, field: str, default: Any) -> Any:
        """Return an option of an op by the schema's name, or the default if it has none."""
        return builtin_option(self.operator(op), field, default)

    def decomposition(self, op: Op) -> Subgraph | None:
        """Return the subgraph that a composite consists of; None of other ops."""
        from ai_edge_litert import schema_py_generated as schema

        raw, kind = self.operator(op), schema.BuiltinOptions2.StableHLOCompositeOptions
        table = raw.BuiltinOptions2()
        if table is None or raw.BuiltinOptions2Type() != kind:
            return None
        options = schema.StableHLOCompositeOptions()
        options.Init(table.Bytes, table.Pos)
        index = options.DecompositionSubgraphIndex()
        return self.subgraphs[index] if 0 <= index < len(self.subgraphs) else None

    def version(self, op: Op) -> int:
        """Return the version of an op, by which kernels choose their behaviour."""
        version: int = self._model.OperatorCodes(self.operator(op).OpcodeIndex()).Version()
        return version

    def constant(self, tensor: Tensor) -> npt.NDArray[np.uint8]:
        """
        Return the bytes of a constant's values; int4 has two values a byte.

        Raises:
            UnreadableError: The data lies in a file of its own, or is sparse and packed or damaged.
        """
        stored = self.stored(tensor)
        if not tensor.is_sparse:
            return stored
        dtype = numpy_dtype(tensor.dtype)
        if dtype is None:
            raise UnreadableError(
                f"tensor {tensor.name!r}: sparse values of {tensor.dtype} are not read"
            )
        raw = next(
            self._model.Subgraphs(subgraph.index).Tensors(tensor.index)
            for subgraph in self.subgraphs
            if any(each is tensor for each in subgraph.tensors)
        )
        try:
            values = densified(raw.Sparsity(), tensor.shape, stored.view(dtype))
        except (ValueError, LookupError, MemoryError) as error:
            raise UnreadableError(
                f"tensor {tensor.name!r}: its sparse layout does not fit its values: {error}"
            ) from error
        return values.reshape(-1).view(np.uint8)

    def stored(self, tensor: Tensor) -> npt.NDArray[np.uint8]:
        """
        Return the stored bytes of a constant, a view into the file.

        Raises:
            UnreadableError: The data lies in a file of its own.
        """
        if tensor.is_external:
            raise UnreadableError(
                f"tensor {tensor.name!r}: its data lies in another file, which is not read"
            )
        content = self.buffer
        buffer = self._model.Buffers(tensor.buffer)
        if buffer.Offset() > 1:
            return np.frombuffer(content, np.uint8, buffer.Size(), buffer.Offset())
        data = buffer.DataAsNumpy()
        return data if isinstance(data, np.ndarray) else np.empty(0, np.uint8)

    def scales(self, subgraph: int, tensor: Tensor) -> npt.NDArray[np.float32]:
        """Return all scales of a tensor, including those of blocks."""
        if tensor.block_scales < 0:
            return tensor.scales
        holder = self.subgraphs[subgraph].tensors[tensor.block_scales]
        return self.constant(holder).view(np.dtype(holder.dtype)).astype(np.float32)


def _read_subgraph(model: Any, index: int, opcodes: list[str], file_bytes: int) -> Subgraph:
    subgraph = model.Subgraphs(index)
    count = subgraph.TensorsLength()
    tensors = tuple(_read_tensor(model, subgraph, i, file_bytes) for i in range(count))
    ops = []
    producer: dict[int, Op] = {}
    consumers: dict[int, list[Op]] = {i: [] for i in range(count)}
    for i in range(subgraph.OperatorsLength()):
        raw = subgraph.Operators(i)
        op = Op(
            index=i,
            subgraph=index,
            name=opcodes[checked("operator code", raw.OpcodeIndex(), len(opcodes))],
            inputs=indices(raw.InputsAsNumpy(), count, least=-1),
            outputs=indices(raw.OutputsAsNumpy(), count, least=-1),
            fused_activation=fused_activation(raw),
        )
        ops.append(op)
        producer.update(dict.fromkeys((i for i in op.outputs if i >= 0), op))
        for operand in (i for i in op.inputs if i >= 0):
            consumers[operand].append(op)
    return Subgraph(
        index,
        text(subgraph.Name()),
        tensors,
        tuple(ops),
        indices(subgraph.InputsAsNumpy(), count),
        indices(subgraph.OutputsAsNumpy(), count),
        producer,
        consumers,
    )


def _read_tensor(model: Any, subgraph: Any, index: int, file_bytes: int) -> Tensor:
    raw = subgraph.Tensors(index)
    shape = integers(raw.ShapeAsNumpy())
    signature = integers(raw.ShapeSignatureAsNumpy())
    return Tensor(
        index=index,
        name=text(raw.Name()),
        dtype=enum_names("TensorType").get(raw.Type(), f"unknown_{raw.Type()}").lower(),
        shape=shape,
        shape_signature=signature if len(signature) == len(shape) else shape,
        **read_quantization(raw.Quantization(), subgraph.TensorsLength()),
        is_constant=has_data(model, raw, file_bytes),
        is_sparse=raw.Sparsity() is not None,
        is_variable=bool(raw.IsVariable()),
        buffer=raw.Buffer(),
        is_external=bool(raw.ExternalBuffer()),
    )


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts `output_10` after `output_9`."""
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)
    ]


def _read_signatures(model: Any, subgraphs: tuple[Subgraph, ...]) -> tuple[Signature, ...]:
    found: list[tuple[str | None, int, list[Any], list[Any]]] = []
    for each in map(model.SignatureDefs, range(model.SignatureDefsLength())):
        inputs = [each.Inputs(i) for i in range(each.InputsLength())]
        outputs = [each.Outputs(i) for i in range(each.OutputsLength())]
        found.append((readable(text(each.SignatureKey())), each.SubgraphIndex(), inputs, outputs))
    signatures = []
    for key, index, inputs, outputs in found or [(None, 0, [], [])]:
        subgraph = subgraphs[checked("subgraph", index, len(subgraphs))]
        ordered_inputs = _in_order(inputs, subgraph, subgraph.inputs, "input")
        ordered_outputs = _in_order(outputs, subgraph, subgraph.outputs, "output")
        signatures.append(Signature(key, index, ordered_inputs, ordered_outputs))
    return tuple(signatures)


def _in_order(
    entries: list[Any], subgraph: Subgraph, order: tuple[int, ...], side: str
) -> tuple[SignatureTensor, ...]:
    """
    Return a signature's inputs or outputs in the subgraph's order.

    One tensor may have several names. Without a name in the signature it keeps its own; if that is
    empty (a stripped file) or in use (one tensor twice), its position makes it unique.
    """
    names: dict[int, list[str]] = {}
    for entry in sorted(entries, key=lambda entry: _natural(text(entry.Name()))):
        index = checked("tensor", entry.TensorIndex(), len(subgraph.tensors))
        names.setdefault(index, []).append(text(entry.Name()))
    used = {name for queue in names.values() for name in queue}
    ordered = []
    for position, index in enumerate(order):
        tensor = subgraph.tensors[index]
        queue = names.get(index)
        if queue:
            name = queue.pop(0)
        else:
            name = tensor.name or f"{side}_{position}"
            while name in used:
                name += f"_{position}"
            used.add(name)
        ordered.append(SignatureTensor(name, tensor))
    # Further names in the signature, which the interpreter accepts, too.
    ordered += [
        SignatureTensor(name, subgraph.tensors[index])
        for index, queue in names.items()
        for name in queue
    ]
    return tuple(ordered)
