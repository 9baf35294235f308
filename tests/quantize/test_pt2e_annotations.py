"""Quantizers that users write: every spec, every observer, and what no kernel takes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fixtures.models import EmbeddingMean, net
from pytest_edgeq import assert_no_float_ops, assert_op_dtypes, assert_qparams, litert

with litert.quiet():
    import torch.ao.quantization as torchs
    from torch.ao.quantization._learnable_fake_quantize import _LearnableFakeQuantize
    from torchao.quantization.pt2e import fake_quantize, learnable_fake_quantize, observer
    from torchao.quantization.pt2e.quantizer import DerivedQuantizationSpec, QuantizationAnnotation

from tests.quantize import making
from tests.quantize.quantizers import ACTIVATION, WEIGHT, ByHand, activation, weight

if TYPE_CHECKING:
    from pytest_edgeq import QuantizedModel


def linears() -> nn.Module:
    """Two linear layers: the smallest that has an inside."""
    forward = lambda self, x: self.b(self.a(x))  # noqa: E731
    return net(forward, "Linears", a=nn.Linear(8, 8), b=nn.Linear(8, 4))


def convs() -> nn.Module:
    """A convolution and a transposed one."""
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ConvTranspose2d(4, 3, 2, stride=2))


# So many vectors that each sample has much the same range; one image.
ROWS, IMAGE = (64, 8), (1, 2, 6, 6)


def quantize(
    quantizer: Any,
    make: Callable[[], nn.Module] = linears,
    shape: tuple[int, ...] = ROWS,
    *,
    sqnr_db: float = 20,
) -> QuantizedModel:
    """
    Return the model under a quantizer, close to torch.

    What is int8 lies at 30 dB and above; a wrong scale anywhere at less than 15.
    """
    quantized = making.quantize(quantizer, make, shape)
    assert making.sqnr_db(quantized, make, shape) > sqnr_db
    return quantized


LEARNED: Any = _LearnableFakeQuantize  # without types
FIXED = {"scale": 0.03, "zero_point": 3, "dtype": torch.int8, "quant_min": -128, "quant_max": 127}


def faked(kind: Any, **options: Any) -> tuple[Any, Any]:
    """Fake quantizers of activations and weights."""
    return (
        kind.with_args(observer=observer.MinMaxObserver, **options),
        kind.with_args(observer=observer.PerChannelMinMaxObserver, **options),
    )


# What observes activations, and what weights.
OBSERVERS: Mapping[str, tuple[Any, Any]] = {
    "moving averages": (
        observer.MovingAverageMinMaxObserver,
        observer.MovingAveragePerChannelMinMaxObserver,
    ),
    "histograms": (observer.HistogramObserver.with_args(eps=2**-12), None),
    "fixed": (observer.FixedQParamsObserver.with_args(scale=0.03, zero_point=3), None),
    "fake quantizers": faked(fake_quantize.FakeQuantize),
    "fixed fake quantizers": (
        fake_quantize.FixedQParamsFakeQuantize.with_args(
            observer=observer.FixedQParamsObserver.with_args(**FIXED)
        ),
        None,
    ),
    "learned": faked(learnable_fake_quantize.LearnableFakeQuantize),
    "torch's own": (torchs.MinMaxObserver, torchs.PerChannelMinMaxObserver.with_args(eps=2**-12)),
    "torch's own, learned": (
        LEARNED.with_args(observer=torchs.MinMaxObserver, scale=1.0),
        LEARNED.with_args(observer=torchs.PerChannelMinMaxObserver, channel_len=8),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OBSERVERS)
def test_every_observer(name: str) -> None:
    """Every op is int8 from end to end, whatever the parameters come from."""
    activations, weights = OBSERVERS[name]
    spec = activation(activations)
    quantized = quantize(
        ByHand(taken=spec, weight=WEIGHT if weights is None else weight(weights), given=spec),
    )

    assert_op_dtypes(
        quantized,
        "FULLY_CONNECTED",
        input="int8",
        weight="int8",
        bias="int32",
        output="int8",
        granularity="per_channel",
        count=2,
    )
    assert_no_float_ops(quantized)
    if name.startswith("fixed"):
        # As a float32.
        bounds = (float(np.float32(0.03)),) * 2
        assert_qparams(quantized, role="output", zero_point=3, scale_range=bounds)


def test_an_observer_derived_from_torchs() -> None:
    """No twin of it exists in torchao, which would take it out of the graph without a word."""

    class Mine(torchs.MinMaxObserver):
        pass

    with pytest.raises(ValueError, match=r"Mine is an observer of torch.ao.quantization"):
        quantize(ByHand(taken=activation(Mine)))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("dynamic", [observer.PlaceholderObserver, observer.MinMaxObserver])
def test_dynamic_activations(dynamic: Any) -> None:
    """The weights are int8, and the kernels do the rest."""
    quantized = quantize(ByHand(taken=activation(dynamic, is_dynamic=True), given=None))

    assert_op_dtypes(
        quantized, "FULLY_CONNECTED", scheme="dynamic", weight="int8", input="float32", count=2
    )


@pytest.mark.sweep(1)
@pytest.mark.parametrize("spec", [weight(ch_axis=1), weight(ch_axis=0)])
def test_a_transposed_convolution(spec: Any) -> None:
    """In int8, and as the simulated graph has it; its scales are of output channels always."""
    quantizer = ByHand("conv_transpose2d", weight=spec)
    quantized = quantize(quantizer, convs, IMAGE)

    assert_op_dtypes(quantized, "TRANSPOSE_CONV", scheme="int8", granularity="per_channel", count=1)


def test_an_embedding_among_static_ops() -> None:
    """Its table alone is quantized, beside a linear layer that is int8."""

    class Both(ByHand):
        def annotate(self, model: Any) -> Any:
            for node in model.graph.nodes:
                if node.target is torch.ops.aten.embedding.default:
                    node.meta["quantization_annotation"] = QuantizationAnnotation(
                        input_qspec_map={node.args[0]: WEIGHT}, _annotated=True
                    )
            return super().annotate(model)

    quantized = making.quantize(Both(), EmbeddingMean)

    assert_op_dtypes(quantized, "EMBEDDING_LOOKUP", weight="int8", count=1)
    assert_op_dtypes(quantized, "FULLY_CONNECTED", scheme="int8", count=1)


def bias(factor: float) -> Callable[[Any], Any]:
    """A bias in int32; its scale is input × weight × factor."""

    def scale(observers: list[Any]) -> tuple[Tensor, Tensor]:
        (taken, _), (weights, _) = (each.calculate_qparams() for each in observers)
        scales = taken * weights * factor
        return scales, torch.zeros_like(scales, dtype=torch.int64)

    return lambda node: DerivedQuantizationSpec(
        derived_from=[(node.args[0], node), (node.args[1], node)],
        derive_qparams_fn=scale,
        dtype=torch.int32,
        quant_min=-(2**31),
        quant_max=2**31 - 1,
        qscheme=torch.per_channel_symmetric,
        ch_axis=0,
    )


def test_a_derived_bias() -> None:
    """The codes in the file are those of the graph that stands for the device."""
    quantized = quantize(ByHand(bias=bias(1.0)))
    graph = quantized.graph
    simulated = quantized.simulated
    assert simulated is not None

    for path, op in zip("ab", graph.ops, strict=True):
        taken, weights, stored = (graph.tensor(op, index) for index in op.inputs)
        np.testing.assert_allclose(stored.scales, taken.scales * weights.scales, rtol=1e-6)
        original = getattr(quantized.float_model, path).bias.detach().numpy()
        codes = graph.constant(stored).view(np.int32)
        np.testing.assert_array_equal(codes, np.rint(original / stored.scales))


def test_a_bias_with_another_scale() -> None:
    """The file could not have it."""
    with pytest.raises(
        ValueError, match=r"its bias is annotated with scale .* input × weight only"
    ):
        quantize(ByHand(bias=bias(2.0)))
    own = activation(dtype=torch.int32, quant_min=-(2**31), quant_max=2**31 - 1)
    with pytest.raises(ValueError, match="its input or its weight is not quantized"):
        quantize(ByHand(taken=None, given=None, bias=lambda node: own))


def test_the_callback_for_finished_observers() -> None:
    """Torchao calls it before the observers stand in the graph; it may replace any of them."""

    class Called(ByHand):
        def prepare_obs_or_fq_callback(self, model: Any, observers: Any) -> None:
            (result,) = model.graph.output_node().all_input_nodes
            observers[result] = observer.FixedQParamsObserver(**FIXED)

    quantized = quantize(Called())

    assert_qparams(quantized, "FULLY_CONNECTED", "b", role="output", zero_point=3)
    with pytest.raises(AssertionError):
        assert_qparams(quantized, "FULLY_CONNECTED", "a", role="output", zero_point=3)


def test_an_op_that_the_converter_leaves_in_float() -> None:
    """Its weight and its input were annotated, its output was not: a warning names it."""
    with pytest.warns(
        UserWarning, match=r"Linears: 1 op\(s\) stay in float .* FULLY_CONNECTED #\d \(b\)"
    ):
        quantized = quantize(ByHand(given=None))
    assert_op_dtypes(quantized, "FULLY_CONNECTED", module="b", scheme="float")


INT4 = torch.int4  # type: ignore[attr-defined] # torch's types do not know it
PER_TENSOR = {"qscheme": torch.per_tensor_affine, "ch_axis": None}

REFUSED: Mapping[str, tuple[Any, str]] = {
    "uint8 activations": (
        ByHand(given=activation(dtype=torch.uint8, quant_min=0, quant_max=255)),
        "torch.uint8, but the converter .* use torch.int8",
    ),
    "quint8 activations": (
        ByHand(taken=activation(dtype=torch.quint8, quant_min=0, quant_max=255)),
        "torch.quint8, but the converter .* use torch.int8",
    ),
    "int16 activations": (
        ByHand(taken=activation(dtype=torch.int16, quant_min=-32768, quant_max=32767)),
        "torch.int16, but the converter .*'recipe_static_wi8_ai16'",
    ),
    "float16 activations": (
        ByHand(taken=activation(dtype=torch.float16)),
        "torch.float16, which the converter cannot lower",
    ),
    "activations by channel": (
        ByHand(taken=weight(ch_axis=1)),
        "its activation is annotated with torch.per_channel_symmetric",
    ),
    "a static placeholder": (
        ByHand(taken=activation(observer.PlaceholderObserver)),
        "PlaceholderObserver looks at no values",
    ),
    "dynamic activations alone": (
        ByHand(taken=activation(is_dynamic=True), weight=None, given=None),
        "no weight of it is quantized",
    ),
    "uint8 weights": (
        ByHand(weight=weight(dtype=torch.uint8, quant_min=0, quant_max=255)),
        "weight is annotated as torch.uint8, .* int8 weights only",
    ),
    "int4 weights": (
        ByHand(weight=weight(dtype=INT4, quant_min=-7, quant_max=7)),
        "weight is annotated as torch.int4, .*'recipe_dynamic_wi4_afp32'",
    ),
    "asymmetric weights by channel": (
        ByHand(weight=weight(qscheme=torch.per_channel_affine)),
        "weights with zero point 0",
    ),
    "weights by input channel": (
        ByHand(weight=weight(ch_axis=1)),
        "of axis 1, but kernels take them for output channels: ch_axis=0",
    ),
    "an int8 bias": (
        ByHand(bias=lambda node: ACTIVATION),
        "bias is annotated as torch.int8, but kernels take int32",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_no_kernel_takes(name: str) -> None:
    """Refused before anything is converted, in one sentence that names the op and the way out."""
    quantizer, message = REFUSED[name]
    with pytest.raises(ValueError, match=message) as caught:
        quantize(quantizer)
    assert re.match(r"Linears: linear\w* \(aten.linear.default\): ", str(caught.value))
    assert "\n" not in str(caught.value)


def test_weights_of_convolutions_that_no_kernel_takes() -> None:
    """A linear layer takes one zero point for its weight, a convolution none."""
    asymmetric = weight(observer.MinMaxObserver, quant_min=-128, **PER_TENSOR)
    quantized = quantize(ByHand(weight=asymmetric))
    assert_qparams(quantized, "FULLY_CONNECTED", symmetric=False, granularity="per_tensor")

    with pytest.raises(ValueError, match="weights with zero point 0"):
        quantize(ByHand("conv2d", weight=asymmetric), convs, IMAGE)


def test_four_bits_in_eight() -> None:
    """A weight of int8 with the range of int4 is int8 in the file."""
    # Four bits leave 24 dB of such a model.
    quantized = quantize(ByHand(weight=weight(quant_min=-7, quant_max=7)), sqnr_db=15)

    assert_op_dtypes(quantized, "FULLY_CONNECTED", weight="int8", scheme="int8", count=2)
