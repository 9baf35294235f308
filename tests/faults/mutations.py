"""Damage to a `.tflite` file, drawn from a seed: of its bytes, or of what they mean."""

from __future__ import annotations

import random
import struct
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from fixtures.tflite.writer import pack, sparse_row, unpack

_NUMBERS = (-(2**31), -2, -1, 0, 1, 2, 3, 7, 127, 128, 255, 65535, 2**16, 2**20, 2**30, 2**31 - 1)
_FLOATS = (0.0, -0.0, -1.0, 1.0, 1e-45, 1e-30, 1e-9, 1e9, 3e38, float("inf"), -float("inf"))

# How often an object and a field is drawn, where it is not once.
_KINDS = {"OperatorT": 5, "TensorT": 3, "QuantizationParametersT": 3}
_FIELDS = {"inputs": 4, "outputs": 3, "shape": 4, "buffer": 2, "data": 3, "scale": 5}
_UNREAD = (
    *("metadata", "min", "max", "hasRank", "variantTensors", "debugMetadataIndex"),
    *("externalBufferGroups", "mutatingVariableInputs", "customOptionsFormat"),
)


def mutate_tflite(content: bytes, dice: random.Random) -> tuple[bytes, str]:
    """
    Return the file with one to three mutations, and what they were.

    Half of the files are damaged without regard to their structure, half are whole flatbuffers with
    wrong values in them.
    """
    if dice.random() < 0.5:
        return mutate_bytes(content, dice)
    model = unpack(content)
    told = [_mutate_object(model, dice) for _ in range(dice.choice((1, 1, 1, 2, 3)))]
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
            number = struct.pack("<i", dice.choice(_NUMBERS))
            damaged[word : word + 4] = number[: len(damaged) - word]
        elif kind in ("swap", "splice"):
            other = dice.randrange(len(damaged)) // 4 * 4
            length = min(dice.choice((4, 4, 16)), len(damaged) - max(word, other))
            taken = bytes(damaged[other : other + length])
            if kind == "swap":
                damaged[other : other + length] = damaged[word : word + length]
            damaged[word : word + length] = taken
        else:
            del damaged[at : None if kind == "cut" else at + dice.randrange(1, 9)]
    return bytes(damaged), f"{kind} at {', '.join(map(str, places))}"


def _objects(value: Any, path: str = "model") -> list[tuple[str, Any]]:
    """Return every object of the schema below one, by its path."""
    if isinstance(value, list):
        parts = [_objects(each, f"{path}[{i}]") for i, each in enumerate(value)]
    elif type(value).__module__ == schema.__name__:
        parts = [_objects(each, f"{path}.{name}") for name, each in vars(value).items()]
        parts.append([(path, value)])
    else:
        return []
    return [each for part in parts for each in part]


def _mutate_object(model: Any, dice: random.Random) -> str:
    """Change one field of one object."""
    found = _objects(model)
    kinds = [type(each).__name__ for _, each in found]
    weights = [_KINDS.get(kind, 5 if "Options" in kind else 1) for kind in kinds]
    [(path, holder)] = dice.choices(found, weights)
    names = [name for name in sorted(vars(holder)) if name not in _UNREAD]
    if not names:
        return f"{path}: no fields"
    [name] = dice.choices(names, [_FIELDS.get(name, 1) for name in names])
    new = _other(holder, name, dice, len(model.buffers))
    setattr(holder, name, new)
    return f"{path}.{name}: {type(new).__name__} {new!r:.60}"


def _other(holder: Any, name: str, dice: random.Random, near: int) -> Any:
    """Return another value of a field: of its type, or of what the schema has there."""
    old = getattr(holder, name)
    if name == "data":
        return _data(b"" if old is None else bytes(np.asarray(old, np.uint8)), dice)
    if name in ("offset", "size"):
        holder.data = None
        return dice.choice((0, 2, 4, 64, 100, 10_000, 2**31, 2**32, 2**63, 2**64 - 64))
    if name == "type" and hasattr(holder, "quantization"):
        return dice.randrange(22)
    if name == "builtinCode":
        holder.deprecatedBuiltinCode = dice.randrange(128)
        return dice.randrange(-1, 212)
    if name.startswith("builtinOptions") and dice.random() < 0.5:
        kind = dice.choice([each for each in vars(schema.BuiltinOptions) if each[0] != "_"])
        holder.builtinOptionsType = getattr(schema.BuiltinOptions, kind)
        holder.builtinOptions = None if kind == "NONE" else getattr(schema, f"{kind}T")()
        return getattr(holder, name)
    if name == "sparsity" and old is None:
        return sparse_row()
    if name == "quantization" and old is None:
        old = schema.QuantizationParametersT()
        old.scale, old.zeroPoint = np.array([0.5], np.float32), np.zeros(1, np.int64)
        return old
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        near_one = old + 1, old - 1, old ^ (1 << dice.randrange(31)), dice.randrange(-1, near + 2)
        return dice.choice((*near_one, dice.choice(_NUMBERS)))
    if isinstance(old, float) or name in ("scale", "min", "max"):
        floats = (*_FLOATS, float("nan"))
        return dice.choice(floats) if isinstance(old, float) else _edited(old, dice, floats, float)
    if isinstance(old, (bytes, str)) or name in ("name", "signatureKey", "description"):
        return dice.choice((None, "", b"\xff\xfe", "x" * 10_000, "a/b;c:0", "serving_default"))
    if isinstance(old, np.ndarray) or name in ("shape", "shapeSignature", "zeroPoint", "inputs"):
        numbers = (*_NUMBERS, *range(-1, near + 1))
        return _edited(old, dice, numbers, int)
    return _edited(old, dice, (), None) if isinstance(old, list) and old else None


def _edited(values: Any, dice: random.Random, others: Any, kind: Any) -> Any:
    """Return a vector with an element changed, dropped, doubled, exchanged, or all of it gone."""
    array = [] if values is None else list(values)
    way = dice.choice(("change", "change", "change", "drop", "add", "clear", "swap"))
    at = dice.randrange(len(array)) if array else 0
    if others and (way == "add" or not array):
        array.insert(at, dice.choice(others))
    elif others and way == "change":
        array[at] = dice.choice(others)
    elif way == "drop":
        del array[at]
    elif way == "clear":
        array = []
    else:
        other = dice.randrange(len(array))
        array[at], array[other] = array[other], array[at]
    if kind is None:
        return array if way != "add" else [*array, array[at]]
    if kind is float:
        return np.array(array, np.float32)
    return np.array(array, np.int64).astype(getattr(values, "dtype", np.int32))


def _data(data: bytes, dice: random.Random) -> Any:
    """Return other content of a buffer: of another length, or with another number in it."""
    kind = dice.choice(("shorter", "longer", "empty", "values", "values", "values"))
    if kind == "shorter":
        data = data[: dice.randrange(len(data) + 1)]
    elif kind == "longer":
        data += bytes(dice.choice((1, 4, 1000)))
    elif kind == "empty":
        data = b""
    elif len(data) >= 4:
        at = dice.randrange(len(data) // 4) * 4
        # Small ones may be axes, sizes or paddings.
        number = dice.choice((dice.randrange(-4, 6), dice.choice(_NUMBERS)))
        data = data[:at] + struct.pack("<i", number) + data[at + 4 :]
    return np.frombuffer(data, np.uint8)
