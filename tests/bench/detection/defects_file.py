"""
Defects written into the file.

`defect(content, kind, seed)` draws a place for a kind of defect and gives the changed file, or None
where the file has no such place. A place counts only if the file changes and still runs on both
kernels that everybody has: what does not load is no defect that a test is needed for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter, OpResolverType

from tests.bench.detection import defects_ops
from tests.bench.detection.flatfile import Array, FlatFile, Stored, shuffled

_RELU = schema.ActivationFunctionType.RELU
_RELU6 = schema.ActivationFunctionType.RELU6
_RELU_N1_TO_1 = schema.ActivationFunctionType.RELU_N1_TO_1
_NONE = schema.ActivationFunctionType.NONE
_FLOAT32 = schema.TensorType.FLOAT32
_INT8 = schema.TensorType.INT8
_UINT8 = schema.TensorType.UINT8
_INT32_MAX = 2**31 - 1

_STRIDED = ("CONV_2D", "DEPTHWISE_CONV_2D", "MAX_POOL_2D", "AVERAGE_POOL_2D")
_MADE_FLOAT = (*("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED"), "ADD", "MUL", "MAX_POOL_2D")


@dataclass(frozen=True)
class Defect:
    """One defect in one file."""

    kind: str  # as in `KINDS`
    place: str  # what was changed, in words
    tflite: bytes = field(repr=False)  # the file with the defect
    # where it sits: indices in the ORIGINAL file, any of which is a right answer; empty where it
    # sits in no single layer
    ops: frozenset[int]
    # for each op of the changed file the op of the original that it belongs to
    origins: tuple[int | None, ...] = field(repr=False)


Applied = tuple[str, frozenset[int]] | None  # words for it, and the ops that it sits in


@dataclass(frozen=True)
class Kind:
    """A kind of defect."""

    places: Callable[[FlatFile], Iterable[Any]]  # where it may be written into a file
    # writes it at one of them; gives the words for it and the ops that it sits in, None where
    # nothing would change
    apply: Callable[[FlatFile, Any, Random], Applied]


def defect(content: bytes, kind: str, seed: int = 0) -> Defect | None:
    """Write a defect into a file, at a place drawn by the seed."""
    # Text, because Python's own hash of a tuple differs from run to run.
    rng = Random(f"{kind} {seed}")
    sound = FlatFile(content).content()
    for place in shuffled(list(KINDS[kind].places(FlatFile(content))), rng):
        file = FlatFile(content)
        done = KINDS[kind].apply(file, place, rng)
        if done is None:
            continue
        changed = file.content()
        if changed != sound and runs(changed):
            return Defect(kind, done[0], changed, done[1], tuple(file.origins))
    return None


def runs(content: bytes) -> bool:
    """Whether a file allocates and runs on XNNPACK and on the builtin kernels."""
    for resolver in (OpResolverType.BUILTIN, OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES):
        try:
            interpreter = Interpreter(
                model_content=content, experimental_op_resolver_type=resolver, num_threads=1
            )
            interpreter.allocate_tensors()
            for detail in interpreter.get_input_details():
                interpreter.set_tensor(
                    detail["index"], np.zeros(detail["shape"], dtype=detail["dtype"])
                )
            interpreter.invoke()
        except (RuntimeError, ValueError):
            return False
    return True


# What each kind changes. -----------------------------------------------------------------------


def _activation_scale(factor: float) -> Kind:
    def apply(file: FlatFile, tensor: int, _: Random) -> Applied:
        _scale(file, tensor, factor, [0])
        return f"scale of {_made(file, tensor)} × {factor}", _producer(file, tensor)

    return Kind(FlatFile.activations, apply)


def _weight_scale(factor: float, *, one: bool) -> Kind:
    def apply(file: FlatFile, weight: Stored, rng: Random) -> Applied:
        count = len(file.scales(weight.tensor))
        if one and count == 1:
            return None
        channels = [rng.randrange(count)] if one else list(range(count))
        _scale(file, weight.tensor, factor, channels)
        which = f"channel {channels[0]}" if one else "all channels"
        return f"weight scale of {_where(file, weight)}, {which}, × {factor}", weight.ops

    return Kind(FlatFile.weights, apply)


def _scale(file: FlatFile, tensor: int, factor: float, channels: list[int]) -> None:
    scales = np.array(file.scales(tensor), np.float32)
    scales[channels] *= np.float32(factor)
    file.tensor(tensor).quantization = _copy(file.tensor(tensor).quantization, scale=scales)


def _zero_point(step: int) -> Kind:
    def apply(file: FlatFile, tensor: int, rng: Random) -> Applied:
        quantization = file.tensor(tensor).quantization
        old = int(quantization.zeroPoint[0])
        signs = [sign for sign in (-1, 1) if -128 <= old + sign * step <= 127]
        change = rng.choice(signs) * step
        fresh = np.array([old + change], np.int64)
        file.tensor(tensor).quantization = _copy(quantization, zeroPoint=fresh)
        return f"zero point of {_made(file, tensor)} {change:+d}", _producer(file, tensor)

    return Kind(FlatFile.activations, apply)


def _weights(words: str, change: Callable[[FlatFile, Stored, Array, Random], Array | None]) -> Kind:
    def apply(file: FlatFile, weight: Stored, rng: Random) -> Applied:
        before = file.constant(weight.tensor)
        assert before is not None, "unreachable because weights() gives constants"
        after = change(file, weight, before.copy(), rng)
        if after is None or np.array_equal(before, after):
            return None
        file.store(weight.tensor, after)
        return f"{_where(file, weight)}: {words}", weight.ops

    return Kind(FlatFile.weights, apply)


def _one_bit(_: FlatFile, __: Stored, values: Array, rng: Random) -> Array:
    flat = values.reshape(-1).view(np.uint8)
    flat[rng.randrange(flat.size)] ^= 1 << rng.randrange(8)
    return values


def _largest(values: Array) -> int:
    return int(np.argmax(np.abs(values.astype(np.int32))))


def _sign_of_largest(_: FlatFile, __: Stored, values: Array, ___: Random) -> Array:
    flat = values.reshape(-1)
    flat[_largest(values)] = np.clip(-int(flat[_largest(values)]), -127, 127)
    return values


def _largest_zeroed(_: FlatFile, __: Stored, values: Array, ___: Random) -> Array:
    values.reshape(-1)[_largest(values)] = 0
    return values


def _channel(file: FlatFile, weight: Stored, values: Array, rng: Random) -> Array:
    """One output channel, a view with it first, drawn among those that are not all zero."""
    channels = np.moveaxis(values, file.channel_axis(weight), 0)
    alive = [i for i in range(len(channels)) if channels[i].any()]
    channel: Array = channels[rng.choice(alive)] if alive else channels[0]
    return channel


def _channel_zeroed(file: FlatFile, weight: Stored, values: Array, rng: Random) -> Array:
    _channel(file, weight, values, rng)[...] = 0
    return values


def _channel_negated(file: FlatFile, weight: Stored, values: Array, rng: Random) -> Array:
    channel = _channel(file, weight, values, rng)
    channel[...] = np.clip(-channel.astype(np.int32), -127, 127)
    return values


def _channel_rolled(file: FlatFile, weight: Stored, values: Array, rng: Random) -> Array:
    channel = _channel(file, weight, values, rng)
    channel[...] = np.roll(channel.reshape(-1), 1).reshape(channel.shape)
    return values


def _channels_swapped(file: FlatFile, weight: Stored, values: Array, rng: Random) -> Array | None:
    channels = np.moveaxis(values, file.channel_axis(weight), 0)
    if len(channels) < 2:
        return None
    first, second = rng.sample(range(len(channels)), 2)
    channels[[first, second]] = channels[[second, first]]
    return values


def _tensor_zeroed(_: FlatFile, __: Stored, values: Array, ___: Random) -> Array:
    return np.zeros_like(values)


def _tensor_negated(_: FlatFile, __: Stored, values: Array, ___: Random) -> Array:
    return np.clip(-values.astype(np.int32), -127, 127).astype(values.dtype)


def _tensor_permuted(file: FlatFile, weight: Stored, values: Array, _: Random) -> Array:
    return np.roll(values, 1, file.channel_axis(weight))


def _tensor_transposed(_: FlatFile, __: Stored, values: Array, ___: Random) -> Array:
    """Height for width in a kernel; else input for output channels, as the bytes lie."""
    if values.ndim == 4 and values.shape[1] == values.shape[2] > 1:
        return np.ascontiguousarray(values.swapaxes(1, 2))
    flat = values.reshape(values.shape[0], -1)
    return np.ascontiguousarray(flat.T).reshape(values.shape)


def _pairs(file: FlatFile) -> list[tuple[Stored, Stored]]:
    """Constants of one kind, dtype and size whose values differ, as pairs in either order."""
    return [
        (one, other)
        for one in [*file.weights(), *file.biases()]
        for other in [*file.weights(), *file.biases()]
        if one.tensor != other.tensor
        and one.kind == other.kind
        and file.tensor(one.tensor).type == file.tensor(other.tensor).type
        and _size(file, one) == _size(file, other)
        and not np.array_equal(_bytes(file, one), _bytes(file, other))
    ]


def _same_shaped(file: FlatFile) -> list[tuple[Stored, Stored]]:
    return [
        (one, other)
        for one, other in _pairs(file)
        if one.kind == "weight"
        and one.tensor < other.tensor
        and list(file.tensor(one.tensor).shape) == list(file.tensor(other.tensor).shape)
    ]


def _size(file: FlatFile, stored: Stored) -> int:
    return len(_bytes(file, stored))


def _bytes(file: FlatFile, stored: Stored) -> Array:
    data: Array = np.asarray(file.model.buffers[file.tensor(stored.tensor).buffer].data, np.uint8)
    return data


def _swap(file: FlatFile, pair: tuple[Stored, Stored], _: Random) -> Applied:
    one, other = pair
    first, second = file.tensor(one.tensor), file.tensor(other.tensor)
    first.buffer, second.buffer = second.buffer, first.buffer
    return f"{_where(file, one)} ↔ {_where(file, other)}: data", one.ops | other.ops


def _alias(file: FlatFile, pair: tuple[Stored, Stored], _: Random) -> Applied:
    one, other = pair
    file.tensor(one.tensor).buffer = file.tensor(other.tensor).buffer
    return f"{_where(file, one)} reads the buffer of {_where(file, other)}", one.ops


def _bias(step: int | None) -> Kind:
    def apply(file: FlatFile, bias: Stored, rng: Random) -> Applied:
        values = file.constant(bias.tensor)
        assert values is not None, "unreachable because biases() gives constants"
        at = rng.randrange(values.size)
        sign = rng.choice((-1, 1))
        old = int(values.reshape(-1)[at])
        new = sign * _INT32_MAX if step is None else old + sign * step
        if not -_INT32_MAX <= new <= _INT32_MAX or new == old:
            return None
        values.reshape(-1)[at] = new
        file.store(bias.tensor, values)
        return f"{_where(file, bias)}: [{at}] {old} → {new}", bias.ops

    return Kind(FlatFile.biases, apply)


def _option_ops(field: str) -> Callable[[FlatFile], list[int]]:
    def places(file: FlatFile) -> list[int]:
        return [
            position
            for position, op in enumerate(file.operators)
            if hasattr(op.builtinOptions, field)
        ]

    return places


def _activation_dropped(file: FlatFile, op: int, _: Random) -> Applied:
    options = file.operators[op].builtinOptions
    if options.fusedActivationFunction == _NONE:
        return None
    options.fusedActivationFunction = _NONE
    return f"fused activation of #{op} {file.name(op)} dropped", frozenset((op,))


def _activation_swapped(file: FlatFile, op: int, rng: Random) -> Applied:
    options = file.operators[op].builtinOptions
    old = options.fusedActivationFunction
    new = rng.choice([kind for kind in (_RELU, _RELU6, _RELU_N1_TO_1) if kind != old])
    options.fusedActivationFunction = new
    return f"fused activation of #{op} {file.name(op)}: {old} → {new}", frozenset((op,))


def _stride(file: FlatFile, op: int, _: Random) -> Applied:
    if file.name(op) not in _STRIDED:
        return None
    options = file.operators[op].builtinOptions
    new = 2 if options.strideH == 1 else 1
    options.strideH = options.strideW = new
    return f"stride of #{op} {file.name(op)}: {new}", frozenset((op,))


def _padding(file: FlatFile, op: int, _: Random) -> Applied:
    if file.name(op) not in _STRIDED:
        return None
    options = file.operators[op].builtinOptions
    same, valid = schema.Padding.SAME, schema.Padding.VALID
    options.padding = valid if options.padding == same else same
    return f"padding of #{op} {file.name(op)}: SAME ↔ VALID", frozenset((op,))


def _output_pairs(file: FlatFile) -> list[tuple[int, int]]:
    outputs = [int(tensor) for tensor in file.graph.outputs]
    shapes = [list(file.tensor(tensor).shape) for tensor in outputs]
    return [
        (outputs[i], outputs[j])
        for i in range(len(outputs))
        for j in range(i)
        if shapes[i] == shapes[j]
    ]


def _outputs_swapped(*, names_only: bool) -> Kind:
    def apply(file: FlatFile, pair: tuple[int, int], _: Random) -> Applied:
        one, other = pair
        swap = {one: other, other: one}
        if not names_only:
            file.graph.outputs = [swap.get(int(t), int(t)) for t in file.graph.outputs]
        for signature in file.model.signatureDefs:
            for entry in signature.outputs:
                entry.tensorIndex = swap.get(entry.tensorIndex, entry.tensorIndex)
        return f"outputs {one} and {other} swapped", frozenset()

    return Kind(_output_pairs, apply)


def _pair_inserted(file: FlatFile, tensor: int, _: Random) -> Applied:
    op = file.producer(tensor)
    assert op is not None, "unreachable because activations() gives what ops make"
    real = file.add_tensor(tensor, "inserted_real", type=_FLOAT32, quantization=None)
    again = file.add_tensor(tensor, "inserted_codes")
    file.reread(tensor, again, file.readers(tensor))
    file.rename_output(tensor, again)
    file.insert(op + 1, "DEQUANTIZE", tensor, real, op)
    file.insert(op + 2, "QUANTIZE", real, again, op)
    return f"DEQUANTIZE and QUANTIZE behind #{op} {file.name(op)}", frozenset((op,))


def _float_places(file: FlatFile) -> list[int]:
    return [
        position
        for position, op in enumerate(file.operators)
        if file.name(position) in _MADE_FLOAT and all(file.is_quantized(int(t)) for t in op.outputs)
    ]


def _made_float(file: FlatFile, op: int, _: Random) -> Applied:
    """As non-strict export leaves an op: its constants float, its activations converted."""
    record = file.operators[op]
    (output,) = (int(tensor) for tensor in record.outputs)
    inputs, before = [], 0
    for tensor in (int(each) for each in record.inputs):
        values = None if tensor < 0 else file.constant(tensor)
        if tensor < 0:
            inputs.append(tensor)
        elif values is not None:
            real = _dequantized(file, tensor, values)
            buffer = file.add_buffer(real)
            inputs.append(
                file.add_tensor(
                    tensor, "constant_real", type=_FLOAT32, quantization=None, buffer=buffer
                )
            )
        elif file.is_quantized(tensor):
            fresh = file.add_tensor(tensor, "input_real", type=_FLOAT32, quantization=None)
            file.insert(op + before, "DEQUANTIZE", tensor, fresh, op)
            inputs.append(fresh)
            before += 1
        else:
            return None
    made = file.add_tensor(output, "output_real", type=_FLOAT32, quantization=None)
    record.inputs, record.outputs = inputs, [made]
    file.insert(op + before + 1, "QUANTIZE", made, output, op)
    return f"#{op} {file.name(op + before)} in float", frozenset((op,))


def _dequantized(file: FlatFile, tensor: int, values: Array) -> Array:
    quantization = file.tensor(tensor).quantization
    scales = np.array(file.scales(tensor), np.float32)
    points = np.asarray(quantization.zeroPoint, np.float32)
    shape = [1] * values.ndim
    if len(scales) > 1:
        shape[quantization.quantizedDimension] = len(scales)
        points = points.reshape(shape) if len(points) == len(scales) else points
        scales = scales.reshape(shape)
    real: Array = ((values - points) * scales).astype(np.float32)
    return real


def _borders(file: FlatFile) -> list[tuple[str, int]]:
    inputs = [("input", int(tensor)) for tensor in file.graph.inputs]
    return [*inputs, *(("output", int(tensor)) for tensor in file.graph.outputs)]


def _border_dtype(file: FlatFile, place: tuple[str, int], rng: Random) -> Applied:
    side, tensor = place
    record = file.tensor(tensor)
    if file.is_quantized(tensor):
        (scale,), point = file.scales(tensor), int(record.quantization.zeroPoint[0])
        kinds = [_FLOAT32, _UINT8] if record.type == _INT8 else [_FLOAT32]
        kind = rng.choice(kinds)
        point += 128
    elif record.type == _FLOAT32 and side == "output":
        # Wide enough for the signals of small models: ±4.
        kind, scale, point = _INT8, 1 / 32, 0
    else:
        return None
    quantization = None
    if kind != _FLOAT32:
        quantization = schema.QuantizationParametersT()
        quantization.scale = np.array([scale], np.float32)
        quantization.zeroPoint = np.array([point], np.int64)
    fresh = file.add_tensor(tensor, f"{side}_border", type=kind, quantization=quantization)
    if side == "input":
        first = min(file.readers(tensor))
        file.rename_input(tensor, fresh)
        file.insert(0, "QUANTIZE", fresh, tensor, first)
    else:
        maker = file.producer(tensor)
        if maker is None:
            return None
        file.rename_output(tensor, fresh)
        name = "DEQUANTIZE" if kind == _FLOAT32 else "QUANTIZE"
        file.insert(len(file.operators), name, tensor, fresh, maker)
    return f"{side} {tensor}: type {record.type} → {kind}", frozenset()


def _copy(quantization: Any, **fields: Any) -> Any:
    """A copy, because tensors of an object tree may share one."""
    fresh = schema.QuantizationParametersT()
    for name, value in vars(quantization).items():
        setattr(fresh, name, fields.get(name, value))
    return fresh


def _producer(file: FlatFile, tensor: int) -> frozenset[int]:
    op = file.producer(tensor)
    return frozenset() if op is None else frozenset((op,))


def _made(file: FlatFile, tensor: int) -> str:
    op = file.producer(tensor)
    return f"tensor {tensor}" if op is None else f"what #{op} {file.name(op)} makes"


def _where(file: FlatFile, stored: Stored) -> str:
    op = max(stored.ops)
    return f"{stored.kind} of #{op} {file.name(op)}"


KINDS: dict[str, Kind] = {
    "activation scale × 1.02": _activation_scale(1.02),
    "activation scale × 1.1": _activation_scale(1.1),
    "activation scale × 2": _activation_scale(2.0),
    "weight scale × 1.02, one channel": _weight_scale(1.02, one=True),
    "weight scale × 1.1, one channel": _weight_scale(1.1, one=True),
    "weight scale × 2, one channel": _weight_scale(2.0, one=True),
    "weight scale × 1.02, all channels": _weight_scale(1.02, one=False),
    "weight scale × 1.1, all channels": _weight_scale(1.1, one=False),
    "weight scale × 2, all channels": _weight_scale(2.0, one=False),
    "zero point ± 1": _zero_point(1),
    "zero point ± 8": _zero_point(8),
    "weight: one bit": _weights("one bit", _one_bit),
    "weight: sign of the largest": _weights("sign of the largest", _sign_of_largest),
    "weight: largest zeroed": _weights("largest zeroed", _largest_zeroed),
    "channel zeroed": _weights("a channel zeroed", _channel_zeroed),
    "channel negated": _weights("a channel negated", _channel_negated),
    "channel rolled by one": _weights("a channel rolled by one", _channel_rolled),
    "channels swapped": _weights("two channels swapped", _channels_swapped),
    "weights zeroed": _weights("zeroed", _tensor_zeroed),
    "weights negated": _weights("negated", _tensor_negated),
    "weights permuted": _weights("output channels rolled by one", _tensor_permuted),
    "weights transposed": _weights("transposed", _tensor_transposed),
    "weights swapped with same-shaped": Kind(_same_shaped, _swap),
    "bias ± 1": _bias(1),
    "bias ± 16": _bias(16),
    "bias to INT32 limit": _bias(None),
    "fused activation dropped": Kind(_option_ops("fusedActivationFunction"), _activation_dropped),
    "fused activation swapped": Kind(_option_ops("fusedActivationFunction"), _activation_swapped),
    "stride changed": Kind(_option_ops("strideH"), _stride),
    "padding changed": Kind(_option_ops("padding"), _padding),
    "outputs swapped": _outputs_swapped(names_only=False),
    "outputs' names swapped": _outputs_swapped(names_only=True),
    "QUANTIZE/DEQUANTIZE inserted": Kind(FlatFile.activations, _pair_inserted),
    "op made float": Kind(_float_places, _made_float),
    "I/O dtype changed": Kind(_borders, _border_dtype),
    "buffers aliased": Kind(_pairs, _alias),
    "softmax sharper": Kind(defects_ops.softmaxes, defects_ops.sharper),
    "operands exchanged": Kind(defects_ops.ordered_operands, defects_ops.exchange),
    "operand replaced": Kind(defects_ops.replaceable, defects_ops.rewire),
    "transpose permuted": Kind(defects_ops.transposes, defects_ops.permute),
    "constant: largest zeroed": Kind(defects_ops.constants, defects_ops.erase),
    "constant rolled by one": Kind(defects_ops.constants, defects_ops.roll),
}
