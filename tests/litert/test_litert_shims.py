"""
Each shim over the libraries is still needed.

A test here fails when the upstream symptom is gone: then the shim goes, and the test with it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import subprocess
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.utils.source_matcher_utils import get_source_partitions

from fixtures.models import (
    ConcatSkip,
    ConvBnRelu,
    GruWithState,
    IntScalar,
    SqueezeExcite,
    TwoInputs,
    integers,
    net,
    normal,
    samples,
    seeded,
)
from pytest_edgeq import Edgeq, QuantizedModel, litert
from pytest_edgeq.litert import pt2e_graphs
from pytest_edgeq.litert.converter import (
    composite_ops_listed_once,
    graphs_compiled_on_call,
    histories_shared,
    kernels_for_present_devices,
)
from pytest_edgeq.litert.exported import number_paddings
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.op_dtypes import OpDtypeMap
from tests.quantize.quantizers import ByHand, activation, converters, per_channel, xnnpacks

pytestmark = pytest.mark.slow

observer: Any = litert.libraries.pt2e_module("observer")
convert_pt2e: Any = litert.libraries.pt2e_module("quantize_pt2e").convert_pt2e


def _by_torchao(graph: Any, quantizer: Any) -> Any:
    with litert.quiet():
        return litert.libraries.pt2e_module("quantize_pt2e").prepare_pt2e(graph, quantizer)


def _residual() -> nn.Module:
    block = net(lambda self, x: torch.relu(self.a(x)) + x, a=nn.Conv2d(8, 8, 1))
    return nn.Sequential(OrderedDict(stem=nn.Conv2d(3, 8, 3), block=block, head=nn.Conv2d(8, 4, 1)))


def _threshold() -> nn.Module:
    layers = nn.Conv2d(3, 4, 3), nn.Threshold(0.1, 0.5), nn.Conv2d(4, 4, 3)
    return nn.Sequential(*layers)


def test_integer_annotations_still_break_calibration() -> None:
    """Torchao 0.18.0: a histogram observer on an int64 tensor raises; see `prepare_pt2e`."""
    inputs, preset = IntScalar.sample_inputs(), litert.pt2e_preset("pt2e_static_int8")
    with pytest.raises(NotImplementedError, match=r"histogram_cpu.*not implemented for 'Long'"):
        _by_torchao(_strict(seeded(IntScalar), *inputs), preset)(*inputs)

    ours = litert.prepare_pt2e(_strict(seeded(IntScalar), *inputs), preset)
    ours(*inputs)
    assert litert.needs_data(ours)
    assert litert.uncalibrated(ours) == []


def test_an_unused_add_still_breaks_the_annotator() -> None:
    """Torch 2.13 leaves it in the graph, litert-torch 0.10.0 stumbles; see `prepare_pt2e`."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        torch.arange(4) + 1  # unused, as the position ids of a transformer are
        return x + x

    dead, preset = net(forward), litert.pt2e_preset("pt2e_static_int8")
    with pytest.raises(IndexError, match="list index out of range"):
        _by_torchao(_strict(dead, torch.ones(1, 4)), preset)
    assert litert.needs_data(litert.prepare_pt2e(_strict(dead, torch.ones(1, 4)), preset))


def test_folded_weights_are_still_refused_by_the_converter() -> None:
    """litert-torch 0.10.0 refuses what torchao's default gives; see `finish_pt2e`."""
    prepared = _by_torchao(
        _strict(nn.Linear(4, 4), torch.ones(1, 4)), litert.pt2e_preset("pt2e_static_int8")
    )
    with litert.quiet(), torch.no_grad():
        prepared(torch.ones(1, 4))
        folded = convert_pt2e(prepared)
    with pytest.raises(Exception, match=r"uniform_dequantize|per-tensor integer|quantize"):
        _convert(folded, static=True)


def test_a_config_is_still_looked_at_for_its_mode_only() -> None:
    """litert-torch 0.10.0: a quantizer without a global config cannot be passed on."""
    config = litert.converter_module("quantize.quant_config")
    with pytest.raises(AttributeError, match="is_dynamic"):
        config.QuantConfig(pt2e_quantizer=converters())


