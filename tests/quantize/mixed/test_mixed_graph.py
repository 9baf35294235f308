"""A quantized graph that is run with the roundings of some layers alone."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fixtures.models import (
    ConcatSkip,
    ConvBnRelu,
    DepthwiseSeparable,
    LayerNormGelu,
    PoolPadResize,
    ResidualNet,
    SelfAttention,
    SharedModule,
    SqueezeExcite,
    TwoInputs,
    samples,
    seeded,
)
from pytest_edgeq import Edgeq, litert
from pytest_edgeq.compare.reference import call_reference, flatten_outputs
from pytest_edgeq.litert.mixed import AnnotatedGraph, MixedGraph, Rounding
from pytest_edgeq.numerics.metrics import least_sqnr_db
from tests.quantize.mixed import nets

MODELS = [
    *(ConvBnRelu, DepthwiseSeparable, LayerNormGelu, ResidualNet, SelfAttention, SqueezeExcite),
    *(ConcatSkip, PoolPadResize, SharedModule, TwoInputs),
]


def _annotated(module: Any, inputs: list[Any], quantizer: Any) -> AnnotatedGraph:
    with litert.quiet():
        exported = litert.export(litert.Traced(module, inputs[0]), strict=True).module()
        return AnnotatedGraph(
            copy.deepcopy(exported), quantizer, lambda: ((each, {}) for each in inputs)
        )


def _outputs(graph: MixedGraph, values: Any) -> list[Any]:
    return [value for _, value in flatten_outputs(graph.outputs(values))]


@pytest.mark.parametrize("point", [-127, 0, 7])
@pytest.mark.parametrize("scale", [0.1, 1 / 3, 1e-7])
@pytest.mark.parametrize(("low", "high"), [(-128, 127), (-127, 127), (-32768, 32767)])
def test_a_rounding_has_the_bits_of_a_fake_quantizer(
    low: int, high: int, scale: float, point: int
) -> None:
    """Codes between two integers round alike, and those outside of the range are clipped."""
    codes = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * high
    values = torch.cat([codes, codes.round() + 0.5]) * scale
    rounding = Rounding(torch.tensor([scale]), torch.tensor([point]), low, high, None)
    found = rounding(values)
    expected = torch.fake_quantize_per_tensor_affine(values, scale, point, low, high)
    assert torch.equal(found, expected)
    assert len(set(found.tolist())) > 200


@pytest.mark.parametrize("quantizer", ["pt2e_static_int8", "pt2e_dynamic_int8"])
@pytest.mark.parametrize("model", MODELS, ids=lambda each: each.__name__)
@pytest.mark.sweep(1)
def test_with_all_roundings_it_is_the_quantized_graph(
    maker: Edgeq, model: Any, quantizer: str
) -> None:
    """Up to the order of float32 operations in one rounding; with none it is the float model."""
    inputs, module = list(samples(model, 8)), seeded(model)
    quantized = maker.quantize(module, inputs[0], quantizer=quantizer, calibration=inputs)
    instance = litert.pt2e_preset(quantizer)
    annotated = _annotated(module, inputs, instance)
    [made] = annotated.roundings([instance])
    for sample in samples(model, 3, seed=2):
        bound = quantized.spec.bind((sample, {}), "sample")
        for reference, roundings in (
            (quantized.simulated, made),
            (quantized.float_model, litert.NOTHING),
        ):
            assert reference is not None
            expected = [value for _, value in call_reference(reference, bound)]
            got = _outputs(annotated.graph, annotated.graph.run(sample, {}, roundings))
            assert len(got) == len(expected)
            assert least_sqnr_db(expected, got) > 90, roundings


@pytest.mark.slow
def test_with_a_layer_in_float_it_is_the_graph_of_that_quantizer(maker: Edgeq) -> None:
    """A bounded activation has a range of its own once the layer before it is in float."""
    inputs = nets.images(8)
    model = seeded(
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU6(), nn.Conv2d(8, 8, 3), nn.ReLU6())
    )
    instance = litert.pt2e_preset(nets.PT2E)
    annotated = _annotated(model, [(each,) for each in inputs], instance)
    quantizers = [litert.left_in_float(instance, [layer]) for layer in "0123"]
    for quantizer, made in zip(quantizers, annotated.roundings(quantizers), strict=True):
        quantized = maker.quantize(model, (inputs[0],), quantizer=quantizer, calibration=inputs)
        assert quantized.simulated is not None
        for sample in nets.images(3, seed=2):
            bound = quantized.spec.bind(sample, "sample")
            expected = [value for _, value in call_reference(quantized.simulated, bound)]
            got = _outputs(annotated.graph, annotated.graph.run((sample,), {}, made))
            assert least_sqnr_db(expected, got) > 60


def test_what_changes_is_computed_anew() -> None:
    """Bit for bit as in a whole run, from whichever layer on."""
    instance = litert.pt2e_preset(nets.PT2E)
    annotated = _annotated(seeded(ResidualNet), list(samples(ResidualNet, 8)), instance)
    [made] = annotated.roundings([instance])
    graph, sample = annotated.graph, next(samples(ResidualNet, 1, seed=2))
    before = graph.run(sample, {}, made)
    for op in sorted(made.results):
        others = made._replace(results={k: v for k, v in made.results.items() if k != op})
        whole = graph.run(sample, {}, others)
        changed = {**before, **graph.changed(before, made, others)}
        for one, two in zip(_outputs(graph, whole), _outputs(graph, changed), strict=True):
            np.testing.assert_array_equal(one, two)


def test_a_layer_in_float_is_not_rounded() -> None:
    """A tensor between two layers in float is not rounded."""
    instance = litert.pt2e_preset(nets.PT2E)
    annotated = _annotated(nets.chain(), [(each,) for each in nets.images(2)], instance)
    whole, made = annotated.roundings([instance, litert.left_in_float(instance, ["b", "c"])])
    layers = annotated.layers(whole)

    assert set(layers.values()) == {*"abcdef"}
    ops = {op for op, layer in layers.items() if layer in ("b", "c")}
    assert not made.results.keys() & ops
    assert not {op for op, _ in made.operands} & ops
    assert {layers[op] for op, _ in made.operands} == {*"adef"}


def test_tensors_of_one_range_are_observed_in_the_order_of_the_graph() -> None:
    """In that of a set of names, a search differed from one process to the next."""
    inputs = [(torch.full((1, 2), 9.0),)]
    module = nn.Sequential(*(nn.Hardtanh(0.0, 9.0 - bound) for bound in range(1, 9)))
    annotated = _annotated(module.eval(), inputs, litert.pt2e_preset(nets.PT2E))
    names = [name for name in annotated.graph.run(inputs[0], {}, litert.NOTHING) if "tanh" in name]
    seen: list[float] = []

    annotated._observe({(frozenset(names), ()): lambda values: seen.append(float(values.max()))})

    assert seen == [8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]
