"""Write weights quantized by torch into the float `.tflite` of the same model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from pytest_edgeq.litert.libraries import recipe_module
from pytest_edgeq.tflite.ops import facts_of

if TYPE_CHECKING:
    import numpy.typing as npt


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """The quantized weight of one layer."""

    name: str  # of the torch parameter
    codes: npt.NDArray[np.int8]  # int8, in the weight's shape, whatever the bits
    # float32, one for the tensor, for each channel along `axis`, or for each block
    scales: npt.NDArray[np.float32]
    zero_points: npt.NDArray[np.int64]  # int64, as many as scales
    values: npt.NDArray[np.float32]  # float32, the dequantized codes
    bits: int  # of a code as stored in a file: 2, 4 or 8
    axis: int | None  # axis of the channels; None for one scale
    block: int  # codes along the last axis that share a scale; 0 for all of a channel's
    # Whether the op quantizes its activations at run time; else the weight is dequantized
    dynamic: bool

    @property
    def meaning(self) -> tuple[Any, ...]:
        """A key, equal for weights that are stored alike."""
        parts = (self.codes, self.scales, self.zero_points)
        arrays = tuple(array.tobytes() for array in parts)
        return (*arrays, self.bits, self.axis, self.block, self.dynamic)


# A constant is identified by its shape and its bytes.
_Key: TypeAlias = tuple[Any, ...]
_Placed: TypeAlias = dict[_Key, QuantizedWeight]


def write_weights(
    float_tflite: bytes, weights: Iterable[QuantizedWeight]
) -> tuple[bytes, tuple[str, ...]]:
    """
    Replace the float weights of a file by their codes.

    A constant of the file is identified by its values: they must be a weight's, or a multiple of it
    for each row. Blocks behind a DEQUANTIZE, which its kernels do not support, are stored as the
    rows of a longer matrix, with a RESHAPE behind them.

    Also return the names of the weights that are nowhere in the file, or belong to an op without
    kernels for quantized weights; in that case the file is the float one.
    """
    known: _Placed = {}
    for weight in weights:
        same_values = known.setdefault(_key(weight.values), weight)
        if same_values.meaning != weight.meaning:
            raise ValueError(
                f"{same_values.name} and {weight.name} hold the same values, which the file stores "
                "once, but are quantized differently: give both one config, or leave one in float"
            )
    model = recipe_module("utils.tfl_flatbuffer_utils").read_model(float_tflite)
    placed, missing = _place(model, known)
    if missing:
        return float_tflite, missing
    placed = dict(_reshape_blocks(model, placed))
    modifier = recipe_module("model_modifier").ModelModifier(model)
    return bytes(modifier.modify_model(_plan(model, placed))), ()


def _key(values: npt.NDArray[np.float32]) -> _Key:
    return (*values.shape, values.tobytes())


@dataclass(frozen=True, slots=True)
class _Use:
    """One use of a float constant; `in_place` if the op's kernels support integers."""

    subgraph: Any
    index: int
    tensor: Any
    values: npt.NDArray[np.float32]
    in_place: bool


def _constants(model: Any) -> Iterator[_Use]:
    qtyping = recipe_module("qtyping")
    get_tensor_data = recipe_module("utils.tfl_flatbuffer_utils").get_tensor_data
    codes = vars(qtyping.BuiltinOperator).items()
    names = {code: name for name, code in codes if isinstance(code, int)}
    for subgraph in model.subgraphs:
        for index, op in enumerate(subgraph.operators):
            kind = names.get(model.operatorCodes[op.opcodeIndex].builtinCode, "")
            for operand, position in enumerate(op.inputs):
                tensor = subgraph.tensors[position] if position >= 0 else None
                if tensor is None or tensor.type != qtyping.TensorType.FLOAT32:
                    continue
                values = get_tensor_data(tensor, model.buffers)
                if values is not None:
                    # Kernels that support int2 weights support every width.
                    facts = facts_of(kind)
                    in_place = "int2" in facts.dynamic and operand in facts.weights
                    yield _Use(subgraph, index, tensor, values, in_place)


def _place(model: Any, known: Mapping[_Key, QuantizedWeight]) -> tuple[_Placed, tuple[str, ...]]:
    """Return the file's new constants, and the names of weights without a place."""
    placed: _Placed = {}
    found: set[_Key] = set()
    misplaced: set[_Key] = set()
    for use in _constants(model):
        key = _key(use.values)
        if key in known:
            (found if use.in_place else misplaced).add(key)
            placed[key] = known[key]
        elif use.in_place:
            for origin, weight in known.items():
                scaled = _scaled(weight, use.values)
                if scaled is not None:
                    found.add(origin)
                    placed[key] = scaled
    missing = [w.name for key, w in known.items() if key not in found or key in misplaced]
    return placed, tuple(missing)