def test_the_converter_still_warns_about_train_mode(caplog: pytest.LogCaptureFixture) -> None:
    """litert-torch 0.10.0 warns for every exported graph; see `finish_pt2e`."""
    graph = _strict(nn.Linear(4, 4), torch.ones(1, 4))
    prepared = litert.prepare_pt2e(graph, litert.pt2e_preset("pt2e_static_int8"))
    with torch.no_grad():
        prepared(torch.ones(1, 4))
    simulated = litert.finish_pt2e(prepared)
    for trains in (False, True):
        simulated.training = trains
        _convert(simulated, static=True)
        assert ("converted in training mode" in caplog.text) == trains


def test_a_conversion_still_warns() -> None:
    """Torch 2.13 and litert-torch 0.10.0 give FutureWarnings that nobody outside can act on."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        litert.converter_module().convert(nn.Linear(4, 4).eval(), (torch.ones(1, 4),))
    assert any(issubclass(warning.category, FutureWarning) for warning in seen)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("method", ["set_module_name", "set_module_type"])
def test_the_converters_module_filters_still_match_nothing(method: str, strict: bool) -> None:
    """litert-torch 0.10.0 with torch 2.13; see `configs_as_set`."""
    quantizer, target = converters(), "0" if method == "set_module_name" else nn.Linear
    getattr(quantizer, method)(target, per_channel())
    graph = _strict(nn.Sequential(nn.Linear(4, 4)), torch.ones(1, 4), strict=strict)

    assert not litert.holds_observers(_by_torchao(graph, quantizer))


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        ("litert_torch.quantize.pt2e_quantizer", "PT2EQuantizer"),
        ("torchao.testing.pt2e._xnnpack_quantizer", "XNNPACKQuantizer"),
    ],
)
def test_a_modules_name_still_takes_no_none(module: str, kind: str) -> None:
    """litert-torch 0.10.0 and torchao 0.18.0; see `accept_none`."""
    with litert.quiet():
        quantizer = getattr(importlib.import_module(module), kind)()

    assert quantizer.set_module_name("head", None) is quantizer
    assert quantizer.module_name_config == {"head": None}
    with pytest.raises(AssertionError, match="None is not supported yet"):
        type(quantizer).set_module_name.__wrapped__(quantizer, "head", None)


def _annotated(graph: Any) -> dict[str, Any]:
    """Nodes with any spec, by the name of their operator."""
    return {
        str(node.target): node
        for node in graph.graph.nodes
        if (annotation := node.meta.get("quantization_annotation")) is not None
        and (annotation.output_qspec is not None or any(annotation.input_qspec_map.values()))
    }


def _strict(model: nn.Module, *args: torch.Tensor, strict: bool = True) -> Any:
    with litert.quiet():
        return torch.export.export(model.eval(), args, strict=strict).module()


def test_operator_types_are_still_not_read() -> None:
    """litert-torch 0.10.0 and torchao 0.18.0; see `configs_as_set`."""
    for quantizer, config in ((converters(), per_channel()), xnnpacks()):
        graph = _strict(nn.Linear(4, 4), torch.ones(1, 4))
        quantizer.set_operator_type(torch.ops.aten.linear, config).annotate(graph)
        assert not _annotated(graph)


def test_an_addition_with_a_relu_still_escapes_the_filter() -> None:
    """litert-torch 0.10.0 quantizes it though the config is for another name."""
    model = net(lambda self, x: self.fc(self.relu(x + x)), relu=nn.ReLU(), fc=nn.Linear(4, 4))
    theirs, ours = (_strict(model, torch.ones(1, 4)) for _ in range(2))
    converters().set_module_name("fc", per_channel()).annotate(theirs)
    with litert.configs.configs_as_set():
        converters().set_module_name("fc", per_channel()).annotate(ours)

    assert "aten.add.Tensor" in _annotated(theirs)
    assert list(_annotated(ours)) == ["aten.linear.default"]


def _quantized_convolutions(graph: Any) -> int:
    return sum(
        bool(annotation.input_qspec_map)
        for node in graph.graph.nodes
        if str(node.target).startswith("aten.conv")
        and (annotation := node.meta.get("quantization_annotation")) is not None
    )


def test_a_convolution_called_twice_is_still_annotated_once() -> None:
    """litert-torch 0.10.0 and torchao 0.18.0; see `configs_as_set`, and each time with our face."""
    twins = net(lambda self, x: self.conv(x) - self.conv(2 * x), conv=nn.Conv2d(3, 4, 3))
    theirs, config = xnnpacks()
    for quantizer in (converters().set_global(per_channel()), theirs.set_global(config)):
        bare, ours = (_strict(twins, torch.ones(1, 3, 6, 6)) for _ in range(2))
        quantizer.annotate(bare)
        with litert.configs.configs_as_set():
            quantizer.annotate(ours)
        assert [_quantized_convolutions(each) for each in (bare, ours)] == [1, 2]


def test_batch_norms_are_still_folded_into_shared_weights() -> None:
    """Torchao 0.18.0, though nothing is quantized; see `duplicate_shared_weights`."""

    def forward(self: Any, x: torch.Tensor) -> Any:
        first, second = (norm(self.conv(x)) for norm in self.norms)
        return first - second

    norms: list[Any] = [nn.BatchNorm2d(4) for _ in range(2)]
    for factor, norm in enumerate(norms, 1):
        norm.running_mean.fill_(factor)
        norm.running_var.fill_(0.1 * factor)
    model = net(forward, conv=nn.Conv2d(3, 4, 3, bias=False), norms=nn.ModuleList(norms))
    image = torch.ones(1, 3, 6, 6)
    with torch.no_grad():
        expected = model.eval()(image)
        folded = _by_torchao(_strict(model, image), converters())(image)
        parted = litert.prepare_pt2e(_strict(model, image), converters())(image)

    assert (folded - expected).abs().max() > 1
    # Folding rounds the weights once more.
    torch.testing.assert_close(parted, expected, rtol=1e-4, atol=1e-4)


def test_what_is_stacked_still_gets_one_scale() -> None:
    """litert-torch 0.10.0; see `isolate_float_ops`."""
    layers = {name: nn.Linear(4, 4) for name in "ab"}
    stacked = net(lambda self, x: torch.stack([self.a(x), self.b(100 * x)]), **layers)
    graph = _without_our_face(ByHand(weight=SYMMETRIC), stacked)
    (joined,) = _convert(graph, static=True).ops("CONCATENATION")
    assert joined.scheme == "int8"


def test_padding_in_words_is_still_not_known() -> None:
    """litert-torch 0.10.0 and torch 2.13; see `number_paddings`."""
    graph = _strict(nn.Conv2d(3, 4, 3, padding="same"), torch.ones(1, 3, 6, 6))
    converters().set_global(per_channel()).annotate(graph)

    assert not _annotated(graph)


@pytest.mark.parametrize(
    ("word", "size", "dilation"),
    [("same", 3, 1), ("same", (2, 4), 1), ("same", (2, 4), (2, 1)), ("valid", 3, (2, 1))],
)
def test_padding_in_numbers_gives_the_same(word: str, size: Any, dilation: Any) -> None:
    """To the bit, and whether the sides differ or not."""
    model = nn.Conv2d(3, 4, size, padding=word, dilation=dilation)
    image = torch.randn(2, 3, 9, 8)
    graph = _strict(model, image)
    number_paddings(graph)
    graph.recompile()

    overloads = [n.target for n in graph.graph.nodes if str(n.target).startswith("aten.conv")]
    assert overloads == [torch.ops.aten.conv2d.default]
    torch.testing.assert_close(graph(image), model(image), rtol=0, atol=0)


def test_ops_below_no_grad_are_still_not_annotated() -> None:
    """Torchao 0.18.0 passes over them, a later one refuses the graph; see `inline_contexts`."""

    class Frozen(nn.Linear):
        @torch.no_grad()
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    graph = _strict(Frozen(4, 4), torch.ones(2, 4))
    try:
        prepared = _by_torchao(graph, litert.pt2e_preset("pt2e_static_int8"))
    except (RuntimeError, ValueError, NotImplementedError):
        return
    assert not litert.holds_observers(prepared)


def _head(between: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """As classifiers end: a pool, something that changes nothing, a linear layer."""

    def forward(self: Any, x: torch.Tensor) -> Any:
        pooled = self.pool(nn.functional.relu6(self.conv(x) * 8))
        return self.linear(self.between(pooled.flatten(1)))

    parts = {"conv": nn.Conv2d(3, 16, 3), "linear": nn.Linear(16, 10)}
    return net(forward, pool=nn.AdaptiveAvgPool2d(1), between=between, **parts)


def _lowering_db(between: Callable[[torch.Tensor], torch.Tensor]) -> float:
    torch.manual_seed(0)
    model = _head(between).eval()
    images = [(torch.randn(1, 3, 16, 16),) for _ in range(12)]
    edgeq = Edgeq()
    quantized = edgeq.quantize(model, images[0], calibration=images[:8])
    stage = edgeq.compare(quantized, images[8:]).lowering
    assert stage is not None
    return stage.sqnr_db


_WITHOUT_EFFECT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": nn.Dropout(0.2),
    "clone": torch.clone,
    "detach": torch.detach,
    "to": lambda x: x.to(torch.float32),
    "squeeze": lambda x: x.unsqueeze(-1).squeeze(-1),
    "alpha_dropout": lambda x: nn.functional.alpha_dropout(x, 0.2, training=False),
    "pad": lambda x: nn.functional.pad(x, (0, 0)),
    "mul": lambda x: x * 1.25,  # it has a scale of its own
}


@pytest.mark.parametrize("shim", [False, True])
def test_an_op_without_effect_still_parts_a_bias_from_its_input(
    monkeypatch: pytest.MonkeyPatch, shim: bool
) -> None:
    """litert-torch 0.10.0; see `share_scales`. With it, nothing but rounding is left."""
    if not shim:
        monkeypatch.setattr("pytest_edgeq.litert.pt2e_graphs.share_scales", lambda simulated: None)

    lowering_db = _lowering_db(torch.clone)
    assert lowering_db > 35 if shim else lowering_db < 15


@pytest.mark.parametrize("name", _WITHOUT_EFFECT)
def test_an_op_without_effect_has_one_scale(name: str) -> None:
    """As if it were not there; another op has a scale of its own."""
    scales = []
    for between in (_WITHOUT_EFFECT[name], lambda x: x):
        torch.manual_seed(0)
        images = [torch.randn(1, 3, 16, 16) for _ in range(4)]
        graph = _strict(_head(between), images[0])
        prepared = litert.prepare_pt2e(graph, litert.pt2e_preset("pt2e_static_int8"))
        with torch.no_grad():
            for image in images:
                prepared(image)
        scales.append(litert.activation_scales(litert.finish_pt2e(prepared)))
    assert (len(scales[0]) == len(scales[1])) == (name != "mul")


def _without_our_face(quantizer: Any, model: nn.Module, sample: Any = None) -> Any:
    """What torchao gives, ready for the converter."""
    sample = torch.ones(1, 4) if sample is None else sample
    prepared = _by_torchao(_strict(model, sample), quantizer)
    with litert.quiet(), torch.no_grad():
        prepared(sample)
        return convert_pt2e(prepared, fold_quantize=False)


def _convert(graph: Any, *, static: bool, sample: Any = None) -> Any:
    sample = torch.ones(1, 4) if sample is None else sample
    traced = {litert.SIGNATURE: litert.Traced(graph, (sample,))}
    return OpDtypeMap(OpGraph.read(litert.convert(traced, static=static)))


SYMMETRIC = activation(qscheme=torch.per_tensor_symmetric)


def test_dynamic_activations_are_still_no_node_of_the_converter() -> None:
    """litert-torch 0.10.0; see `normalize_annotations`."""
    dynamic = activation(observer.PlaceholderObserver, is_dynamic=True)
    graph = _without_our_face(ByHand(taken=dynamic, weight=SYMMETRIC, given=None), nn.Linear(4, 4))
    with pytest.raises(KeyError, match="getitem"):
        _convert(graph, static=False)


def test_observers_of_torch_are_still_taken_out() -> None:
    """Torchao 0.18.0 leaves no trace of them; see `normalize_annotations`."""
    own = activation(torch.ao.quantization.MinMaxObserver)
    graph = _without_our_face(ByHand(taken=own, weight=own, given=own), nn.Linear(4, 4))
    assert not litert.holds_quantization(graph)

    wrapped = activation(torch.ao.quantization.MinMaxObserver.with_args(eps=1e-3))
    with pytest.raises(AttributeError, match=r"'_PartialWrapper' .* no attribute '__name__'"):
        _without_our_face(ByHand(taken=wrapped, weight=wrapped, given=wrapped), nn.Linear(4, 4))


def test_fixed_fake_quantizers_still_take_no_dtype() -> None:
    """Torchao 0.18.0; see `normalize_annotations`."""
    fake = litert.libraries.pt2e_module("fake_quantize").FixedQParamsFakeQuantize
    fixed = observer.FixedQParamsObserver.with_args(scale=0.1, zero_point=0)
    spec = activation(fake.with_args(observer=fixed))
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        _without_our_face(ByHand(taken=spec, weight=SYMMETRIC, given=spec), nn.Linear(4, 4))


def test_a_bias_of_int32_still_cannot_be_written() -> None:
    """litert-torch 0.10.0; see `fold_constants`."""
    wide = {"dtype": torch.int32, "quant_min": -(2**31), "quant_max": 2**31 - 1}
    bias = activation(qscheme=torch.per_tensor_symmetric, **wide)
    graph = _without_our_face(ByHand(weight=SYMMETRIC, bias=lambda node: bias), nn.Linear(4, 4))
    with pytest.raises(ValueError, match="Failed to export flatbuffer"):
        _convert(graph, static=True)


def test_activations_of_int16_still_get_a_bias_of_int32() -> None:
    """litert-torch 0.10.0; 16-bit convolutions read int64. See `normalize_annotations`."""
    spec = activation(dtype=torch.int16, quant_min=-32768, quant_max=32767)
    graph = _without_our_face(ByHand(taken=spec, weight=SYMMETRIC, given=spec), nn.Linear(4, 4))
    (entry,) = _convert(graph, static=True).ops(op="FULLY_CONNECTED")

    assert (entry.scheme, entry.bias) == ("int16x8", "int32")


def test_activations_of_uint8_still_get_zero_points_of_int8() -> None:
    """litert-torch 0.10.0 shifts them by 128, to below 0; see `normalize_annotations`."""
    spec = activation(dtype=torch.uint8, quant_min=0, quant_max=255)
    graph = _without_our_face(ByHand(taken=spec, weight=SYMMETRIC, given=spec), nn.Linear(4, 4))
    traced = {litert.SIGNATURE: litert.Traced(graph, (torch.ones(1, 4),))}
    (subgraph,) = OpGraph.read(litert.convert(traced, static=True)).subgraphs
    zeros = [tensor.zero_points for tensor in subgraph.tensors if tensor.dtype == "uint8"]

    # The input's, all ones, is 0 as annotated; the output's may be any.
    assert any(zero < 0 for (zero,) in zeros)


@pytest.mark.parametrize(("make", "in_float"), [(_residual, ["block"]), (_threshold, [])])
def test_layouts_of_shared_operands_are_still_forgotten(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], nn.Module], in_float: list[str]
) -> None:
    """litert-torch 0.10.0; see `kept_layouts`."""
    x = [normal(1, 3, 8, 8, seed=seed) for seed in range(12)]
    quantizer = litert.left_in_float(litert.pt2e_preset("pt2e_static_int8"), in_float)

    def quantized() -> QuantizedModel:
        model = seeded(make)
        return Edgeq(cache_dir=None).quantize(model, (x[0],), quantizer=quantizer, calibration=x)

    comparison = Edgeq().compare(quantized(), x)
    assert comparison.lowering is not None
    assert comparison.lowering.sqnr_db > 40  # a code differs here and there
    monkeypatch.setattr(litert.converter, "kept_layouts", contextlib.nullcontext)
    with pytest.raises(RuntimeError, match=r"broadcast a dimension|non-NHWC compatible"):
        quantized()


def _schemes(graph: Any, *, static: bool) -> list[str]:
    return [entry.scheme for entry in _convert(graph, static=static).ops(op="FULLY_CONNECTED")]


def test_weights_alone_are_still_float_in_the_static_mode() -> None:
    """litert-torch 0.10.0; the DYNAMIC mode has both. See `holds_weights_alone`."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    quantizer: Any = ByHand(weight=SYMMETRIC)
    annotate = quantizer.annotate

    def last_alone(graph: Any) -> Any:
        annotate(graph)
        last = graph.graph.output_node().args[0][0]
        last.meta["quantization_annotation"].input_qspec_map.pop(last.args[0])
        last.meta["quantization_annotation"].output_qspec = None
        return graph

    quantizer.annotate = last_alone
    graph = _without_our_face(quantizer, model)
    assert litert.holds_weights_alone(graph)
    assert _schemes(graph, static=True) == ["int8", "float"]
    assert _schemes(graph, static=False) == ["int8", "dynamic"]


