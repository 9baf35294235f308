"""
The constants of a file, held against the reference's.

One wrong bit of one weight moves a few activation codes by 1 LSB, which is what rounding does, too:
outputs cannot tell. The constants can, because how they come about leaves them no freedom. A code
is the nearest to its value, or the one that torch chose; a bias has the scale input × weight
(https://ai.google.dev/edge/litert/models/quantization_spec). So every rule here is derived, and
what breaks one is a defect.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pytest_edgeq.localize.differences import Claim, explain
from pytest_edgeq.tflite.graph import Op, OpGraph, Tensor
from pytest_edgeq.tflite.roles import StoredTensor

__all__ = [
    "INPUT_AT",
    "SAME_SCALE",
    "Constant",
    "check_bias",
    "check_weight",
    "input_scale_of",
    "read_constant",
    "to_file_layout",
    "unexpected_qparams",
]

Array: TypeAlias = npt.NDArray[Any]

_FOLDED = 2.0**-20
"""
How far, relatively, float32 may carry a folded constant from the exact one.

A weight behind a batch norm is w·γ/√(σ² + ε): five operations, each rounded by 2⁻²⁴ of its result,
and a quotient by the scale; libraries order them differently. 2⁻²⁰ leaves room for sixteen.
"""

_ROUNDED_PRODUCT = 2.0**-22
"""Of a bias's scale: one product, by libraries that round the factors first, or the result, too."""

_BFLOAT16 = 2.0**-8
"""
Half a step of bfloat16, whose mantissa has 7 bits.

ai-edge-quantizer 0.10.0 writes the scales of blocks so (`transformations/quantize_tensor.py`), also
of codes that torchao chose for the scales before they were rounded.
"""

SAME_SCALE = 2.0**-8
"""
Of two scales that an observer may have given one tensor, how far they are apart at most, relative.

Of two quantize nodes behind one tensor, each observed by itself, the converter (litert-torch
0.10.0) keeps one for the tensor and writes the bias by the other. Histograms of the same values
differ by a thousandth, and move a bias by as much; more is no sound file's.
"""

INPUT_AT = {
    **dict.fromkeys(("CONV_2D", "DEPTHWISE_CONV_2D", "CONV_3D", "FULLY_CONNECTED"), 0),
    **dict.fromkeys(("TRANSPOSE_CONV", "CONV_3D_TRANSPOSE"), 2),
}
"""Where ops with a bias have their input."""

# What a quantizer takes for the least scale, whatever the values: torchao's observers 2⁻¹² or
# float32's epsilon, ai-edge-quantizer a range of 1e-9 (over 127 for int8, over 7 for int4).
_LEAST_SCALE = 2.0**-12

_INT32 = np.iinfo(np.int32)
_FLOAT32 = (float(np.finfo(np.float32).min), float(np.finfo(np.float32).max))


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """
    A constant with all that its values depend on, in one layout.

    Attributes:
        dtype: As the file calls it: `int8`, `int4`, `float32`, …
        values: Codes as int64, or floats as they are.
        scales: float64, broadcasting to `values`; None where the values are floats.
        zero_points: int64, likewise.
        grouping: `per_tensor`, `per_channel`, `blockwise_<size>`; None for floats.
    """

    dtype: str
    values: Array
    scales: Array | None = None
    zero_points: Array | None = None
    grouping: str | None = None

    @classmethod
    def of_codes(
        cls,
        codes: Array,
        scales: Array | float,
        zero_points: Array | int = 0,
        *,
        axis: int | None = None,
        dtype: str = "int8",
    ) -> Constant:
        """
        Give what a graph with fake quantization holds.

        Args:
            codes: Integers, in torch's layout.
            scales: One, or one for each index along `axis`.
            zero_points: As many as scales, or one for all.
            axis: Of the channels; None for one scale.
            dtype: What the codes are stored as.
        """
        codes = np.asarray(codes).astype(np.int64)
        grouping = "per_tensor" if axis is None else "per_channel"
        spread = (_along(codes, np.asarray(each), axis) for each in (scales, zero_points))
        steps, offsets = spread
        return cls(dtype, codes, steps.astype(np.float64), offsets.astype(np.int64), grouping)

    @property
    def floats(self) -> Array:
        """What it stands for, float64."""
        if self.scales is None or self.zero_points is None:
            return self.values.astype(np.float64)
        floats: Array = (self.values - self.zero_points) * self.scales
        return floats


