"""What the codes of a file's tensors stand for, and how near values are to them."""

from __future__ import annotations

import torch

from pytest_edgeq.localize.biases import qparams
from pytest_edgeq.tflite.boundary import code_range
from pytest_edgeq.tflite.constants import shape_along
from pytest_edgeq.tflite.graph import Tensor

__all__ = ["by_channel", "channel_ends", "clipped", "code_limits", "is_near"]

# Float kernels sum in another order; hybrid ones round their input to 8 bits of its range.
_TIGHT = 1e-5
_LOOSE = 0.05


def code_limits(tensor: Tensor) -> tuple[int, int, float, int] | None:
    """Least and greatest code, scale and zero point; None of what has not one scale."""
    parameters = qparams(tensor)
    return None if parameters is None else (*code_range(tensor.dtype), *parameters)


def by_channel(tensor: Tensor, codes: torch.Tensor) -> torch.Tensor:
    """What codes of a tensor with a scale a channel stand for; samples may stand in front."""
    shape = shape_along(len(tensor.scales), len(tensor.shape), tensor.quantized_dimension)
    scales, points = (
        torch.as_tensor(each, dtype=torch.float32).reshape(shape)
        for each in (tensor.scales, tensor.zero_points)
    )
    return (codes.to(torch.float32) - points) * scales


def channel_ends(tensor: Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the greatest value that such a tensor can hold, at each of its places."""
    low, high = (torch.full(tensor.shape, end) for end in code_range(tensor.dtype))
    return by_channel(tensor, low), by_channel(tensor, high)


def clipped(tensor: Tensor, value: torch.Tensor) -> torch.Tensor:
    """A value as far as the tensor's codes reach, in float32 or wider."""
    value = value.to(torch.float32) if value.dtype != torch.float64 else value
    limits = code_limits(tensor)
    if limits is None:
        return value
    low, high, scale, zero_point = limits
    return value.clamp((low - zero_point) * scale, (high - zero_point) * scale)


def is_near(
    rms: float, tensor: Tensor, value: torch.Tensor, *, hybrid: bool = False, noise: float = 0.0
) -> bool:
    """
    Within what rounding explains: an LSB's rounding is 0.29 of it, two of them 0.41.

    Args:
        rms: Root mean square of the differences.
        tensor: The file's.
        value: What it is held against.
        hybrid: Whether the kernel that made it rounds its own float input.
        noise: What float32 may leave of a sum that is 0.
    """
    if rms <= noise:
        return True
    limits, scales = code_limits(tensor), tensor.scales
    if limits is not None or len(scales) > 1:
        return rms <= 0.6 * float(scales.max())
    if not value.numel():
        return True
    spread = float(value.double().square().mean().sqrt())
    return rms <= (_LOOSE if hybrid else _TIGHT) * spread + 1e-12