def test_what_is_not_annotated_is_still_quantized_between_int8() -> None:
    """litert-torch 0.10.0; see `isolate_float_ops`."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    quantizer: Any = ByHand(weight=SYMMETRIC)
    annotate = quantizer.annotate

    def all_but_the_middle(graph: Any) -> Any:
        annotate(graph)
        _, middle, _ = (n for n in graph.graph.nodes if n.target is torch.ops.aten.linear.default)
        del middle.meta["quantization_annotation"]
        return graph

    quantizer.annotate = all_but_the_middle
    assert _schemes(_without_our_face(quantizer, model), static=True) == ["int8"] * 3


def test_a_barrier_for_one_tensor_still_cannot_be_read() -> None:
    """litert-torch 0.10.0 gives its one result without a list; see `isolate_float_ops`."""
    barriers = litert.converter_module("backend.optimization_barrier")
    barred = net(lambda self, x: barriers.optimization_barrier_op([x])[0] + x).eval()
    with pytest.raises(TypeError, match="'OpResult' object is not subscriptable"):
        litert.convert({litert.SIGNATURE: litert.Traced(barred, (torch.ones(1, 4),))})


def test_an_annotated_weight_still_keeps_a_transposed_convolution_in_float() -> None:
    """litert-torch 0.10.0; see `fold_constants`."""
    image = torch.ones(1, 2, 4, 4)
    by_hand = ByHand("conv_transpose2d", weight=SYMMETRIC)
    graph = _without_our_face(by_hand, nn.ConvTranspose2d(2, 2, 2, stride=2), image)
    schemes = []
    for _ in range(2):
        dtypes = _convert(graph, static=True, sample=image)
        schemes += [entry.scheme for entry in dtypes.ops(op="TRANSPOSE_CONV")]
        litert.simulated.fold_constants(graph)

    assert schemes == ["float", "int8"]


@pytest.mark.parametrize("preset", ["pt2e_static_int8", "pt2e_dynamic_int8"])
@pytest.mark.parametrize("make", [ConvBnRelu, ConcatSkip, SqueezeExcite, TwoInputs])
def test_one_config_for_all_is_left_to_the_quantizer(make: Any, preset: str) -> None:
    """Where nothing is to be mended, observers stand where the library itself puts them."""
    graphs = [_strict(seeded(make), *make.sample_inputs()) for _ in range(2)]
    theirs = _by_torchao(graphs[0], litert.pt2e_preset(preset))
    ours = litert.prepare_pt2e(graphs[1], litert.pt2e_preset(preset))

    assert _observed(theirs)
    assert _observed(ours) == _observed(theirs)


def _observed(prepared: Any) -> list[tuple[str, list[str]]]:
    return [
        (node.args[0].name, sorted(user.name for user in node.users))
        for node in prepared.graph.nodes
        if node.op == "call_module" and "activation_post_process" in node.target
    ]


def test_a_pattern_still_has_its_inputs_in_any_order() -> None:
    """Torch 2.13 lists a set; see `ordered_partitions`, with which each preparation is the same."""
    model = seeded(GruWithState)
    places, prepared = set(), set()
    for _ in range(12):
        graph = _strict(model, *GruWithState.sample_inputs())
        litert.drop_guards(graph)  # which has the inputs, too, and hides the annotations
        (found,) = get_source_partitions(graph.graph, [nn.GRU])[nn.GRU]
        places.add(tuple(node.name for node in found.input_nodes))
        made = litert.prepare_pt2e(graph, litert.pt2e_preset("pt2e_static_int8"))
        prepared.add(" ".join(node.name for node in made.graph.nodes))

    assert len(places) > 1
    assert len(prepared) == 1


@pytest.mark.parametrize("lazy", [False, True])
def test_graphs_are_compiled_when_they_are_called(*, lazy: bool) -> None:
    """Torch 2.13 compiles all that `make_fx` makes at once; either way they compute the same."""
    with graphs_compiled_on_call() if lazy else contextlib.nullcontext():
        graph = make_fx(lambda x: x + x)(torch.ones(2))
        assert hasattr(graph, "_code") != lazy
        assert torch.equal(graph(torch.ones(2)), torch.full((2,), 2.0))
        assert hasattr(graph, "_code")


def test_the_history_of_a_node_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.13 copies it at each decomposition, and takes its own stack for some new nodes."""
    taken: list[Any] = []

    def filtered(tracer: Any, stack: Any) -> None:
        taken.append(stack)

    monkeypatch.setattr(torch.fx.proxy.TracerBase, "_filter_traceback_frames", filtered)
    with litert.quiet():
        program = torch.export.export(nn.ReLU(), (torch.ones(2),)).run_decompositions()
    relu = program.graph.output_node().args[0][0]
    relu.meta.pop("stack_trace", None)

    def decomposed() -> tuple[bool, bool]:
        """Return whether the history is that of the program, and whether stacks were taken."""
        taken.clear()
        with litert.quiet():
            node = program.run_decompositions().graph.output_node().args[0][0]
        sources = [node.meta["from_node"][0]]
        while sources[-1].from_node:
            sources.append(sources[-1].from_node[0])
        return any(each is relu.meta["from_node"][0] for each in sources), bool(taken)

    assert decomposed() == (False, True)
    with histories_shared():
        assert decomposed() == (True, False)


