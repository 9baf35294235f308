"""How a constant of torch's lies in a file, by the op that takes it."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["axis_names", "channel_axis", "to_file_layout"]

Array: TypeAlias = npt.NDArray[Any]


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


def axis_names(op_name: str, ndim: int) -> tuple[str, ...]:
    """What to call an index along each axis of an op's constant."""
    names = _AXES.get(op_name, ())
    if len(names) == ndim:
        return names
    return (*(f"index of axis {i}" for i in range(ndim - 1)), "channel")


def channel_axis(op_name: str, shape: tuple[int, ...]) -> int:
    """Along which the output channels of an op's constant lie."""
    names = axis_names(op_name, len(shape))
    for i, name in enumerate(names):
        if name in ("output channel", "channel"):
            return i
    return 0
