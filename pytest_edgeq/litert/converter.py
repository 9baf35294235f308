"""From torch to `.tflite`: the converter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pytest_edgeq.litert.chatter import quiet
from pytest_edgeq.litert.pt2e import pt2e_preset

if TYPE_CHECKING:
    import torch


__all__ = ["SIGNATURE", "convert_graph", "convert_model"]

# Where the float conversion of a torch model puts its only entry point.
SIGNATURE = "serving_default"


def convert_graph(
    converted: torch.fx.GraphModule,
    args: tuple[torch.Tensor, ...],
    kwargs: Mapping[str, torch.Tensor],
    *,
    static: bool,
    dynamic_shapes: Any = None,
) -> bytes:
    """
    Convert a PT2E graph to `.tflite`.

    The quantizer's own config is not passed on: the converter looks at nothing but
    `global_config.is_dynamic` (litert-torch 0.10.0, `quant_config.py`), which a quantizer that
    sets configs by module or by operator does not have. So it gets one of that kind.
    """
    with quiet():
        from litert_torch.quantize.quant_config import QuantConfig

        preset = "pt2e_static_int8" if static else "pt2e_dynamic_int8"
        config = QuantConfig(pt2e_quantizer=pt2e_preset(preset))
    return _convert(converted, args, kwargs, dynamic_shapes=dynamic_shapes, quant_config=config)


def convert_model(
    model: torch.nn.Module,
    args: tuple[torch.Tensor, ...],
    kwargs: Mapping[str, torch.Tensor],
    *,
    dynamic_shapes: Any = None,
) -> bytes:
    """Convert a torch model to a float `.tflite`."""
    return _convert(model, args, kwargs, dynamic_shapes=dynamic_shapes)


def _convert(
    model: torch.nn.Module,
    args: tuple[torch.Tensor, ...],
    kwargs: Mapping[str, torch.Tensor],
    **options: Any,
) -> bytes:
    with quiet():
        import litert_torch

        edge = litert_torch.convert(model, args, dict(kwargs) or None, **options)
        content: bytes = edge.model_content()
        return content