def test_jax_lowers_a_function_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not again in the next conversion, as in litert-torch 0.10.0."""
    bridge = litert.libraries.converter_module("backend.jax_bridge._wrap")
    lowered: list[str] = []
    translate = bridge._stablehlo_to_vhlo

    def translated(text: str) -> bytes:
        lowered.append(text)
        content: bytes = translate(text)
        return content

    monkeypatch.setattr(bridge, "_stablehlo_to_vhlo", translated)
    monkeypatch.setattr(litert.converter, "_lowered_by_jax", {})
    model, inputs = seeded(ConvBnRelu), ConvBnRelu.sample_inputs()

    def conversions() -> list[int]:
        lowered.clear()
        counts = []
        for _ in range(2):
            litert.convert({"serving_default": litert.Traced(model, inputs)})
            counts.append(len(lowered))
        return counts

    first, both = conversions()
    assert first == both > 0
    monkeypatch.setattr(litert.converter, "jax_functions_kept", contextlib.nullcontext)
    assert conversions() == [first, 2 * first]


def test_equal_numbers_of_other_types_are_lowered_anew(
    maker: Edgeq, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Indices `arange(6)` behind a model that adds `arange(6.0)`, whose arguments are equal."""
    fingerprint = litert.libraries.converter_module(
        "backend.jax_bridge._wrap"
    ).get_cache_fingerprint
    assert fingerprint(6) == fingerprint(6.0)
    monkeypatch.setattr(litert.converter, "_lowered_by_jax", {})
    tokens, places, head = nn.Embedding(17, 8), nn.Embedding(6, 8), nn.Linear(8, 3)

    def embed(self: Any, ids: torch.Tensor) -> Any:
        return self.head(self.tokens(ids) + self.places(torch.arange(6)))

    model = net(embed, tokens=tokens, places=places, head=head).eval()
    ids = (integers(1, 6, below=17, seed=0),)
    alone = maker.quantize(model, ids, calibration=[ids]).tflite
    litert.converter._lowered_by_jax.clear()
    added = net(lambda self, x: x + torch.arange(6.0)).eval()
    maker.quantize(added, (torch.ones(6),), quantizer=None)
    assert maker.quantize(model, ids, calibration=[ids]).tflite == alone


