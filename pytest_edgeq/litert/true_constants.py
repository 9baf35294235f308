"""Shims for the converter's handling of constants."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pytest_edgeq.litert.libraries import converter_module

if TYPE_CHECKING:
    import torch


@contextlib.contextmanager
def true_constants() -> Iterator[None]:
    """
    Make the converter write the model's own constants, and not modify the model.

    litert-torch 0.10.0, `backend/inline_consts.py`: a constant whose memory is not contiguous (a
    transposed buffer, weights in channels-last layout) is copied, the copy's address used as the
    key of a cache, and the copy freed. The next one of the same shape often gets the same address
    and so the values of the one before: the file silently contains one layer's weights twice. Here
    each copy lives until the conversion has ended.

    In the same place infinite values are clamped to the largest finite ones in the model's own
    memory, so that an attention mask of −inf is changed by the conversion. Here a copy is clamped.
    """
    if converter_module().__name__ == "ai_edge_torch":
        # 0.7.1 converts by TensorFlow, and has no such cache.
        yield
        return
    inline_consts = converter_module("backend.inline_consts")

    fingerprint, clamp = inline_consts._ConstantFingerprint, inline_consts._clamp_inf_values
    alive: list[torch.Tensor] = []

    class KeptAlive:
        @staticmethod
        def from_tensor(tensor: torch.Tensor) -> Any:
            alive.append(tensor)
            return fingerprint.from_tensor(tensor)

    inline_consts._ConstantFingerprint = KeptAlive
    inline_consts._clamp_inf_values = lambda tensor: (
        clamp(tensor.clone()) if tensor.isinf().any() else tensor
    )
    try:
        yield
    finally:
        inline_consts._ConstantFingerprint = fingerprint
        inline_consts._clamp_inf_values = clamp
