"""Damage to a `.tflite` file, drawn from a seed: of its bytes, or of what they mean."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from fixtures.tflite.writer import pack, unpack

__all__ = ["mutate_bytes", "mutate_tflite"]

_NUMBERS = (-(2**31), -2, -1, 0, 1, 2, 3, 7, 127, 128, 255, 65535, 2**16, 2**20, 2**30, 2**31 - 1)
_FLOATS = (0.0, -0.0, -1.0, 1.0, 1e-45, 1e-30, 1e-9, 1e9, 3e38, float("inf"), -float("inf"))


def mutate_tflite(content: bytes, dice: random.Random) -> tuple[bytes, str]:
    """
    Return the file with one to three mutations, and what they were.

    Half of the files are damaged without regard to their structure, half are whole flatbuffers with
    wrong values in them.
    """
    if dice.random() < 0.5:
        return mutate_bytes(content, dice)
    model = unpack(content)
    told = []
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        mutation = dice.choice(_STRUCTURED)
        told.append(mutation(model, dice))
    try:
        return pack(model), "; ".join(told)
    except (struct.error, TypeError, OverflowError, AttributeError, ValueError) as error:
        # The values do not fit into their fields: the bytes are damaged instead.
        damaged, blind = mutate_bytes(content, dice)
        return damaged, f"{blind} (not {'; '.join(told)}: {type(error).__name__})"


def mutate_bytes(content: bytes, dice: random.Random) -> tuple[bytes, str]:
    """Return the bytes with one kind of damage at one to a few places, and what it was."""
    damaged = bytearray(content)
    kind = dice.choice(("flip", "flip", "byte", "zero", "word", "swap", "splice", "cut", "delete"))
    places = []
    for _ in range(1 if kind in ("cut", "delete") else dice.choice((1, 1, 2, 4, 16))):
        at = dice.randrange(len(damaged) or 1)
        word = at // 4 * 4
        places.append(at)
        if kind == "flip":
            damaged[at] ^= 1 << dice.randrange(8)
        elif kind == "byte":
            damaged[at] = dice.randrange(256)
        elif kind == "zero":
            end = min(len(damaged), word + dice.choice((4, 8, 64)))
            damaged[word:end] = bytes(end - word)
        elif kind == "word":
            damaged[word : word + 4] = struct.pack("<i", dice.choice(_NUMBERS))[
                : len(damaged) - word
            ]
        elif kind in ("swap", "splice"):
            other = dice.randrange(len(damaged)) // 4 * 4
            length = min(dice.choice((4, 4, 16)), len(damaged) - max(word, other))
            taken = bytes(damaged[other : other + length])
            if kind == "swap":
                damaged[other : other + length] = damaged[word : word + length]
            damaged[word : word + length] = taken
        elif kind == "cut":
            del damaged[at:]
        else:
            del damaged[at : at + dice.randrange(1, 9)]
    return bytes(damaged), f"{kind} at {', '.join(map(str, places))}"


def _number(dice: random.Random, old: int, near: int) -> int:
    """Return another number: near the old one, below a count, or an extreme."""
    return dice.choice(
        (
            old + 1,
            old - 1,
            old ^ (1 << dice.randrange(31)),
            dice.randrange(-1, near + 2),
            dice.choice(_NUMBERS),
        )
    )


def _edited(values: Any, dice: random.Random, near: int) -> Any:
    """Return a vector of integers with an element changed, dropped, doubled, or all of it gone."""
    array = [] if values is None else [int(value) for value in values]
    kind = dice.choice(("change", "change", "change", "drop", "add", "clear", "swap"))
    at = dice.randrange(len(array)) if array else 0
    if kind == "add" or not array:
        array.insert(at, dice.randrange(-1, near + 1))
    elif kind == "change":
        array[at] = _number(dice, array[at], near)
    elif kind == "drop":
        del array[at]
    elif kind == "swap":
        other = dice.randrange(len(array))
        array[at], array[other] = array[other], array[at]
    else:
        array = []
    return np.array(array, np.int64).astype(np.int32)


def _listed(values: Any) -> list[int]:
    return [int(value) for value in values]


def _graph(model: Any, dice: random.Random) -> tuple[int, Any]:
    index = dice.randrange(len(model.subgraphs))
    return index, model.subgraphs[index]


def _operator(model: Any, dice: random.Random) -> tuple[str, Any, Any]:
    number, graph = _graph(model, dice)
    if not graph.operators:
        return f"subgraph {number}", graph, None
    index = dice.randrange(len(graph.operators))
    return f"op {number}:{index}", graph, graph.operators[index]


def _tensor(model: Any, dice: random.Random) -> tuple[str, Any]:
    number, graph = _graph(model, dice)
    index = dice.randrange(len(graph.tensors))
    return f"tensor {number}:{index}", graph.tensors[index]


def _operands(model: Any, dice: random.Random) -> str:
    where, graph, op = _operator(model, dice)
    field = dice.choice(("inputs", "inputs", "outputs", "intermediates"))
    if op is None:
        return f"{where}: no ops"
    setattr(op, field, _edited(getattr(op, field), dice, len(graph.tensors)))
    return f"{where}: {field} {_listed(getattr(op, field))}"


def _borders(model: Any, dice: random.Random) -> str:
    number, graph = _graph(model, dice)
    field = dice.choice(("inputs", "outputs"))
    setattr(graph, field, _edited(getattr(graph, field), dice, len(graph.tensors)))
    return f"subgraph {number}: {field} {_listed(getattr(graph, field))}"


def _shape(model: Any, dice: random.Random) -> str:
    where, tensor = _tensor(model, dice)
    field = dice.choice(("shape", "shape", "shape", "shapeSignature"))
    setattr(tensor, field, _edited(getattr(tensor, field), dice, 8))
    return f"{where}: {field} {_listed(getattr(tensor, field))}"


def _type(model: Any, dice: random.Random) -> str:
    where, tensor = _tensor(model, dice)
    tensor.type = dice.randrange(22)
    return f"{where}: type {tensor.type}"


def _quantization(model: Any, dice: random.Random) -> str:
    where, tensor = _tensor(model, dice)
    if tensor.quantization is None:
        tensor.quantization = schema.QuantizationParametersT()
    quantization = tensor.quantization
    scales = [] if quantization.scale is None else [float(scale) for scale in quantization.scale]
    field = dice.choice(("scale", "scale", "zeroPoint", "quantizedDimension", "lengths", "gone"))
    if field == "scale":
        at = dice.randrange(max(1, len(scales)))
        scales[at : at + 1] = [dice.choice(_FLOATS) if dice.random() < 0.9 else float("nan")]
        quantization.scale = np.array(scales, np.float32)
        if quantization.zeroPoint is None:
            quantization.zeroPoint = np.zeros(len(scales), np.int64)
    elif field == "zeroPoint":
        points = [0] if quantization.zeroPoint is None else list(quantization.zeroPoint)
        points[dice.randrange(max(1, len(points))) :][:1] = [0]
        at = dice.randrange(max(1, len(points)))
        points[at : at + 1] = [dice.choice((*_NUMBERS, 2**40, -(2**63), 2**63 - 1))]
        quantization.zeroPoint = np.array(points, np.int64)
    elif field == "quantizedDimension":
        quantization.quantizedDimension = dice.choice((-1, 0, 1, 2, 3, 4, 2**31 - 1, -(2**31)))
    elif field == "lengths":
        count = dice.choice((0, 1, 2, 3, 7, 100))
        quantization.scale = np.full(count, 0.5, np.float32)
        quantization.zeroPoint = np.zeros(dice.choice((count, 1, 0, count + 1)), np.int64)
    else:
        tensor.quantization = None
    told = {
        name: None if value is None else np.asarray(value).tolist()
        for name, value in (("scale", quantization.scale), ("zero", quantization.zeroPoint))
    }
    return f"{where}: quantization {field} {told!r:.80} of axis {quantization.quantizedDimension}"


def _flags(model: Any, dice: random.Random) -> str:
    where, tensor = _tensor(model, dice)
    field = dice.choice(("isVariable", "hasRank", "buffer", "buffer", "externalBuffer", "name"))
    if field == "buffer":
        tensor.buffer = dice.randrange(len(model.buffers) + 2)
    elif field == "externalBuffer":
        tensor.externalBuffer = dice.choice((1, 2, 2**31))
    elif field == "name":
        tensor.name = dice.choice((None, "", b"\xff\xfe", "x" * 10_000, "a/b;c:0"))
    else:
        setattr(tensor, field, not getattr(tensor, field))
    return f"{where}: {field} {getattr(tensor, field)!r:.40}"


def _opcode(model: Any, dice: random.Random) -> str:
    if dice.random() < 0.3:
        where, _, op = _operator(model, dice)
        if op is None:
            return f"{where}: no ops"
        op.opcodeIndex = dice.choice((0, 1, len(model.operatorCodes), 2**31))
        return f"{where}: opcode {op.opcodeIndex}"
    at = dice.randrange(len(model.operatorCodes))
    code = model.operatorCodes[at]
    if dice.random() < 0.2:
        code.version = dice.choice((0, 1, 2, 3, 4, 5, 6, 7, 99, -1))
        return f"operator code {at}: version {code.version}"
    code.builtinCode = dice.randrange(-1, 212)
    code.deprecatedBuiltinCode = min(code.builtinCode, 127)
    return f"operator code {at}: {code.builtinCode}"


def _options(model: Any, dice: random.Random) -> str:
    where, _, op = _operator(model, dice)
    if op is None:
        return f"{where}: no ops"
    if dice.random() < 0.2 or op.builtinOptions is None:
        kind = dice.choice([name for name in vars(schema.BuiltinOptions) if name[0] != "_"])
        op.builtinOptionsType = getattr(schema.BuiltinOptions, kind)
        op.builtinOptions = None if kind == "NONE" else getattr(schema, f"{kind}T")()
        return f"{where}: options {kind}"
    if dice.random() < 0.1:
        op.builtinOptions, op.builtinOptionsType = None, 0
        return f"{where}: no options"
    fields = sorted(vars(op.builtinOptions))
    if not fields:
        return f"{where}: options without fields"
    field = dice.choice(fields)
    old = getattr(op.builtinOptions, field)
    new: Any = old
    if isinstance(old, bool):
        new = not old
    elif isinstance(old, int):
        new = _number(dice, old, 8)
    elif isinstance(old, float):
        new = dice.choice((*_FLOATS, float("nan")))
    elif isinstance(old, np.ndarray | list):
        new = _edited(old, dice, 8)
    setattr(op.builtinOptions, field, new)
    return f"{where}: {field} {new!r:.40}"


def _buffer(model: Any, dice: random.Random) -> str:
    index = dice.randrange(len(model.buffers))
    buffer = model.buffers[index]
    data = b"" if buffer.data is None else bytes(np.asarray(buffer.data, np.uint8))
    kind = dice.choice(("shorter", "longer", "empty", "values", "values", "behind"))
    if kind == "shorter":
        data = data[: dice.randrange(len(data) + 1)]
    elif kind == "longer":
        data += bytes(dice.choice((1, 4, 1000)))
    elif kind == "empty":
        data = b""
    elif kind == "behind":
        buffer.offset = dice.choice((2, 8, 100, 10_000, 2**32, 2**64 - 64))
        buffer.size = dice.choice((0, 4, 100, 2**31, 2**63, 64))
        buffer.data = None
        return f"buffer {index}: {buffer.size} bytes at {buffer.offset}"
    elif len(data) >= 4:
        at = dice.randrange(len(data) // 4) * 4
        data = data[:at] + struct.pack("<i", dice.choice(_NUMBERS)) + data[at + 4 :]
    buffer.data = np.frombuffer(data, np.uint8)
    return f"buffer {index}: {kind}, {len(data)} bytes"


def _constants(model: Any, most_bytes: int) -> list[tuple[str, Any, Any]]:
    """Return place, tensor and buffer of each constant of no more than so many bytes."""
    return [
        (f"tensor {number}:{index}", tensor, model.buffers[tensor.buffer])
        for number, graph in enumerate(model.subgraphs)
        for index, tensor in enumerate(graph.tensors)
        if 0 < tensor.buffer < len(model.buffers)
        and model.buffers[tensor.buffer].data is not None
        and 4 <= len(model.buffers[tensor.buffer].data) <= most_bytes
    ]


def _axes(model: Any, dice: random.Random) -> str:
    """Change numbers of a constant that may be axes, sizes or paddings."""
    found = _constants(model, 32)
    if not found:
        return "no small constants"
    where, _, buffer = dice.choice(found)
    data = bytearray(np.asarray(buffer.data, np.uint8))
    for _ in range(dice.choice((1, 1, 2))):
        at = dice.randrange(len(data) // 4) * 4
        data[at : at + 4] = struct.pack("<i", dice.randrange(-4, 6))
    buffer.data = np.frombuffer(bytes(data), np.uint8)
    return (
        f"{where}: words {[word for (word,) in struct.iter_unpack('<i', data[: len(data) & ~3])]}"
    )


def _resized(model: Any, dice: random.Random) -> str:
    """Change the length of an axis of a constant, and its data with it."""
    found = [
        each
        for each in _constants(model, 1 << 16)
        if each[1].shape is not None and len(each[1].shape)
    ]
    if not found:
        return "no constants of an axis"
    where, tensor, buffer = dice.choice(found)
    shape, data = _listed(tensor.shape), bytes(np.asarray(buffer.data, np.uint8))
    axis, before = dice.randrange(len(shape)), max(1, math.prod(shape))
    shape[axis] = max(0, dice.choice((0, 1, shape[axis] - 1, shape[axis] + 1, shape[axis] * 2)))
    size = -(-math.prod(shape) * len(data) // before)
    buffer.data = np.frombuffer((data * (size // len(data) + 1))[:size], np.uint8)
    tensor.shape, tensor.shapeSignature = np.array(shape, np.int32), None
    return f"{where}: a constant of {shape}"


def _order(model: Any, dice: random.Random) -> str:
    number, graph = _graph(model, dice)
    kind = dice.choice(("shuffle", "double", "drop"))
    if not graph.operators:
        return f"subgraph {number}: no ops"
    at = dice.randrange(len(graph.operators))
    if kind == "shuffle":
        dice.shuffle(graph.operators)
    elif kind == "double":
        graph.operators.insert(at, graph.operators[at])
    else:
        del graph.operators[at]
    return f"subgraph {number}: ops {kind} at {at}"


def _signature(model: Any, dice: random.Random) -> str:
    if not model.signatureDefs:
        model.signatureDefs = []
        entry = schema.SignatureDefT()
        entry.signatureKey, entry.inputs, entry.outputs = "added", [], []
        model.signatureDefs.append(entry)
    at = dice.randrange(len(model.signatureDefs))
    entry = model.signatureDefs[at]
    kind = dice.choice(("subgraph", "tensor", "tensor", "name", "key", "drop", "double"))
    borders = dice.choice((entry.inputs, entry.outputs))
    if kind == "subgraph":
        entry.subgraphIndex = dice.choice((0, 1, len(model.subgraphs), 2**31))
    elif kind == "key":
        entry.signatureKey = dice.choice((None, "", "serving_default", "x" * 1000))
    elif not borders:
        return f"signature {at}: nothing to change"
    elif kind == "tensor":
        dice.choice(borders).tensorIndex = dice.choice((0, 1, 2, 3, 99, 2**31))
    elif kind == "name":
        dice.choice(borders).name = dice.choice((None, "", "args_0", b"\xff"))
    elif kind == "drop":
        del borders[dice.randrange(len(borders))]
    else:
        borders.append(borders[0])
    return f"signature {at}: {kind}"


def _sparsity(model: Any, dice: random.Random) -> str:
    where, tensor = _tensor(model, dice)
    sparsity = tensor.sparsity
    if sparsity is None:
        from fixtures.tflite.writer import sparse_row

        tensor.sparsity = sparse_row()
        return f"{where}: made sparse"
    field = dice.choice(("traversalOrder", "blockMap", "dimMetadata", "arrays", "arrays"))
    if field in ("traversalOrder", "blockMap"):
        setattr(sparsity, field, _edited(getattr(sparsity, field), dice, 4))
    elif not sparsity.dimMetadata:
        sparsity.dimMetadata = None
    elif field == "dimMetadata":
        at = dice.randrange(len(sparsity.dimMetadata))
        if dice.random() < 0.5:
            del sparsity.dimMetadata[at]
        else:
            sparsity.dimMetadata[at].denseSize = _number(
                dice, sparsity.dimMetadata[at].denseSize, 8
            )
    else:
        side = dice.choice(sparsity.dimMetadata)
        held = dice.choice((side.arraySegments, side.arrayIndices))
        if held is not None:
            held.values = _edited(held.values, dice, 4)
    return f"{where}: sparsity {field}"


_STRUCTURED: tuple[Callable[[Any, random.Random], str], ...] = (
    _operands, _operands, _borders, _shape, _shape, _type, _quantization, _quantization,
    _flags, _opcode, _options, _options, _buffer, _buffer, _axes, _resized, _order, _signature,
    _sparsity,
)  # fmt: skip