def test_the_composite_ops_are_listed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.13 lists them for each decomposition; here another registration lists them again."""
    composite_ops = torch._export.utils._collect_all_valid_cia_ops
    listings: list[None] = []

    def listed() -> set[Any]:
        listings.append(None)
        return composite_ops()

    monkeypatch.setattr(torch._export.utils, "_collect_all_valid_cia_ops", listed)
    monkeypatch.setattr(torch.export.exported_program, "_collect_all_valid_cia_ops", listed)
    program = torch.export.export(nn.ReLU(), (torch.ones(2),))

    def decompose() -> int:
        listings.clear()
        with litert.quiet():
            for _ in range(2):
                program.run_decompositions()
        return len(listings)

    assert decompose() == 2
    litert.converter._composite_ops.cache_clear()
    with composite_ops_listed_once():
        assert decompose() == 1
        assert decompose() == 0
        with torch.library._scoped_library("edgeq_test", "FRAGMENT") as library:
            library.define("twice(Tensor x) -> Tensor")
            library.impl("twice", lambda x: x + x, "CompositeImplicitAutograd")
            assert decompose() == 1
            of_tables = vars(torch.export.decomp_utils)["_collect_all_valid_cia_ops"]
            assert torch.ops.edgeq_test.twice.default in of_tables()


def test_kernels_are_replaced_for_present_devices_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.13 replaces them for 21 devices; those of an accelerator are replaced, too."""
    register = torch._ops.OperatorBase.py_impl
    devices: set[str] = set()

    def py_impl(self: Any, key: Any) -> Any:
        devices.add(key.name)
        return register(self, key)

    monkeypatch.setattr(torch._ops.OperatorBase, "py_impl", py_impl)
    program = torch.export.export(nn.ReLU(), (torch.ones(2),))

    def decompose() -> set[str]:
        devices.clear()
        with litert.quiet():
            program.run_decompositions()
        return devices - {"CompositeImplicitAutograd"}

    everywhere = decompose().copy()
    assert len(everywhere) > 12
    present = {"CPU", "Meta", "AutogradCPU", "AutogradMeta"}
    with kernels_for_present_devices():
        assert decompose() == present
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: cuda)
    with kernels_for_present_devices():
        assert decompose() == present | {"CUDA", "AutogradCUDA"} <= everywhere


