"""
Cross the border of a `.tflite` file: floats to codes at the inputs, codes to floats at the outputs.

Quantization is affine, real = scale · (code − zero point)
(https://ai.google.dev/edge/litert/models/quantization_spec).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.tflite.graph import SignatureTensor, Tensor

__all__ = ["code_range", "decode", "encode"]

_NUMPY_DTYPES = {
    "float32": np.float32,
    "float64": np.float64,
    "float16": np.float16,
    "int8": np.int8,
    "uint8": np.uint8,
    "int16": np.int16,
    "uint16": np.uint16,
    "int32": np.int32,
    "uint32": np.uint32,
    "int64": np.int64,
    "uint64": np.uint64,
    "bool": np.bool_,
}


def code_range(dtype: str) -> tuple[int, int]:
    """The least and the greatest code of an integer dtype, for instance (−128, 127) for int8."""
    info = np.iinfo(_NUMPY_DTYPES[dtype])
    return int(info.min), int(info.max)


def _along_axis(tensor: Tensor, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if len(values) == 1:
        return values.reshape(())
    shape = [1] * len(tensor.shape)
    shape[tensor.quantized_dimension] = -1
    return values.reshape(shape)


def encode(value: npt.NDArray[Any], border: SignatureTensor) -> npt.NDArray[Any]:
    """
    Turn an input into what the file takes.

    A quantized input takes floats: code = clip(round(x / scale) + zero point), rounding half to
    even. Integers for an integer input are cast where every value fits; floats to another float.

    Args:
        value: Of the input's shape.
        border: The input.

    Returns:
        An array of the input's dtype.

    Raises:
        ValueError: NaN for a quantized input, or an integer that the input's dtype cannot hold.
        TypeError: Integers where floats belong or the other way round.
    """
    tensor = border.tensor
    target = _NUMPY_DTYPES.get(tensor.dtype)
    if target is None:
        raise TypeError(f"input {border.name!r} is {tensor.dtype}, which numpy cannot hold")
    is_float = np.issubdtype(value.dtype, np.floating)
    if tensor.is_quantized:
        if not is_float:
            raise TypeError(
                f"input {border.name!r} expects floats, which it is quantized from to "
                f"{tensor.dtype} here, got {value.dtype}; convert the sample to float32"
            )
        if np.isnan(value).any():
            raise ValueError(
                f"input {border.name!r} holds {int(np.isnan(value).sum())} NaN, which has no code "
                f"in {tensor.dtype}"
            )
        scale = _along_axis(tensor, tensor.scales)
        zero_point = _along_axis(tensor, tensor.zero_points)
        low, high = code_range(tensor.dtype)
        codes = np.rint(value / scale) + zero_point
        return np.ascontiguousarray(np.clip(codes, low, high).astype(target))
    if is_float != np.issubdtype(target, np.floating):
        raise TypeError(
            f"input {border.name!r} expects {tensor.dtype}, got {value.dtype}; convert the sample"
        )
    if not is_float and value.dtype != target and value.size:
        low, high = (0, 1) if target is np.bool_ else code_range(tensor.dtype)
        if int(value.min()) < low or int(value.max()) > high:
            raise ValueError(
                f"input {border.name!r} is {tensor.dtype} in the file and cannot hold the values "
                f"{int(value.min())} … {int(value.max())} of the sample"
            )
    return np.ascontiguousarray(value.astype(target, copy=False))


def decode(codes: npt.NDArray[Any], border: SignatureTensor) -> npt.NDArray[Any]:
    """
    Turn an output of the file into floats: scale · (code − zero point), in float32.

    An output that is not quantized comes back as it is, float16 as float32.
    """
    tensor = border.tensor
    if codes.dtype == np.float16:
        return codes.astype(np.float32)
    if not tensor.is_quantized:
        return codes
    scale = _along_axis(tensor, tensor.scales)
    zero_point = _along_axis(tensor, tensor.zero_points)
    # int64: a uint8 code minus a zero point must not wrap.
    steps: npt.NDArray[Any] = (codes.astype(np.int64) - zero_point).astype(np.float32)
    values: npt.NDArray[Any] = steps * scale
    return values
