"""
Seven well-known recipes for PT2E quantizers: copy the one that you need.

Each is a model, a quantizer, and the promise that holds what the quantizer is there for. Every
promise is checked twice: it holds on the model quantized so, and it does not hold on the same model
under a preset, which is what you would ship without the recipe.
"""

# The converter ships no types.
# mypy: disable-error-code="misc, no-any-return"

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from litert_torch.quantize.pt2e_quantizer import PT2EQuantizer, get_symmetric_quantization_config
from torch import Tensor, nn
from torchao.quantization.pt2e.observer import PerChannelMinMaxObserver
from torchao.quantization.pt2e.quantizer import (
    DerivedQuantizationSpec,
    FixedQParamsQuantizationSpec,
    QuantizationAnnotation,
    QuantizationSpec,
    SharedQuantizationSpec,
)

from pytest_edgeq import (
    Budget,
    assert_healthy,
    assert_no_float_ops,
    assert_op_dtypes,
    assert_output_dtypes,
    assert_qparams,
    assert_within_budget,
)

if TYPE_CHECKING:
    from pytest_edgeq import Edgeq, QuantizedModel

aten = torch.ops.aten

INT8 = get_symmetric_quantization_config(is_per_channel=True)
"""int8 activations, int8 weights with a scale for each output channel: the default preset."""


def nodes_of(graph: torch.fx.GraphModule, *ops: Any) -> list[torch.fx.Node]:
    """Every call of these operators, whatever the overload."""
    return [n for n in graph.graph.nodes if getattr(n.target, "overloadpacket", None) in ops]


def annotate(node: torch.fx.Node, inputs: dict[Any, Any], output: Any) -> None:
    """Say how a node's operands and its result are quantized; no other pattern takes it then."""
    node.meta["quantization_annotation"] = QuantizationAnnotation(
        input_qspec_map=inputs, output_qspec=output, _annotated=True
    )


# --- First and last layer kept in float -----------------------------------------------------------


class Ends(nn.Module):
    """Image in, logits out, by layers that are more delicate than those between."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.body = nn.Conv2d(8, 8, 3, padding=1)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(8, 5)

    def forward(self, image: Tensor) -> Tensor:
        """Return five logits."""
        features = torch.relu(self.body(torch.relu(self.stem(image))))
        logits: Tensor = self.head(self.pool(features).flatten(1))
        return logits


def ends_in_float() -> PT2EQuantizer:
    """Name the modules; None leaves a module in float."""
    quantizer = PT2EQuantizer().set_global(INT8)
    return quantizer.set_module_name("stem", None).set_module_name("head", None)


def ends_are_in_float(quantized: QuantizedModel) -> None:
    """The two that were named, and nothing between them."""
    assert_op_dtypes(quantized, "CONV_2D", module="stem", scheme="float", count=1)
    assert_op_dtypes(quantized, "CONV_2D", module="body", scheme="int8", count=1)
    assert_op_dtypes(quantized, "FULLY_CONNECTED", module="head", scheme="float", count=1)


# --- One layer type kept in float -----------------------------------------------------------------


def linear_in_float() -> PT2EQuantizer:
    """None keeps in float; `set_operator_type` and `set_module_name` narrow in the same way."""
    return PT2EQuantizer().set_global(INT8).set_module_type(nn.Linear, None)


def linear_is_in_float(quantized: QuantizedModel) -> None:
    """The linear layer, and nothing else."""
    assert_op_dtypes(quantized, "FULLY_CONNECTED", scheme="float", weight="float32", count=1)
    assert_no_float_ops(quantized, allow=("FULLY_CONNECTED",))


# --- TRANSPOSE_CONV in int8 -----------------------------------------------------------------------


class Upsampler(nn.Module):
    """Ends in a transposed convolution, for which `PT2EQuantizer` has no pattern."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.relu = nn.ReLU()
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)

    def forward(self, image: Tensor) -> Tensor:
        """Give four feature maps of twice the size."""
        features: Tensor = self.up(self.relu(self.conv(image)))
        return features


class TransposeConvInt8(PT2EQuantizer):
    """Its weight, [in, out, height, width], has its output channels on axis 1."""

    def annotate(self, model: torch.fx.GraphModule) -> torch.fx.GraphModule:
        """Before the others: what is annotated already is left alone."""
        weight = QuantizationSpec(
            dtype=torch.int8,
            quant_min=-127,
            quant_max=127,
            qscheme=torch.per_channel_symmetric,
            ch_axis=1,
            observer_or_fake_quant_ctr=PerChannelMinMaxObserver,
        )
        for node in nodes_of(model, aten.conv_transpose2d):
            inputs = {node.args[0]: INT8.input_activation, node.args[1]: weight}
            annotate(node, inputs, INT8.output_activation)
        return super().annotate(model)