def test_a_strict_export_does_not_rewrite_its_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.13 looks for common subexpressions; violated constraints are found without them."""
    counted: list[list[str]] = []
    rewrites = torch._dynamo.guards.PyExprCSEPass.count

    def count(self: Any, exprs: list[str]) -> None:
        counted.append(exprs)
        rewrites(self, exprs)

    monkeypatch.setattr(torch._dynamo.guards.PyExprCSEPass, "count", count)
    model, inputs = seeded(ConvBnRelu), ConvBnRelu.sample_inputs()
    plain = torch.export.export(model, inputs, strict=True)
    assert counted
    counted.clear()
    traced = litert.Traced(model, inputs)
    fast = litert.export(traced, strict=True)
    assert not counted
    assert str(fast) == str(plain)
    for strict in (True, False):
        with pytest.raises(torch._dynamo.exc.UserError, match="Constraints violated"):
            litert.export(
                litert.Traced(model, inputs, dynamic_shapes=({0: torch.export.Dim("n")},)),
                strict=strict,
            )


def test_shims_for_speed_change_no_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor without any of them."""

    def built() -> bytes:
        model, inputs = seeded(ConvBnRelu), ConvBnRelu.sample_inputs()
        quantized = Edgeq().quantize(model, inputs, calibration=samples(ConvBnRelu, 4))
        return quantized.path.read_bytes()

    fast = built()
    for shim in (
        *("graphs_compiled_on_call", "composite_ops_listed_once", "kernels_for_present_devices"),
        *("guards_as_written", "histories_shared", "jax_functions_kept"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(litert.converter, shim, contextlib.nullcontext)
            assert built() == fast, shim


def test_patterns_of_training_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not again in the next training, which gives the same file."""
    monkeypatch.setattr(pt2e_graphs, "_TRACED_PATTERNS", {})
    images, inputs = list(samples(ConvBnRelu, 4)), ConvBnRelu.sample_inputs()

    def built() -> bytes:
        made = Edgeq().quantize(
            seeded(ConvBnRelu),
            inputs,
            quantizer="pt2e_qat_int8",
            train=lambda graph: [graph(*image) for image in images],
        )
        return made.tflite

    first = built()
    qat_utils = litert.libraries.pt2e_module("qat_utils")
    monkeypatch.setattr(qat_utils, "_get_aten_graph_module_for_pattern", None)
    assert built() == first


def test_patterns_of_training_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their functions, by the constants that these hold, and by the inputs that they need."""
    monkeypatch.setattr(pt2e_graphs, "_TRACED_PATTERNS", {})
    qat_utils = litert.libraries.pt2e_module("qat_utils")
    asked: list[Any] = []

    def replace(graph: Any, *patterns: Any, **_: Any) -> list[Any]:
        asked.append(patterns)
        return []

    def traced(pattern: Any, *_: Any, **named: Any) -> list[Any]:
        return [pattern.fn.__name__, *(c.cell_contents for c in pattern.fn.__closure__), *named]

    monkeypatch.setattr(qat_utils, "replace_pattern_with_filters", replace)
    for trace in (traced, functools.partial(pt2e_graphs._traced_once, traced)):
        monkeypatch.setattr(qat_utils, "_get_aten_graph_module_for_pattern", trace)
        for conv in (torch.conv1d, torch.conv2d):
            graph = torch.fx.symbolic_trace(nn.Identity())
            qat_utils._fold_conv_bn_qat_helper(graph, conv, (), is_cuda=False)
    assert len(asked) == 48
    assert asked[:24] == asked[24:]


def _draws(statement: str) -> bool:
    """Whether a statement changes the state of Python's generator in a new process."""
    script = f"import random\nbefore = random.getstate()\n{statement}\n"
    script += "raise SystemExit(random.getstate() != before)"
    return bool(subprocess.run([sys.executable, "-c", script], check=False, timeout=100).returncode)


@pytest.mark.full  # a process that imports the converter; the libraries are pinned
def test_the_converter_still_draws_a_number_when_it_is_imported() -> None:
    """By rich, in litert-torch 0.10.0: calibration data that draws would differ from then on."""
    assert _draws("import litert_torch")
    assert not _draws("from pytest_edgeq import litert; litert.converter_module()")
