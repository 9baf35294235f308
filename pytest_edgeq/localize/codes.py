"""What the codes of a file's tensors stand for."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from pytest_edgeq.localize.biases import qparams
from pytest_edgeq.tflite.boundary import code_range
from pytest_edgeq.tflite.constants import shape_along
from pytest_edgeq.tflite.graph import Tensor

__all__ = ["by_channel", "channel_steps", "code_limits"]


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


def channel_steps(tensor: Tensor) -> npt.NDArray[np.float32]:
    """Return the scale of each channel, shaped to broadcast to the tensor."""
    shape = shape_along(len(tensor.scales), len(tensor.shape), tensor.quantized_dimension)
    return tensor.scales.astype(np.float32).reshape(shape)
