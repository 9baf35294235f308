"""Choose how a model is localized."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from pytest_edgeq.localize.float_forms import forms_of
from pytest_edgeq.localize.localizer import Localizer
from pytest_edgeq.localize.paired import PairedLocalizer

if TYPE_CHECKING:
    from pytest_edgeq.quantized import QuantizedModel

__all__ = ["AnyLocalizer", "open_localizer"]

AnyLocalizer: TypeAlias = Localizer | PairedLocalizer


def open_localizer(quantized: QuantizedModel, runtime: str = "builtin") -> AnyLocalizer:
    """
    Return what localizes a model: by its float form where a flow made it, else by torch's graph.

    Args:
        quantized: The file and its references.
        runtime: Kernels that keep intermediate tensors: `builtin` or `reference`.

    Raises:
        ValueError: No torch reference, or a runtime that keeps no intermediate tensors.
        RuntimeError: The kernels cannot allocate the file.
    """
    if quantized.flow in ("recipe", "float"):
        return PairedLocalizer(quantized, forms_of(quantized), runtime)
    return Localizer(quantized, runtime)
