"""Specifications of inputs and outputs for the accumulators of errors."""

from __future__ import annotations

from pytest_edgeq.numerics.error_sums import BorderSpec
from pytest_edgeq.tflite.boundary import code_range, qparams
from pytest_edgeq.tflite.subgraph import Tensor


def border_spec(name: str, tensor: Tensor, *, chosen: bool = False) -> BorderSpec:
    """Return name, scale, zero point and range of codes; the name alone without one scale."""
    parameters = qparams(tensor)
    if parameters is None:
        return BorderSpec(name, chosen=chosen)
    return BorderSpec(name, *parameters, *code_range(tensor.dtype), chosen=chosen)