def read_constant(graph: OpGraph, op: Op, stored: StoredTensor) -> Constant:
    """
    Read what an op takes: the stored codes, turned as RESHAPE and TRANSPOSE turn them on the way.

    Args:
        graph: The file.
        op: Takes the constant.
        stored: Which, as `roles_of` gives it.

    Raises:
        ValueError: A sparse tensor, one in a file of its own, of a dtype without values (strings),
            or damaged: fewer elements than its shape says. The text says which.
    """
    tensor = stored.tensor
    values = _decoded(graph, tensor)
    parts = [values, *(_spread_parameters(graph, op, tensor) if tensor.is_quantized else ())]
    for name, argument in _carriers(graph, op, stored):
        parts = [_carry(np.broadcast_to(each, parts[0].shape), name, argument) for each in parts]
    if len(parts) == 1:
        return Constant(tensor.dtype, parts[0])
    return Constant(tensor.dtype, parts[0], parts[1], parts[2], tensor.granularity)


_BITS = {"int4": (4, True), "uint4": (4, False), "int2": (2, True), "uint2": (2, False)}


def _decoded(graph: OpGraph, tensor: Tensor) -> Array:
    if tensor.is_sparse:
        raise ValueError(f"tensor {tensor.name!r} is sparse: its values are not read")
    raw = graph.constant(tensor)
    if tensor.dtype in _BITS:
        values = _unpacked(raw, *_BITS[tensor.dtype])[: math.prod(tensor.shape)]
    elif tensor.dtype == "bfloat16":
        values = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        try:
            values = raw.view(np.dtype(tensor.dtype).newbyteorder("<"))
        except TypeError as error:
            raise ValueError(
                f"tensor {tensor.name!r}: {tensor.dtype} holds no numbers that could be compared"
            ) from error
    if values.size != math.prod(tensor.shape):
        raise ValueError(
            f"tensor {tensor.name!r}: its shape {list(tensor.shape)} has "
            f"{math.prod(tensor.shape)} elements, its data {values.size}"
        )
    values = values.reshape(tensor.shape)
    return values if tensor.is_floating_point else values.astype(np.int64)


def _unpacked(raw: npt.NDArray[np.uint8], bits: int, signed: bool) -> Array:
    """Codes of less than a byte; the first stands in the lowest bits."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes: Array = ((raw[:, None] >> shifts) & (2**bits - 1)).ravel().astype(np.int64)
    if signed:
        codes = np.where(codes >= 2 ** (bits - 1), codes - 2**bits, codes)
    return codes


def _spread_parameters(graph: OpGraph, op: Op, tensor: Tensor) -> tuple[Array, Array]:
    """Scales and zero points, broadcasting to the tensor's values."""
    scales = graph.scales(op, tensor).astype(np.float64)
    if tensor.block_scales < 0:
        axis = tensor.quantized_dimension if len(scales) > 1 else None
        like = np.empty(tensor.shape)
        return _along(like, scales, axis), _along(like, tensor.zero_points, axis)
    # Blocks lie along the last axis, one row of scales for each index of those before.
    if not tensor.block_size or tensor.block_zero_points >= 0:
        raise ValueError(
            f"tensor {tensor.name!r}: scales on several axes, or zero points for each block, are "
            "not read"
        )
    rows = (*tensor.shape[:-1], -1)
    return np.repeat(scales.reshape(rows), tensor.block_size, axis=-1), np.zeros(1, np.int64)


def _along(values: Array, each: Array, axis: int | None) -> Array:
    """One number for each index along an axis, shaped to broadcast to `values`."""
    if axis is None or each.size == 1:
        return each.reshape((1,) * values.ndim)
    return each.reshape([-1 if i == axis else 1 for i in range(values.ndim)])


def _carriers(graph: OpGraph, op: Op, stored: StoredTensor) -> list[tuple[str, tuple[int, ...]]]:
    """RESHAPE and TRANSPOSE between the stored tensor and the op's operand, in execution order."""
    subgraph = graph.subgraphs[op.subgraph]
    found: list[tuple[str, tuple[int, ...]]] = []
    index = stored.operand.index
    while index != stored.tensor.index:
        carrier = subgraph.producer[index]
        if carrier.name == "RESHAPE":
            found.append((carrier.name, subgraph.tensors[carrier.outputs[0]].shape))
        elif carrier.name == "TRANSPOSE":
            order = graph.constant(graph.tensor(carrier, carrier.inputs[1])).view("<i4")
            found.append((carrier.name, tuple(order.tolist())))
        index = carrier.inputs[0]
    return found[::-1]


