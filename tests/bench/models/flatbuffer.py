"""
A second reading of a `.tflite` file, which shares no code with `pytest_edgeq.tflite`.

It knows no roles of operands: it looks at the types of all tensors that an operator reads and
writes, straight from the schema. So a mistake in the op-dtype map cannot hide an op in float.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ai_edge_litert import schema_py_generated as schema

_FLOATS = ("FLOAT16", "FLOAT32", "FLOAT64", "BFLOAT16")
_BORDERS = ("QUANTIZE", "DEQUANTIZE")
# What a constant may pass through on its way to the op that reads it.
_ON_THE_WAY = ("DEQUANTIZE", "TRANSPOSE", "RESHAPE")


def _names(enum: type) -> dict[int, str]:
    return {code: name for name, code in vars(enum).items() if not name.startswith("_")}


_TYPES = _names(schema.TensorType)
_OPERATORS = _names(schema.BuiltinOperator)


class Read(NamedTuple):
    """One operator: its name, the types it reads and writes, and what it computes in."""

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    scheme: str


def read(tflite: bytes) -> list[Read]:
    """Read every operator of every subgraph, in the file's order."""
    model = schema.Model.GetRootAs(tflite, 0)
    return [
        operator
        for index in range(model.SubgraphsLength())
        for operator in _subgraph(model, model.Subgraphs(index))
    ]


def _subgraph(model: Any, subgraph: Any) -> list[Read]:
    # The kind of the constant that a tensor holds: as stored, or as it was before a DEQUANTIZE.
    stored: dict[int, str] = {}
    dequantized: dict[int, str] = {}
    for index in range(subgraph.TensorsLength()):
        buffer = model.Buffers(subgraph.Tensors(index).Buffer())
        if buffer.DataLength() or buffer.Size():
            stored[index] = _kind(subgraph, index)
    operators = []
    for position in range(subgraph.OperatorsLength()):
        operator = subgraph.Operators(position)
        code = model.OperatorCodes(operator.OpcodeIndex())
        name = _OPERATORS[max(code.BuiltinCode(), code.DeprecatedBuiltinCode())]
        reads = [int(index) for index in operator.InputsAsNumpy() if index >= 0]
        writes = [int(index) for index in operator.OutputsAsNumpy()]
        if name in _ON_THE_WAY:
            for held in (stored, dequantized):
                if reads[0] in held:
                    (dequantized if name == "DEQUANTIZE" else held)[writes[0]] = held[reads[0]]
        operators.append(
            Read(
                name,
                tuple(_kind(subgraph, index) for index in reads),
                tuple(_kind(subgraph, index) for index in writes),
                _scheme(subgraph, name, reads, writes, stored, dequantized),
            )
        )
    return operators


def _kind(subgraph: Any, index: int) -> str:
    """The type in the schema, with `q` before it where the tensor has a scale."""
    tensor = subgraph.Tensors(index)
    quantization = tensor.Quantization()
    scaled = quantization is not None and quantization.ScaleLength() > 0
    blockwise = (
        quantization is not None
        and quantization.DetailsType() == schema.QuantizationDetails.BlockwiseQuantization
    )
    return ("q" if scaled or blockwise else "") + _TYPES[tensor.Type()]


def _scheme(
    subgraph: Any,
    name: str,
    reads: list[int],
    writes: list[int],
    stored: dict[int, str],
    dequantized: dict[int, str],
) -> str:
    if name in _BORDERS:
        return "border"
    kinds = {index: _kind(subgraph, index) for index in (*reads, *writes)}
    if any(kind.lstrip("q") in _FLOATS for kind in kinds.values()):
        if any(stored.get(index, "").startswith("q") for index in reads):
            return "dynamic"
        constants = [held[i] for i in reads for held in (stored, dequantized) if i in held]
        if any(kind.startswith("q") for kind in constants):
            return "weight_only"
        return "float16" if "FLOAT16" in constants else "float"
    computed = {kind for i, kind in kinds.items() if i not in stored and kind.startswith("q")}
    if "qINT16" in computed:
        return "int16x8"
    return "int8" if "qINT8" in computed else "+".join(sorted(computed)) or "integer"
