"""Write copies of a `.tflite` file, also with parts of another or with ops inserted."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.subgraph import Op


def unpacked(file: OpGraph) -> Any:
    """Return a new `ModelT` of a file, which the caller may change."""
    from ai_edge_litert import schema_py_generated as schema

    return schema.ModelT.InitFromObj(schema.Model.GetRootAs(file.buffer, 0))


def packed(model: Any, n_bytes: int = 1024) -> bytes:
    """Serialize a `ModelT` to the content of a file."""
    import flatbuffers  # type: ignore[import-untyped] # ships no types

    builder = flatbuffers.Builder(n_bytes)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(memoryview(builder.Bytes)[builder.Head() :])


def one_op(name: str, *operands: str) -> bytes:
    """Return a file of one op on operands of one float, whose result is `result`."""
    from ai_edge_litert import schema_py_generated as schema

    inputs, outputs = list(range(len(operands))), [len(operands)]
    graph = schema.SubGraphT(
        tensors=[schema.TensorT(shape=[1], name=each) for each in (*operands, "result")],
        inputs=inputs,
        outputs=outputs,
        operators=[schema.OperatorT(inputs=inputs, outputs=outputs)],
    )
    model = schema.ModelT(
        version=3, operatorCodes=[], subgraphs=[graph], buffers=[schema.BufferT()]
    )
    _add_code(model, name)
    return packed(model)


def add_buffer(model: Any, content: npt.NDArray[Any]) -> int:
    """Add a buffer whose data is aligned to 16 bytes, as the schema demands; return its index."""
    from ai_edge_litert import schema_py_generated as schema

    class Aligned(schema.BufferT):  # type: ignore[misc] # the schema ships no types
        def Pack(self, builder: Any) -> Any:
            if self.data is None:
                return super().Pack(builder)
            payload = self.data.tobytes()
            builder.StartVector(1, len(payload), 16)
            builder.head -= len(payload)
            builder.Bytes[builder.head : builder.head + len(payload)] = payload
            builder.vectorNumElems = len(payload)
            data = builder.EndVector()
            schema.BufferStart(builder)
            schema.BufferAddData(builder, data)
            return schema.BufferEnd(builder)

    buffer = Aligned()
    buffer.data = content
    model.buffers.append(buffer)
    return len(model.buffers) - 1


@dataclass(frozen=True, slots=True)
class Graft:
    """The parts of an op that are replaced by those of another file's op."""

    op: Op  # the op of the file
    donor: Op  # the op of the other file
    replaces_kind: bool = False  # whether operator code and options are replaced
    # By position, the tensor of the file to read instead
    operands: Mapping[int, int] = field(default_factory=dict)
    # Positions of the operands that are replaced by the donor's constants
    constants: frozenset[int] = frozenset()

    def parts(self) -> Iterable[Graft]:
        """Split it into grafts of one part each."""
        if self.replaces_kind:
            yield Graft(self.op, self.donor, replaces_kind=True)
        for place, tensor in self.operands.items():
            yield Graft(self.op, self.donor, operands={place: tensor})
        for place in sorted(self.constants):
            yield Graft(self.op, self.donor, constants=frozenset({place}))


def write_with(file: OpGraph, donor: OpGraph, grafts: Iterable[Graft]) -> bytes:
    """Write a file with parts of its ops replaced."""
    model, other = unpacked(file), unpacked(donor)
    for graft in grafts:
        subgraph = model.subgraphs[graft.op.subgraph]
        theirs = other.subgraphs[graft.donor.subgraph]
        own, replacement = subgraph.operators[graft.op.index], theirs.operators[graft.donor.index]
        if graft.replaces_kind:
            model.operatorCodes.append(other.operatorCodes[replacement.opcodeIndex])
            own.opcodeIndex = len(model.operatorCodes) - 1
            for name in vars(replacement):
                if "ption" in name:  # builtinOptions, builtinOptions2Type, customOptionsFormat, …
                    setattr(own, name, getattr(replacement, name))
        own.inputs = [
            _constant(model, subgraph, donor, graft.donor, theirs, place)
            if place in graft.constants
            else graft.operands.get(place, int(index))
            for place, index in enumerate(own.inputs)
        ]
    return packed(model)


def _constant(model: Any, subgraph: Any, donor: OpGraph, op: Op, theirs: Any, place: int) -> int:
    """Add a constant operand of the donor to a file; return its index."""
    index = op.inputs[place]
    tensor = copy.copy(theirs.tensors[index])
    tensor.buffer = add_buffer(model, np.asarray(donor.stored(donor.tensor(op, index))))
    return add_tensor(subgraph, tensor)


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
            whole, below = (add_tensor(graph, copy.copy(graph.tensors[index])) for _ in range(2))
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
    result = add_tensor(graph, copy.copy(graph.tensors[source]))
    transpose = _op(_add_code(model, "TRANSPOSE"), "Transpose", [source, axes], result)
    for reader in graph.operators[op.index + 1 :]:
        reader.inputs = [result if each == source else int(each) for each in reader.inputs]
    graph.operators.insert(op.index + 1, transpose)
    return packed(model)


def _add_code(model: Any, name: str) -> int:
    from ai_edge_litert import schema_py_generated as schema

    code = getattr(schema.BuiltinOperator, name)
    # Readers from before 2020 look at the deprecated field.
    added = schema.OperatorCodeT(deprecatedBuiltinCode=code, builtinCode=code, version=1)
    model.operatorCodes.append(added)
    return len(model.operatorCodes) - 1


def add_tensor(graph: Any, tensor: Any) -> int:
    """Add a tensor to a subgraph; return its index."""
    graph.tensors.append(tensor)
    return len(graph.tensors) - 1


def _add_constant(model: Any, graph: Any, values: npt.NDArray[Any], dtype: str) -> int:
    from ai_edge_litert import schema_py_generated as schema

    kind, shape = getattr(schema.TensorType, dtype), np.array(values.shape, np.int32)
    tensor = schema.TensorT(shape, kind, add_buffer(model, values), "inserted")
    return add_tensor(graph, tensor)


def _op(code: int, options: str, inputs: list[int], output: int) -> Any:
    from ai_edge_litert import schema_py_generated as schema

    return schema.OperatorT(
        opcodeIndex=code,
        inputs=np.array(inputs, np.int32),
        outputs=np.array([output], np.int32),
        builtinOptionsType=getattr(schema.BuiltinOptions, f"{options}Options"),
        builtinOptions=getattr(schema, f"{options}OptionsT")(),
    )