def transpose_conv_int8() -> PT2EQuantizer:
    """All else as ever."""
    return TransposeConvInt8().set_global(INT8)


def transpose_conv_is_int8(quantized: QuantizedModel) -> None:
    """From the first op to the last."""
    assert_op_dtypes(
        quantized,
        "TRANSPOSE_CONV",
        input="int8",
        weight="int8",
        bias="int32",
        output="int8",
        granularity="per_channel",
        count=1,
    )
    assert_no_float_ops(quantized)


# --- Parameters shared over several layers --------------------------------------------------------


class Siamese(nn.Module):
    """Two towers whose codes are compared on the device, without rescaling."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Conv2d(3, 4, 3)
        self.right = nn.Conv2d(3, 4, 3)
        with torch.no_grad():
            self.right.weight.mul_(3)

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Give the features of either."""
        return self.left(left), self.right(right)


class SharedOutputs(PT2EQuantizer):
    """One observer for the results of all convolutions."""

    def annotate(self, model: torch.fx.GraphModule) -> torch.fx.GraphModule:
        """After the others: the outputs of all but the first follow the first."""
        model = super().annotate(model)
        first, *others = nodes_of(model, aten.conv2d)
        for node in others:
            node.meta["quantization_annotation"].output_qspec = SharedQuantizationSpec(first)
        return model


def shared_outputs() -> PT2EQuantizer:
    """The inputs keep their own parameters."""
    return SharedOutputs().set_global(INT8)


def outputs_are_shared(quantized: QuantizedModel) -> None:
    """Same dtype, scale and zero point."""
    assert_qparams(quantized, "CONV_2D", "left", role="output", shared_with="right")
    assert_no_float_ops(quantized)


# --- The model's output forced to int8 ------------------------------------------------------------


class Swish(nn.Module):
    """Ends in SiLU, which stays in float, and so does the output of the file."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 6)
        self.silu = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        """Give six values."""
        y: Tensor = self.silu(self.linear(x))
        return y


class OutputsInt8(PT2EQuantizer):
    """Quantizes what the model gives, whichever op it comes from."""

    def annotate(self, model: torch.fx.GraphModule) -> torch.fx.GraphModule:
        """The graph's output node takes the results as a tuple."""
        model = super().annotate(model)
        output = model.graph.output_node()
        annotate(output, dict.fromkeys(output.all_input_nodes, INT8.output_activation), None)
        return model


def outputs_int8() -> PT2EQuantizer:
    """SiLU itself stays in float, in front of a QUANTIZE."""
    return OutputsInt8().set_global(INT8)


def outputs_are_int8(quantized: QuantizedModel) -> None:
    """What the caller on the device reads."""
    assert_output_dtypes(quantized, "int8")


# --- Sigmoid and softmax with fixed parameters ----------------------------------------------------


class Attention(nn.Module):
    """Gives weights by softmax and gates by sigmoid, both between 0 and 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Linear(8, 6)
        self.gates = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Give six weights and six gates."""
        return torch.softmax(self.weights(x), -1), torch.sigmoid(self.gates(torch.tanh(x)))


class FixedProbabilities(PT2EQuantizer):
    """Kernels of LOGISTIC and SOFTMAX take no other parameters for their results."""

    def annotate(self, model: torch.fx.GraphModule) -> torch.fx.GraphModule:
        """256 steps from 0 to 1."""
        fixed = FixedQParamsQuantizationSpec(
            dtype=torch.int8,
            scale=1 / 256,
            zero_point=-128,
            quant_min=-128,
            quant_max=127,
            qscheme=torch.per_tensor_affine,
        )
        for node in nodes_of(model, aten.softmax, aten.sigmoid):
            annotate(node, {node.args[0]: INT8.input_activation}, fixed)
        return super().annotate(model)


def fixed_probabilities() -> PT2EQuantizer:
    """TANH stays in float."""
    return FixedProbabilities().set_global(INT8)


def probabilities_are_fixed(quantized: QuantizedModel) -> None:
    """In int8, with 1/256 and −128."""
    for op in ("SOFTMAX", "LOGISTIC"):
        assert_op_dtypes(quantized, op, input="int8", output="int8", count=1)
        assert_qparams(
            quantized, op, role="output", zero_point=-128, scale_range=(1 / 256, 1 / 256)
        )


# --- Bias scale = input scale × weight scale ------------------------------------------------------


class DerivedBias(PT2EQuantizer):
    """
    The bias in int32, its scale derived.

    The converter gives a bias that nobody annotates the same scale. Annotated, it is rounded in the
    graph that stands for the device, too: the lowering's error is that of the kernels alone.
    """

    def annotate(self, model: torch.fx.GraphModule) -> torch.fx.GraphModule:
        """After the others, which say how input and weight are quantized."""
        model = super().annotate(model)
        for node in nodes_of(model, aten.conv2d, aten.linear):
            taken, weight, bias = node.args[:3]
            node.meta["quantization_annotation"].input_qspec_map[bias] = DerivedQuantizationSpec(
                derived_from=[(taken, node), (weight, node)],
                derive_qparams_fn=product_of_scales,
                dtype=torch.int32,
                quant_min=-(2**31),
                quant_max=2**31 - 1,
                qscheme=torch.per_channel_symmetric,
                ch_axis=0,
            )
        return model