def _carry(values: Array, name: str, argument: tuple[int, ...]) -> Array:
    return values.reshape(argument) if name == "RESHAPE" else values.transpose(argument)


# Where the axes of torch's weight go, by its number of dimensions. The file's own order of each op
# is its kernel's (tensorflow/lite/kernels/<op>.cc).
_TURNS: dict[str, dict[int, tuple[int, ...]]] = {
    # OIHW → OHWI, OIL → OLI; a linear layer as a convolution of one pixel.
    "CONV_2D": {4: (0, 2, 3, 1), 3: (0, 2, 1), 2: (0, 1)},
    # (C·m)1HW → 1HW(C·m)
    "DEPTHWISE_CONV_2D": {4: (1, 2, 3, 0), 3: (1, 2, 0)},
    # IOHW → OHWI
    "TRANSPOSE_CONV": {4: (1, 2, 3, 0), 3: (1, 2, 0)},
    # OIDHW → DHWIO, IODHW → DHWOI
    "CONV_3D": {5: (2, 3, 4, 1, 0)},
    "CONV_3D_TRANSPOSE": {5: (2, 3, 4, 1, 0)},
}
_AS_IT_IS = ("EMBEDDING_LOOKUP", "GATHER")
# Of torch's ops: the weight as (outputs, inputs), and as (inputs, outputs).
_ROWS_OUT = ("linear",)
_ROWS_IN = ("addmm", "mm", "matmul", "bmm", "baddbmm")


def to_file_layout(
    op_name: str,
    reference: Array,
    file_shape: tuple[int, ...],
    *,
    torch_op: str | None = None,
) -> tuple[Array, ...]:
    """
    Lay a constant of torch's out as an op of the file takes it.

    A convolution has one layout, so that an exchange of its equal axes is seen. Where torch's op
    leaves two (a square matrix of an op that is not named, a constant of an elementwise op whose
    channels may stand first or last), the usual one comes first.

    Args:
        op_name: The op of the file.
        reference: As torch has it.
        file_shape: The shape of the op's operand.
        torch_op: The torch op's name without overload (`linear`, `addmm`, `conv2d`), where known.

    Returns:
        Arrays of the file's shape; none where the constant does not fit.
    """
    reference, shape = np.asarray(reference), tuple(file_shape)
    ways = _turned(op_name, reference, shape, torch_op or "")
    fitting = [i for i, each in enumerate(ways) if _same_size(each, shape)]
    if len(fitting) > 1:
        # Axes of length 1 make ways alike: told by the places of values, not by values.
        places = np.arange(reference.size).reshape(reference.shape)
        turned = _turned(op_name, places, shape, torch_op or "")
        told = {turned[i].reshape(shape).tobytes(): i for i in reversed(fitting)}
        fitting = sorted(told.values())
    return tuple(ways[i].reshape(shape) for i in fitting)


def _same_size(values: Array, shape: tuple[int, ...]) -> bool:
    """Equal up to axes of length 1, whose place says nothing."""
    return _squeezed(values.shape) == _squeezed(shape)


def _squeezed(shape: tuple[int, ...]) -> list[int]:
    return [length for length in shape if length != 1]


def _turned(op: str, reference: Array, shape: tuple[int, ...], torch_op: str) -> list[Array]:
    if op in _TURNS:
        return _turned_kernel(op, reference, shape, torch_op)
    if op in _AS_IT_IS:
        return [reference]
    if op in ("FULLY_CONNECTED", "BATCH_MATMUL"):
        if reference.ndim < 2:
            return [reference]
        swapped = np.swapaxes(_matrix(reference, shape), -1, -2)
        if op == "FULLY_CONNECTED" and torch_op in _ROWS_OUT:
            return [_matrix(reference, shape)]
        if op == "FULLY_CONNECTED" and torch_op in _ROWS_IN:
            return [swapped]
        return [_matrix(reference, shape), swapped]
    return list(_turned_elementwise(reference, shape))


def _matrix(reference: Array, shape: tuple[int, ...]) -> Array:
    """Without trailing axes of length 1, as a convolution of one pixel has them."""
    while reference.ndim > max(2, len(shape)) and reference.shape[-1] == 1:
        reference = reference[..., 0]
    return reference


