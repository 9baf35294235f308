"""PT2E quantizers as users set them up or write them."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from pytest_edgeq import litert

with litert.quiet():
    from litert_torch.quantize import pt2e_quantizer
    from torchao.quantization.pt2e import observer
    from torchao.quantization.pt2e.quantizer import (
        QuantizationAnnotation,
        QuantizationSpec,
        Quantizer,
    )

if TYPE_CHECKING:
    from collections.abc import Callable

INT8 = {"dtype": torch.int8, "quant_min": -127, "quant_max": 127}


def activation(made_by: Any = observer.MinMaxObserver, **changes: Any) -> Any:
    """int8, one scale and one zero point."""
    options = {**INT8, "quant_min": -128, "qscheme": torch.per_tensor_affine, **changes}
    return QuantizationSpec(observer_or_fake_quant_ctr=made_by, **options)


def weight(made_by: Any = observer.PerChannelMinMaxObserver, **changes: Any) -> Any:
    """int8, a scale for each output channel."""
    options = {**INT8, "qscheme": torch.per_channel_symmetric, "ch_axis": 0, **changes}
    return QuantizationSpec(observer_or_fake_quant_ctr=made_by, **options)


ACTIVATION, WEIGHT = activation(), weight()


class ByHand(Quantizer):  # type: ignore[misc] # torchao ships no types
    """Annotates every op of some kinds in the same way; a bias by a function of its node."""

    def __init__(
        self,
        ops: str = "linear",
        *,
        taken: Any = ACTIVATION,
        weight: Any = WEIGHT,
        given: Any = ACTIVATION,
        bias: Callable[[Any], Any] | None = None,
    ) -> None:
        self.ops, self.taken, self.weight, self.given, self.bias = ops, taken, weight, given, bias

    def annotate(self, model: Any) -> Any:
        """First and second argument, the bias if asked, and the result."""
        for node in model.graph.nodes:
            name = getattr(node.target, "_schema", None)
            if name is None or name.name.split("::")[1] not in self.ops.split():
                continue
            specs = dict(zip(node.args, (self.taken, self.weight), strict=False))
            if self.bias is not None:
                specs[node.args[2]] = self.bias(node)
            node.meta["quantization_annotation"] = QuantizationAnnotation(
                input_qspec_map={operand: spec for operand, spec in specs.items() if spec},
                output_qspec=self.given,
                _annotated=True,
            )
        return model

    def validate(self, model: Any) -> None:
        """Everything is fine."""


def per_channel(**options: Any) -> Any:
    """The default preset's config, or a variant."""
    options = {"is_per_channel": True, **options}
    return pt2e_quantizer.get_symmetric_quantization_config(**options)


def per_tensor(**options: Any) -> Any:
    """Told from the other by the granularity of the weights in the file."""
    return per_channel(is_per_channel=False, **options)


def converters() -> Any:
    """The converter's own quantizer."""
    return pt2e_quantizer.PT2EQuantizer()


def xnnpacks(**options: bool) -> tuple[Any, Any]:
    """Torchao's copy of ExecuTorch's quantizer, which says that it is deprecated; a config."""
    with litert.quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.testing.pt2e import _xnnpack_quantizer as xnnpack

        return xnnpack.XNNPACKQuantizer(), xnnpack.get_symmetric_quantization_config(**options)
