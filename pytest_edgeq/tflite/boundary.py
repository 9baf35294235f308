"""
Quantize the inputs of a `.tflite` file, and dequantize its outputs.

Quantization is affine, real = scale · (code − zero point)
(https://ai.google.dev/edge/litert/models/quantization_spec).
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.numerics.arrays import contiguous
from pytest_edgeq.tflite.subgraph import SignatureTensor, Tensor

_NUMPY_DTYPES = frozenset(
    (
        *("float16", "float32", "float64", "int8", "int16", "int32", "int64"),
        *("uint8", "uint16", "uint32", "uint64", "bool"),
    )
)


def numpy_dtype(dtype: str) -> np.dtype[Any] | None:
    """Return the numpy dtype of a TFLite dtype; None if numpy has none."""
    return np.dtype(dtype) if dtype in _NUMPY_DTYPES else None


def bits_of(dtype: str) -> int | None:
    """Return the bits of one element of a TFLite dtype; None if its size is not fixed."""
    sized = re.match(r"(?:u?int|b?float|complex)(\d+)", dtype)
    return int(sized[1]) if sized else 8 if dtype == "bool" else None


def code_range(dtype: str) -> tuple[int, int]:
    """Return the least and greatest code of an integer dtype, also of int4."""
    codes = 1 << int(dtype.removeprefix("u").removeprefix("int"))
    return (0, codes - 1) if dtype.startswith("u") else (-codes // 2, codes // 2 - 1)


def qparams(tensor: Tensor) -> tuple[float, int] | None:
    """Return scale and zero point of a tensor quantized per tensor, else None."""
    if not tensor.is_quantized or len(tensor.scales) != 1:
        return None
    return float(tensor.scales[0]), int(tensor.zero_points[0])


def shape_along(count: int, ndim: int, axis: int | None) -> tuple[int, ...]:
    """Return the shape that broadcasts one value, or one for each index."""
    if axis is None or count == 1:
        return (1,) * ndim
    return tuple(-1 if i == axis else 1 for i in range(ndim))


def _parameters(
    io_tensor: SignatureTensor, dtype: npt.DTypeLike
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return scales and zero points, broadcasting to an array of the tensor's shape."""
    tensor = io_tensor.tensor
    if not len(tensor.scales):
        raise TypeError(
            f"{io_tensor.name!r} is quantized {tensor.granularity}: only inputs and outputs with "
            "one scale, or one per channel, are supported"
        )
    if not np.all((tensor.scales > 0) & np.isfinite(tensor.scales)):
        raise ValueError(
            f"{io_tensor.name!r} has a scale of {tensor.scales.min()}: a scale is greater than 0 "
            "and finite. The file is wrong; quantize again and look at the calibration data"
        )
    # In the array's own width: int64 zero points would promote everything to float64.
    # One scale fits an array of any rank.
    ndim = len(tensor.shape) if len(tensor.scales) > 1 else 0
    shape = shape_along(len(tensor.scales), ndim, tensor.quantized_dimension)
    scales, zero_points = (each.astype(dtype) for each in (tensor.scales, tensor.zero_points))
    return scales.reshape(shape), zero_points.reshape(shape)


def encode(value: npt.NDArray[Any], io_tensor: SignatureTensor) -> npt.NDArray[Any]:
    """
    Convert an input to the dtype of the file.

    Floats are quantized for a quantized input: code = clip(round(x / scale) + zero point), rounding
    half to even. Integers for an integer input are cast if every value fits; floats to another
    float.
    """
    tensor = io_tensor.tensor
    target = numpy_dtype(tensor.dtype)
    if target is None:
        raise TypeError(
            f"input {io_tensor.name!r} is {tensor.dtype}, which cannot be given to a file here; "
            "floats of 16 to 64 bits, integers of 8 to 64 and bool can"
        )
    is_float = np.issubdtype(value.dtype, np.floating)
    if tensor.is_quantized:
        if not is_float:
            raise TypeError(
                f"input {io_tensor.name!r} expects floats, which are quantized to "
                f"{tensor.dtype} here, got {value.dtype}; convert the sample to float32"
            )
        return _quantize(value, io_tensor, target)
    if is_float != np.issubdtype(target, np.floating):
        raise TypeError(
            f"input {io_tensor.name!r} expects {tensor.dtype}, got {value.dtype}; convert the "
            "sample"
        )
    if is_float:
        return _cast_floats(value, io_tensor, target)
    if value.dtype != target and value.size:
        low, high = (0, 1) if target == np.bool_ else code_range(tensor.dtype)
        if int(value.min()) < low or int(value.max()) > high:
            raise ValueError(
                f"input {io_tensor.name!r} is {tensor.dtype} in the file and cannot hold the "
                f"values {int(value.min())} … {int(value.max())} of the sample"
            )
    return contiguous(value.astype(target, copy=False))


def _quantize(
    value: npt.NDArray[Any], io_tensor: SignatureTensor, target: np.dtype[Any]
) -> npt.NDArray[Any]:
    n_nan = int(np.count_nonzero(np.isnan(value)))
    if n_nan:
        raise ValueError(
            f"input {io_tensor.name!r} holds {n_nan} NaN, which has no code in "
            f"{io_tensor.tensor.dtype}"
        )
    low, high = code_range(io_tensor.tensor.dtype)
    # Codes of 16 bits and their sums are whole numbers in float32; wider ones are not.
    width = np.float64 if np.iinfo(target).bits > 16 else np.result_type(value, np.float32)
    scale, zero_point = _parameters(io_tensor, width)
    with np.errstate(over="ignore"):
        # For a scalar input, divide returns a number and not an array.
        codes = np.asarray(np.divide(value, scale, dtype=width))
    np.rint(codes, out=codes)
    codes += zero_point
    np.clip(codes, low, high, out=codes)
    return contiguous(codes.astype(target))


def _cast_floats(
    value: npt.NDArray[Any], io_tensor: SignatureTensor, target: np.dtype[Any]
) -> npt.NDArray[Any]:
    with np.errstate(over="ignore"):
        cast = contiguous(value.astype(target, copy=False))
    if np.finfo(target).bits < np.finfo(value.dtype).bits:
        lost = int(np.count_nonzero(np.isinf(cast) & np.isfinite(value)))
        if lost:
            raise ValueError(
                f"input {io_tensor.name!r} is {io_tensor.tensor.dtype} in the file and cannot hold "
                f"{lost} of the sample's values (they become infinite)"
            )
    return cast


def decode(codes: npt.NDArray[Any], io_tensor: SignatureTensor) -> npt.NDArray[Any]:
    """
    Dequantize an output of the file to float32: scale · (code − zero point).

    An output that is not quantized is returned unchanged, float16 as float32.
    """
    if codes.dtype == np.float16:
        return codes.astype(np.float32)
    if not io_tensor.tensor.is_quantized:
        return codes
    # A code of 16 bits minus a zero point is a whole number in float32, and cannot wrap there.
    width = np.float32 if codes.dtype.itemsize <= 2 else np.float64
    scale, zero_point = _parameters(io_tensor, width)
    steps: npt.NDArray[Any] = codes - zero_point
    values: npt.NDArray[Any] = np.asarray(steps * scale, np.float32)
    return values