def _scaled(weight: QuantizedWeight, values: npt.NDArray[np.float32]) -> QuantizedWeight | None:
    """
    Return a weight with its rows multiplied to match values, or None.

    The converter folds the ops behind a layer into its weights: a batch norm, the scale of an
    attention. The codes are unchanged, and the scales are multiplied by the factors.
    """
    if values.shape != weight.values.shape or values.ndim != 2:
        return None
    # The first row distinguishes nearly all at a small cost.
    if _factors(weight.values[:1], values[:1]) is None:
        return None
    factors = _factors(weight.values, values)
    # One number a row always matches by some factor: several must agree.
    if factors is None or np.count_nonzero(values) < len(values) + 8:
        return None
    flipped = factors < 0
    lowest = -(2 ** (weight.bits - 1))
    if not factors.all() or (
        flipped.any() and (weight.zero_points.any() or (weight.codes[flipped] == lowest).any())
    ):
        # A scale cannot be 0; the lowest code has no opposite, nor have codes with a zero point.
        return None
    amounts = np.abs(factors)[:, None]
    if weight.axis != 0 and not weight.block:
        if np.ptp(factors) > 2**-20 * amounts[0, 0]:
            return None
        amounts = amounts[:1]
    return replace(
        weight,
        codes=np.where(flipped[:, None], -weight.codes, weight.codes),
        scales=(weight.scales.reshape(len(amounts), -1) * amounts).ravel(),
        values=values,
    )


def _factors(
    before: npt.NDArray[np.float32], after: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32] | None:
    """Return the factor of each row, or None if a row has several."""
    row = np.arange(len(before))
    largest = np.abs(before).argmax(axis=1)
    divisor = before[row, largest]
    factors = np.divide(after[row, largest], divisor, out=np.ones_like(divisor), where=divisor != 0)
    # Each of a product's roundings is 2⁻²⁴ of it; constants may be folded in several steps.
    close = np.allclose(after, factors[:, None] * before, rtol=2**-20, atol=0)
    return factors if close else None


def _reshape_blocks(
    model: Any, placed: Mapping[_Key, QuantizedWeight]
) -> Iterator[tuple[_Key, QuantizedWeight]]:
    """Store dequantized weights in blocks as rows before a RESHAPE; yield all weights."""
    for key, weight in placed.items():
        if weight.dynamic or not weight.block:
            yield key, weight
            continue
        uses = {id(use.tensor): use for use in _constants(model) if _key(use.values) == key}
        for use in uses.values():
            _insert_reshape(model, use.subgraph, use.tensor, weight.block)
        codes = weight.codes.reshape(-1, weight.block)
        values = weight.values.reshape(-1, weight.block)
        yield _key(values), replace(weight, codes=codes, values=values, axis=0, block=0)


def _insert_reshape(model: Any, subgraph: Any, tensor: Any, block: int) -> None:
    qtyping = recipe_module("qtyping")
    add_op_code = recipe_module("transformations.transformation_utils").add_op_code
    whole = np.array(tensor.shape, np.int32)
    rows = type(tensor)(**vars(tensor))
    rows.name = tensor.name + b"_blocks"
    rows.shape = [int(whole.prod()) // block, block]
    tensor.buffer = 0
    shape = qtyping.TensorT(
        name=tensor.name + b"_shape",
        shape=[len(whole)],
        type=qtyping.TensorType.INT32,
        buffer=len(model.buffers),
    )
    model.buffers.append(qtyping.BufferT(data=whole.view(np.uint8)))
    op = qtyping.OperatorT(
        opcodeIndex=add_op_code(qtyping.BuiltinOperator.RESHAPE, model.operatorCodes),
        inputs=[len(subgraph.tensors), len(subgraph.tensors) + 1],
        outputs=[next(i for i, each in enumerate(subgraph.tensors) if each is tensor)],
    )
    subgraph.tensors += [rows, shape]
    subgraph.operators.insert(0, op)


def _plan(model: Any, placed: Mapping[_Key, QuantizedWeight]) -> dict[str, Any]:
    """Return the library's transformations of each weight tensor."""
    qtyping = recipe_module("qtyping")
    parameters = {key: _parameters(weight) for key, weight in placed.items()}
    plan: dict[str, Any] = {}
    for use in _constants(model):
        key = _key(use.values)
        if key not in placed:
            continue
        change = qtyping.QuantTransformation.ADD_DEQUANTIZE
        if placed[key].dynamic:
            change = qtyping.QuantTransformation.QUANTIZE_TENSOR
        name = use.tensor.name.decode()
        entry = plan.setdefault(name, qtyping.TensorTransformationParams(name, None, []))
        entry.consumers.append(qtyping.OpToTensorParams(use.index, [change], parameters[key]))
    return plan


def _parameters(weight: QuantizedWeight) -> Any:
    scales, zero_points = weight.scales, weight.zero_points
    if weight.block:
        # The library keeps their shape: one row of blocks a channel.
        scales = scales.reshape(weight.codes.shape[0], -1)
    return recipe_module("qtyping").UniformQuantParams(
        num_bits=weight.bits,
        quantized_dimension=weight.axis,
        scale=scales,
        zero_point=zero_points,
        symmetric=not zero_points.any(),
        quantized_data=weight.codes,
        block_size=weight.block,
    )
