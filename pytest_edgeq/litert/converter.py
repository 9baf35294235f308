"""From torch to `.tflite`: the converter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_edgeq.litert.chatter import quiet
from pytest_edgeq.litert.constants import true_constants
from pytest_edgeq.litert.libraries import converter_module
from pytest_edgeq.litert.pt2e import pt2e_preset

if TYPE_CHECKING:
    import torch


__all__ = ["SIGNATURE", "Traced", "convert"]

# The name of a file's only entry point.
SIGNATURE = "serving_default"


@dataclass(frozen=True, slots=True)
class Traced:
    """
    What one signature of a file is converted from.

    Attributes:
        model: In eval mode, or the graph that PT2E gives.
        args: Positional sample inputs.
        kwargs: Keyword sample inputs.
        dynamic_shapes: As `torch.export.export` takes it.
    """

    model: torch.nn.Module
    args: tuple[torch.Tensor, ...]
    kwargs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    dynamic_shapes: Any = None


def convert(
    signatures: Mapping[str, Traced],
    *,
    static: bool | None = None,
    second_pipeline: bool = False,
) -> bytes:
    """
    Convert torch models to one `.tflite`.

    Args:
        signatures: What each entry point of the file is converted from, by its name.
        static: Of PT2E graphs: whether activations are quantized statically. None for float models.
            The quantizer's own config is not passed on: the converter looks at nothing but
            `global_config.is_dynamic` (litert-torch 0.10.0, `quant_config.py`), which a quantizer
            that sets configs by module or by operator does not have. So it gets one of that kind.
        second_pipeline: Convert by the one that needs TensorFlow; see `litert.second_pipeline`.
    """
    with quiet():
        QuantConfig = converter_module("quantize.quant_config").QuantConfig

        config = None
        if static is not None:
            preset = "pt2e_static_int8" if static else "pt2e_dynamic_int8"
            config = QuantConfig(pt2e_quantizer=pt2e_preset(preset))
        converter: Any = converter_module()
        for name, traced in signatures.items():
            converter = converter.signature(
                name,
                traced.model,
                traced.args,
                dict(traced.kwargs) or None,
                dynamic_shapes=traced.dynamic_shapes,
            )
        # ai-edge-torch has neither the second pipeline nor the newer name of the content.
        pipeline = {"use_v2": True} if second_pipeline else {}
        with true_constants():
            edge = converter.convert(quant_config=config, **pipeline)
        give = edge.model_content if hasattr(edge, "model_content") else edge.tflite_model
        content: bytes = give()
        return content