def _turned_kernel(op: str, reference: Array, shape: tuple[int, ...], torch_op: str) -> list[Array]:
    transposed = torch_op.startswith("conv_transpose")
    if transposed and op != "TRANSPOSE_CONV" and op != "CONV_3D_TRANSPOSE":
        # A transposed convolution as a convolution of the widened input: with a mirrored kernel.
        mirrored = np.flip(reference, tuple(range(2, reference.ndim)))
        order = (1, *range(2, reference.ndim), 0)
        return [mirrored.transpose(order)]
    order = _TURNS[op].get(reference.ndim, ())
    if not order:
        return []
    if op == "TRANSPOSE_CONV" and shape[-1] and reference.shape[0] != shape[-1]:
        # Groups: (groups · I)OHW → (groups · O)HWI.
        inputs = shape[-1]
        if reference.shape[0] % inputs:
            return []
        parts = np.split(reference, reference.shape[0] // inputs)
        return [np.concatenate([part.transpose(order) for part in parts])]
    return [reference.transpose(order)]


def _turned_elementwise(reference: Array, shape: tuple[int, ...]) -> list[Array]:
    """Channels last, then as it is; broadcast, where the file holds it so."""
    found = []
    # Which axis holds the channels depends on whether there is a batch axis.
    for source in (1, 0):
        if reference.ndim - source > 1:
            found.append(np.moveaxis(reference, source, -1))
    found.append(reference)
    fitting = [each for each in found if _same_size(each, shape)]
    if fitting:
        return fitting
    return [
        np.broadcast_to(each, shape)
        for each in found
        if each.ndim <= len(shape)
        and all(a in (1, b) for a, b in zip(each.shape[::-1], shape[::-1], strict=False))
    ]


_AXES = {
    "CONV_2D": ("output channel", "row", "column", "input channel"),
    "DEPTHWISE_CONV_2D": ("batch", "row", "column", "channel"),
    "TRANSPOSE_CONV": ("output channel", "row", "column", "input channel"),
    "CONV_3D": ("layer", "row", "column", "input channel", "output channel"),
    "CONV_3D_TRANSPOSE": ("layer", "row", "column", "output channel", "input channel"),
    "FULLY_CONNECTED": ("output channel", "input channel"),
    "EMBEDDING_LOOKUP": ("row", "column"),
    "GATHER": ("row", "column"),
}


def _axis_names(op_name: str, ndim: int) -> tuple[str, ...]:
    names = _AXES.get(op_name, ())
    if len(names) == ndim:
        return names
    return (*(f"index of axis {i}" for i in range(ndim - 1)), "channel")


def check_weight(
    op_name: str,
    stored: Constant,
    reference: Array | None = None,
    *,
    expected: Constant | None = None,
    others: Mapping[str, Array] | None = None,
    torch_op: str | None = None,
    narrowed: bool = False,
) -> tuple[str, ...]:
    """
    Hold a weight of the file against the reference's.

    With `expected`, codes, scales and zero points must be those. With `reference`, every code must
    be the nearest to its value in the file's own scale, or the last one where the value lies beyond
    it; floats must be equal within what folding rounds. Both may be given.

    Weights that were not rounded to the nearest (GPTQ), or that were scaled or rotated before
    (OSCAR and Hadamard recipes), have no reference here: give what they became, or nothing.

    Args:
        op_name: The op of the file.
        stored: As `read_constant` gives it.
        reference: Float, in torch's layout, with what was folded into it.
        expected: Codes that torch chose, in torch's layout.
        others: Other weights of the model, in torch's layout, by the name that a finding is to
            call them: where one was put in place of this one, the finding says so.
        torch_op: As for `to_file_layout`.
        narrowed: The lowest code was taken for the next one (−128 → −127) on purpose.

    Returns:
        A sentence for each thing that is wrong, most telling first; none where it is sound.

    Raises:
        ValueError: Neither `reference` nor `expected`.
    """
    if reference is None and expected is None:
        raise ValueError("check_weight: give reference, expected or both")
    given = expected.values if expected is not None else reference
    assert given is not None
    if reference is not None and np.isnan(reference).any():
        undefined = int(np.isnan(reference).sum())
        return (f"the reference's weight is NaN in {undefined} of {reference.size} places",)
    shape = stored.values.shape
    layouts = to_file_layout(op_name, given, shape, torch_op=torch_op)
    if not layouts:
        return (
            f"the weight is {list(shape)}, which is no layout of the reference's "
            f"{list(given.shape)}",
        )

    def laid_out(values: Array, which: int) -> Array:
        if values is given:
            return layouts[which]
        return to_file_layout(op_name, values, shape, torch_op=torch_op)[which]

    first: tuple[str, ...] | None = None
    for which in range(len(layouts)):
        context = _Context(op_name, others or {}, torch_op, given)
        found: list[str] = []
        if expected is not None:
            full = expected.values.shape
            turned = [
                None if each is None else laid_out(np.broadcast_to(each, full), which)
                for each in (expected.values, expected.scales, expected.zero_points)
            ]
            assert turned[0] is not None
            wanted = Constant(expected.dtype, turned[0], turned[1], turned[2], expected.grouping)
            found += _against_codes(stored, wanted, context, narrowed)
        if reference is not None and not found:
            found += _against_floats(stored, laid_out(reference, which), context)
        if not found:
            return ()
        first = first or tuple(found)
    return first or ()


@dataclass(frozen=True, slots=True, eq=False)
class _Context:
    """What an explanation may draw on."""

    op_name: str
    others: Mapping[str, Array]
    torch_op: str | None
    raw: Array

    def claim(
        self, stored: Constant, target: Array, tolerance: Array | float, *, exact: bool = False
    ) -> Claim:
        """What must hold, in the units of the stored values: steps of the scale, or floats."""
        shape = stored.values.shape
        low: Array = np.full((1,) * len(shape), -np.inf)
        high, unit, steps = -low, np.ones_like(low), stored.values
        if stored.scales is not None and stored.zero_points is not None:
            steps, unit = stored.values - stored.zero_points, stored.scales
            limits = _limits(stored.dtype)
            # A symmetric range leaves the lowest code out, as far as can be seen.
            narrow = not (exact or stored.zero_points.any() or (stored.values == limits[0]).any())
            low = limits[0] + narrow - stored.zero_points.astype(np.float64)
            high = limits[1] - stored.zero_points.astype(np.float64)
        channels = [i for i, length in enumerate(np.shape(unit)) if length > 1]
        return Claim(
            actual=steps.astype(np.float64),
            target=target,
            tolerance=np.broadcast_to(tolerance, shape),
            low=np.broadcast_to(low, shape),
            high=np.broadcast_to(high, shape),
            unit=np.broadcast_to(unit, shape),
            axes=_axis_names(self.op_name, len(shape)),
            channel_axis=channels[0] if len(channels) == 1 else _channel_axis(self.op_name, shape),
            quantized=stored.scales is not None,
            untransposed=(self.raw.reshape(shape) if self.raw.size == math.prod(shape) else None),
            others=functools.partial(self._alike, shape),
        )

    def _alike(self, shape: tuple[int, ...]) -> Iterator[tuple[str, Array]]:
        for name, other in self.others.items():
            for each in to_file_layout(self.op_name, other, shape, torch_op=self.torch_op)[:1]:
                yield name, each


def _channel_axis(op_name: str, shape: tuple[int, ...]) -> int:
    names = _axis_names(op_name, len(shape))
    for i, name in enumerate(names):
        if name in ("output channel", "channel"):
            return i
    return 0


def _limits(dtype: str) -> tuple[int, int]:
    digits = "".join(filter(str.isdigit, dtype))
    bits = int(digits)
    return (0, 2**bits - 1) if dtype.startswith("u") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def _against_codes(
    stored: Constant, wanted: Constant, context: _Context, narrowed: bool
) -> list[str]:
    if stored.scales is None:
        # The op stayed in float, with the values that the codes stand for.
        return _against_floats(stored, wanted.floats, context)
    if wanted.scales is None or wanted.zero_points is None or stored.zero_points is None:
        return [f"the weight is {stored.dtype}, and the reference's {wanted.dtype}"]
    codes = wanted.values
    if narrowed:
        codes = np.where(codes == _limits(stored.dtype)[0], codes + 1, codes)
    found = []
    if stored.grouping != wanted.grouping and np.ptp(wanted.scales) > 0:
        found.append(
            f"the weight's scales are {stored.grouping}, and the reference's {wanted.grouping}"
        )
    if not np.array_equal(stored.values, codes):
        # Integers: what is not equal differs by 1 at least.
        steps = (codes - wanted.zero_points).astype(np.float64)
        claim = context.claim(stored, steps, 0.25, exact=True)
        shifted = stored.values - codes
        moved = stored.zero_points - wanted.zero_points
        if not np.array_equal(shifted, np.broadcast_to(moved, shifted.shape)):
            found.append("the weight's codes: " + explain(claim))
    given = _as_bfloat16(wanted.scales) if _in_blocks(stored) else wanted.scales
    scales = _ratio_sentence(stored.scales, given, context, stored.values.shape)
    if scales:
        found.append(scales)
    offsets = np.broadcast_to(stored.zero_points - wanted.zero_points, stored.values.shape)
    if offsets.any():
        found.append(
            f"the weight's zero point is {_signed(offsets)} from the reference's"
            f"{_where(offsets != 0, context, stored.values.shape)}"
        )
    return found


def _in_blocks(stored: Constant) -> bool:
    return (stored.grouping or "").startswith("blockwise")


def _as_bfloat16(values: Array) -> Array:
    """Round to the nearest, of two the even one; the last 16 bits of a float32 go."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    floats: Array = rounded.astype(np.uint32).view(np.float32)
    return floats


def _signed(offsets: Array) -> str:
    low, high = int(offsets.min()), int(offsets.max())
    values = {value for value in (low, high) if value}
    return " to ".join(f"{value:+d}".replace("-", "−") for value in sorted(values))


def _ratio_sentence(
    stored: Array, wanted: Array, context: _Context, shape: tuple[int, ...]
) -> str | None:
    """Scales must be equal in the type in which the file holds them."""
    actual, given = (np.broadcast_to(each, shape).astype(np.float32) for each in (stored, wanted))
    wrong = actual != given
    if not wrong.any():
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = (actual.astype(np.float64) / given)[wrong]
    how = f"{_ratio(ratios.min())} ×"
    if ratios.max() > ratios.min() * (1 + 1e-3):
        how = f"{_ratio(ratios.min())} to {_ratio(ratios.max())} ×"
    return f"the weight's scale is {how} the reference's{_where(wrong, context, shape)}"


def _ratio(value: float) -> str:
    """Four digits, or as many as it takes to see that it is not 1."""
    if abs(value - 1) < 5e-4:
        return f"(1 {'+' if value > 1 else '−'} {abs(value - 1):.2g})"
    return f"{value:.4g}"


def _where(wrong: Array, context: _Context, shape: tuple[int, ...]) -> str:
    """In which channels."""
    axis = _channel_axis(context.op_name, shape)
    channels = np.flatnonzero(wrong.any(axis=tuple(i for i in range(len(shape)) if i != axis)))
    if len(channels) == shape[axis]:
        return ""
    name = _axis_names(context.op_name, len(shape))[axis]
    if len(channels) == 1:
        return f" in {name} {channels[0]}"
    listed = ", ".join(map(str, channels[:4])) + (", …" if len(channels) > 4 else "")
    return f" in {len(channels)} of {shape[axis]} {name}s ({listed})"


def _against_floats(stored: Constant, reference: Array, context: _Context) -> list[str]:
    reference = reference.astype(np.float64)
    if stored.scales is None:
        return _float_against_floats(stored, reference, context)
    if not (np.isfinite(stored.scales).all() and (stored.scales > 0).all()):
        return ["the weight has a scale that is zero, negative or not finite"]
    target = reference / stored.scales
    # Half a step, and what float32 makes of the value and the quotient.
    rounded = _FOLDED + (_BFLOAT16 if _in_blocks(stored) else 0)
    claim = context.claim(stored, target, 0.5 + np.abs(target) * rounded)
    if not claim.holds.all():
        return ["the weight's codes: " + explain(claim)]
    return _unused_range(stored, claim)


def _float_against_floats(stored: Constant, reference: Array, context: _Context) -> list[str]:
    # The converter writes an infinite value, as of a mask, as the largest finite one.
    reference = np.clip(reference, *_FLOAT32)
    actual = stored.values.astype(np.float64)
    if np.isposinf(actual).any() or np.isneginf(actual).any():
        ends = np.clip(actual, *_FLOAT32)
        actual = np.where(ends == reference, ends, actual)
    tolerance = np.abs(reference) * _FOLDED + _half_spacing(stored.dtype, reference)
    # Where a difference of two parameters was folded, it is as exact as the larger one.
    tolerance += np.abs(reference).max(initial=0.0) * 2.0**-24
    claim = context.claim(replace(stored, values=actual), reference, tolerance)
    return [] if claim.holds.all() else [f"the weight ({stored.dtype}): " + explain(claim)]


def _half_spacing(dtype: str, reference: Array) -> Array:
    """What rounding to a shorter float may take: half the distance to the next one."""
    if dtype == "bfloat16":
        halves: Array = np.abs(reference) * _BFLOAT16
        return halves
    if dtype != "float16":
        return np.zeros(reference.shape)
    with np.errstate(over="ignore", invalid="ignore"):
        # Beyond the range of float16 it is NaN, which nothing is within.
        return np.spacing(np.abs(reference).astype(np.float16)).astype(np.float64) / 2


def _unused_range(stored: Constant, claim: Claim) -> list[str]:
    """
    Tell of codes whose range is less than half used: a bit is wasted.

    A range from the values gives its ends to the largest of them, one that clips them, too, and a
    scale that is a power of two uses more than half.
    """
    high = _limits(stored.dtype)[1]
    assert stored.scales is not None
    largest = float(np.abs(claim.actual).max(initial=0.0))
    if not 0 < largest < high // 2 or float(stored.scales.max()) <= _LEAST_SCALE:
        return []
    return [
        f"the weight uses codes up to {largest:.0f} of {high} only: its scale is "
        f"{high / largest:.3g} × what its values need"
    ]


def check_bias(
    op_name: str,
    stored: Constant | None,
    reference: Array | None,
    *,
    input_scale: float | None = None,
    weight_scales: Array | None = None,
    uncertainty: Array | float | None = None,
    others: Mapping[str, Array] | None = None,
    folded: bool = True,
) -> tuple[str, ...]:
    """
    Hold a bias of the file against the reference's.

    A quantized one is int32 (int64 beside int16 activations) with scale input × weight and zero
    point 0; its code is the nearest.

    Args:
        op_name: The op of the file.
        stored: As `read_constant` gives it; None where the op has none.
        reference: Float, one a channel, with what was folded into it; None where torch has none.
        input_scale: Of the op's input; needed where the bias is quantized.
        weight_scales: Of its weight, one or one a channel; likewise.
        uncertainty: By how much float32 may have moved the reference, in its own unit: folding a
            batch norm subtracts, so that what is left has the rounding of the terms, not of
            itself. By default 2⁻²² of the largest value of the bias, which has such terms.
        others: As for `check_weight`.
        folded: Whether the reference is what a batch norm was folded into, which float32 rounds;
            else it is the model's own parameter, and only its quotient by the scale is rounded.

    Returns:
        A sentence for each thing that is wrong, most telling first; none where it is sound.

    Raises:
        ValueError: A quantized bias without the scales of input and weight.
    """
    if stored is None:
        return _missing_bias(reference, input_scale, weight_scales)
    if reference is None:
        reference = np.zeros(stored.values.size)
    if reference.size != stored.values.size:
        return (f"the bias has {stored.values.size} values, and the reference's {reference.size}",)
    reference = np.asarray(reference, np.float64).reshape(stored.values.shape)
    if np.isnan(reference).any():
        return ("the reference's bias is NaN",)
    if uncertainty is None:
        uncertainty = float(np.abs(reference).max(initial=0.0)) * 2.0**-22 if folded else 0.0
    relative = _FOLDED if folded else _ROUNDED_PRODUCT
    slack = np.abs(reference) * relative + np.reshape(uncertainty, _shaped(uncertainty, reference))
    context = _Context(_BIAS, others or {}, None, reference)
    if stored.scales is None:
        if not np.issubdtype(stored.values.dtype, np.floating):
            return (f"the bias is {stored.dtype} without a scale",)
        slack = slack + _half_spacing(stored.dtype, reference)
        claim = context.claim(stored, reference, slack)
        return () if claim.holds.all() else (f"the bias ({stored.dtype}): " + explain(claim),)
    if input_scale is None or weight_scales is None:
        raise ValueError("check_bias: a quantized bias needs input_scale and weight_scales")
    product = np.asarray(weight_scales, np.float64).ravel() * float(input_scale)
    if product.size not in (1, reference.size):
        return (f"the bias has {reference.size} values, and the weight {product.size} scales",)
    if not (np.isfinite(product).all() and (product > 0).all()):
        return ("input scale × weight scale is zero, negative or not finite",)
    product = np.broadcast_to(product, (reference.size,)).reshape(reference.shape)
    found = _bias_codes(stored, reference, product, slack, context)
    scales = np.broadcast_to(stored.scales, reference.shape)
    # Not `>`, which NaN would pass.
    apart = ~(np.abs(scales / product - 1) <= _ROUNDED_PRODUCT)
    if apart.any():
        ratios = (scales / product)[apart]
        found.append(
            f"the bias's stored scale is not input scale × weight scale, but "
            f"{_ratio(float(ratios.flat[0]))} × that{_where(apart, context, reference.shape)}"
        )
    if stored.zero_points is not None and stored.zero_points.any():
        found.append(f"the bias's zero point is {int(stored.zero_points.max())}, which must be 0")
    return tuple(found)


# Not an op: it has the axis names of none, so that its one axis is called a channel.
_BIAS = "bias"


def _shaped(value: Array | float, like: Array) -> tuple[int, ...]:
    return like.shape if np.size(value) == like.size else (1,) * like.ndim


def _missing_bias(
    reference: Array | None, input_scale: float | None, weight_scales: Array | None
) -> tuple[str, ...]:
    if reference is None or not np.any(reference):
        return ()
    values = np.abs(np.asarray(reference, np.float64)).ravel()
    if input_scale is not None and weight_scales is not None:
        steps = values / (np.asarray(weight_scales, np.float64).ravel() * float(input_scale))
        if (steps <= 0.5 + steps * _FOLDED).all():
            # It would round to 0 in every channel.
            return ()
    return (
        f"the op has no bias, and the reference one of up to {values.max():.4g} "
        f"(channel {int(values.argmax())})",
    )


def _bias_codes(
    stored: Constant, reference: Array, product: Array, slack: Array, context: _Context
) -> list[str]:
    # Kernels add the codes to the accumulator as they are: the stored scale is not looked at.
    exact = Constant(stored.dtype, stored.values, product, np.zeros(1, np.int64), stored.grouping)
    target = reference / product
    found = []
    limited = (stored.values <= _INT32.min + 1) | (stored.values >= _INT32.max)
    if limited.any():
        worst = int(np.where(limited, np.abs(target), -1).argmax())
        found.append(
            f"the bias is at the INT32 limit{_where(limited, context, reference.shape)}: "
            f"{reference.flat[worst]:.4g} is {target.flat[worst]:.4g} steps of "
            f"{product.flat[worst]:.4g} (input scale × weight scale)"
        )
    tolerance = 0.5 + np.abs(target) * _ROUNDED_PRODUCT + slack / product
    claim = context.claim(exact, target, np.where(limited, np.inf, tolerance))
    if not claim.holds.all():
        found.append("the bias's codes: " + explain(claim))
    return found


def input_scale_of(stored: Constant, weight_scales: Array) -> float | None:
    """
    Tell the one input scale with which a bias was written.

    Where it is not the input's, and the weight is sound, the input's scale was changed: by the op
    that makes the input, whose own codes are right in its scale.

    Args:
        stored: The bias.
        weight_scales: One or one a channel.

    Returns:
        None for a bias without scales, or with one for each of several inputs.
    """
    if stored.scales is None:
        return None
    weights = np.asarray(weight_scales, np.float64).ravel()
    if not (np.isfinite(weights).all() and (weights > 0).all() and (stored.scales > 0).all()):
        return None
    quotients = np.broadcast_to(stored.scales, stored.values.shape).ravel() / weights
    median = float(np.median(quotients))
    # Two rounded numbers of each channel, and one each of those that are compared.
    close = np.abs(quotients / median - 1) <= 2 * _ROUNDED_PRODUCT
    return median if bool(close.all()) else None


def unexpected_qparams(
    what: str,
    scale: float,
    zero_point: int,
    expected_scale: float,
    expected_zero_point: int,
) -> str | None:
    """
    Hold the parameters of an activation against the reference's, exactly as float32.

    Args:
        what: What to call it, such as `output` or `input 0`.
        scale: In the file.
        zero_point: In the file.
        expected_scale: The reference's.
        expected_zero_point: The reference's.

    Returns:
        A sentence, or None where they are the same.
    """
    parts = []
    if np.float32(scale) != np.float32(expected_scale):
        ratio = float(np.float64(np.float32(scale)) / np.float32(expected_scale))
        parts.append(
            f"scale {scale:.6g}, which is {_ratio(ratio)} × the reference's {expected_scale:.6g}"
        )
    if zero_point != expected_zero_point:
        parts.append(
            f"zero point {zero_point}, where the reference has {expected_zero_point} "
            f"({zero_point - expected_zero_point:+d})".replace("(-", "(−")
        )
    return f"{what} has {' and '.join(parts)}" if parts else None
