"""Every preset on one small model: what each promises, told by the file and by numbers."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from fixtures.models import ResidualNet, samples, seeded
from pytest_edgeq import Edgeq, litert
from pytest_edgeq.names import PRESETS
from tests.quantize import making

PT2E, RECIPE = (
    f"{stage}, total" for stage in ("quantization, lowering", "conversion, quantization")
)

# The scheme that a preset gives to the convolutions, dtype and granularity of their weights, and
# the stages of its flow.
PROMISES = {
    "pt2e_static_int8": ("int8", "int8", "per_channel", PT2E),
    "pt2e_static_int8_per_tensor": ("int8", "int8", "per_tensor", PT2E),
    "pt2e_qat_int8": ("int8", "int8", "per_channel", PT2E),
    "pt2e_dynamic_int8": ("dynamic", "int8", "per_channel", PT2E),
    "recipe_static_wi8_ai8": ("int8", "int8", "per_channel", RECIPE),
    "recipe_static_wi8_ai16": ("int16x8", "int8", "per_channel", RECIPE),
    "recipe_dynamic_wi8_afp32": ("dynamic", "int8", "per_channel", RECIPE),
    "recipe_weight_only_wi8_afp32": ("weight_only", "int8", "per_channel", RECIPE),
    "recipe_dynamic_wi4_afp32": ("dynamic", "int4", "per_channel", RECIPE),
    "recipe_weight_only_wi4_afp32": ("weight_only", "int4", "per_channel", RECIPE),
}
SLOW = ("pt2e_static_int8_per_tensor", "pt2e_qat_int8")


def test_the_table_has_every_preset() -> None:
    """A preset that is added without a promise is not tested."""
    assert set(PROMISES) == set(PRESETS)


def _observe(prepared: torch.nn.Module) -> None:
    """Train for nothing: the fake quantizers see data, the weights stay as they are."""
    with torch.no_grad():
        for sample in samples(ResidualNet, 8):
            prepared(*sample)


@pytest.mark.parametrize(
    "preset", [pytest.param(p, marks=pytest.mark.slow) if p in SLOW else p for p in PROMISES]
)
def test_a_preset_keeps_its_promise(maker: Edgeq, preset: str) -> None:
    """Scheme, stored dtype and granularity of every convolution; the stages of the flow."""
    *promised, stages = PROMISES[preset]
    quantized = making.quantize(preset, train=_observe if "_qat_" in preset else None)
    convolutions = quantized.op_dtypes.ops(op="CONV_2D")
    comparison = maker.compare(quantized, samples(ResidualNet, 8, seed=2))

    assert {(c.scheme, c.weight, c.granularity) for c in convolutions} == {tuple(promised)}
    assert ", ".join(comparison.stages) == stages
    assert comparison.total.n_samples == 8
    assert comparison.total.nonfinite == 0
    # Four bits give about 6.02 · 4 ≈ 24 dB less what the layers add, eight about 24 dB more; a
    # model whose inputs or outputs are mixed up has about 0 dB.
    assert comparison.total.sqnr_db > (10 if "wi4" in preset else 20)


def test_none_gives_plain_float(maker: Edgeq) -> None:
    """Without a quantizer the file is the conversion, and the two stages are one."""
    quantized = making.quantize(None)
    comparison = maker.compare(quantized, samples(ResidualNet, 4))

    assert quantized.flow == "float"
    assert {entry.scheme for entry in quantized.op_dtypes} == {"float"}
    assert tuple(comparison.stages) == ("conversion", "total")
    # float32 has 24 bits: 6.02 · 24 ≈ 144 dB for one rounding.
    assert comparison.total.sqnr_db > 100


def test_the_simulated_graph_and_the_file_are_told_apart(maker: Edgeq) -> None:
    """The stages of a PT2E flow measure what they say: lowering is edge against simulated."""
    model = seeded(ResidualNet)
    quantized = making.quantize("pt2e_static_int8")
    evaluated = list(samples(ResidualNet, 32, seed=3))
    comparison = maker.compare(quantized, evaluated)
    with torch.no_grad():
        floats = torch.cat([model(*s) for s in evaluated]).double()
        simulated = torch.cat([quantized.simulated(*s) for s in evaluated]).double()  # type: ignore[misc] # this flow has one
    edge = torch.cat([torch.from_numpy(quantized.run(*s)["output_0"]) for s in evaluated]).double()
    noise = [
        float((a - b).square().sum())
        for a, b in ((floats, simulated), (simulated, edge), (floats, edge))
    ]
    measured = [comparison.quantization, comparison.lowering, comparison.total]

    assert len(set(noise)) == 3
    for expected, stage in zip(noise, measured, strict=True):
        assert stage is not None
        assert stage.rmse == pytest.approx((expected / floats.numel()) ** 0.5, rel=1e-9)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("preset", ["pt2e_static_int8", "pt2e_static_int8_per_tensor"])
def test_the_graph_that_is_run_changes_no_bit(preset: str) -> None:
    """It rounds weights once and activations in place, and stays what the stages say."""
    simulated = making.quantize(preset).simulated
    assert simulated is not None
    run = litert.copied_to_run(simulated)
    assert isinstance(simulated, torch.fx.GraphModule)
    assert isinstance(run, torch.fx.GraphModule)
    assert len(run.graph.nodes) < len(simulated.graph.nodes)
    assert "quantized_decomposed" in simulated.code
    assert "quantized_decomposed" not in run.code
    for sample in samples(ResidualNet, 4, seed=3):
        assert torch.equal(simulated(*sample), run(*sample))


@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [(torch.int8, -128, 127), (torch.uint8, 0, 255), (torch.int16, -32768, 32767)],
    ids=["int8", "uint8", "int16"],
)
@pytest.mark.parametrize("given", [torch.float32, torch.float16, torch.bfloat16])
def test_activations_are_rounded_as_torch_rounds_them(
    dtype: torch.dtype, low: int, high: int, given: torch.dtype
) -> None:
    """In place, with ties, values beyond the range and infinities; the operand stays as it was."""
    with litert.quiet():
        import_module("torch.ao.quantization.fx._decomposed")  # registers the operators
    ops = torch.ops.quantized_decomposed
    graph = torch.fx.Graph()
    arguments = (0.25, 3, low, high, dtype)
    values = graph.placeholder("values")
    codes = graph.call_function(ops.quantize_per_tensor.default, (values, *arguments))
    floats = graph.call_function(ops.dequantize_per_tensor.default, (codes, *arguments))
    graph.output((codes, floats))
    simulated = torch.fx.GraphModule({}, graph)
    sample = torch.cat(
        [torch.arange(-40, 40) / 8, torch.tensor([1e5, -1e5, torch.inf, -torch.inf])]
    )
    sample = sample.to(given)
    kept = sample.clone()

    wanted, got = simulated(sample), litert.copied_to_run(simulated)(sample)

    assert torch.equal(sample, kept)
    for expected, value in zip(wanted, got, strict=True):
        assert value.dtype == expected.dtype
        assert torch.equal(value, expected)


def test_random_generators_are_left_as_they_were() -> None:
    """The fixed seed is given back: a test's own random numbers do not repeat after quantizing."""
    torch.manual_seed(1)
    expected = torch.randn(3)
    torch.manual_seed(1)
    making.quantize(None)

    assert torch.equal(torch.randn(3), expected)