def product_of_scales(observers: list[Any]) -> tuple[Tensor, Tensor]:
    """Scale and zero point of a bias, one for each output channel."""
    (taken, _), (weight, _) = (observer.calculate_qparams() for observer in observers)
    scale = taken * weight
    return scale, torch.zeros_like(scale, dtype=torch.int64)


def derived_bias() -> PT2EQuantizer:
    """All else as ever."""
    return DerivedBias().set_global(INT8)


def bias_scales_are_derived(quantized: QuantizedModel) -> None:
    """int32, and each scale the product of the two."""
    for op, count in (("CONV_2D", 2), ("FULLY_CONNECTED", 1)):
        assert_op_dtypes(quantized, op, bias="int32", count=count)
        assert_qparams(quantized, op, role="bias", symmetric=True, granularity="per_channel")
    graph = quantized.graph
    for each in graph.ops:
        if each.name in ("CONV_2D", "FULLY_CONNECTED"):
            taken, weight, bias = (graph.tensor(each, index) for index in each.inputs)
            # float32 rounds a product by 6e-8 of it.
            np.testing.assert_allclose(bias.scales, taken.scales * weight.scales, rtol=1e-6)


# --- The recipes, and what each is held to --------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """
    One of the above.

    Args:
        model: the class.
        quantizer: makes the quantizer.
        promise: asserts what the quantizer is there for.
        sqnr_db: what was measured, less 3 dB for another machine's arithmetic.
        inputs: their shapes.
        without: the preset under which the promise does not hold.
    """

    model: type[nn.Module]
    quantizer: Callable[[], PT2EQuantizer]
    promise: Callable[[QuantizedModel], None]
    sqnr_db: float
    inputs: tuple[tuple[int, ...], ...] = ((1, 3, 8, 8),)
    without: str = "pt2e_static_int8"

    def made(self) -> nn.Module:
        """The model, with the same weights each time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.model().eval()

    def samples(self, n: int, seed: int) -> list[tuple[Tensor, ...]]:
        """Standard normal inputs."""
        generator = torch.Generator().manual_seed(seed)
        return [tuple(torch.randn(*s, generator=generator) for s in self.inputs) for _ in range(n)]

    def quantized(self, edgeq: Edgeq, quantizer: Any) -> QuantizedModel:
        """The model under a quantizer."""
        return edgeq.quantize(
            self.made(),
            self.samples(1, seed=0)[0],
            quantizer=quantizer,
            calibration=self.samples(32, seed=1),
        )


RECIPES = {  # after each: the SQNR measured
    "ends_in_float": Recipe(Ends, ends_in_float, ends_are_in_float, 44),  # 47.7
    "linear_in_float": Recipe(Ends, linear_in_float, linear_is_in_float, 37),  # 40.2
    "transpose_conv_int8": Recipe(
        Upsampler, transpose_conv_int8, transpose_conv_is_int8, 33
    ),  # 36.2
    "shared_outputs": Recipe(
        Siamese, shared_outputs, outputs_are_shared, 27, inputs=((1, 3, 8, 8), (1, 3, 8, 8))
    ),  # 30.5
    "outputs_int8": Recipe(Swish, outputs_int8, outputs_are_int8, 25, inputs=((1, 8),)),  # 28.5
    "fixed_probabilities": Recipe(
        Attention, fixed_probabilities, probabilities_are_fixed, 31, inputs=((1, 8),)
    ),  # 34.4
    "derived_bias": Recipe(
        Ends, derived_bias, bias_scales_are_derived, 34, without="pt2e_dynamic_int8"
    ),  # 37.4
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", RECIPES)
def test_the_recipe_keeps_its_promise(edgeq: Edgeq, name: str) -> None:
    """And the numbers stay close to torch."""
    recipe = RECIPES[name]
    quantized = recipe.quantized(edgeq, recipe.quantizer())
    recipe.promise(quantized)
    comparison = edgeq.compare(quantized, recipe.samples(64, seed=2))
    assert_within_budget(comparison, Budget(sqnr_db=recipe.sqnr_db))
    assert_healthy(comparison)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", RECIPES)
def test_without_the_recipe_it_does_not_hold(edgeq: Edgeq, name: str) -> None:
    """The same assertions on the same model, as it comes out of a preset."""
    plain = RECIPES[name].quantized(edgeq, RECIPES[name].without)
    with pytest.raises(AssertionError):
        RECIPES[name].promise(plain)
