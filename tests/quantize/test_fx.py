"""torch's eager and FX graph mode: as a reference, and from FX to `.tflite`."""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.ao.quantization
import torch.ao.quantization.quantize_fx
from torch import Tensor, nn

from fixtures.models import net, normal, seeded
from pytest_edgeq import (
    Budget,
    Edgeq,
    QuantizedModel,
    assert_input_dtypes,
    assert_no_float_ops,
    assert_op_counts,
    assert_op_dtypes,
    assert_output_dtypes,
    assert_qparams,
    assert_within_budget,
    quantizer_from_fx,
)
from pytest_edgeq.tflite.roles import roles_of

# torch 2.13 warns of torch.ao, of reduce_range and of quantized tensors: the calls are the user's.
pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor, torch.quantize_per:UserWarning"),
]


# Without types, as most of it is.
ao: Any = torch.ao.quantization
fx: Any = torch.ao.quantization.quantize_fx


def straight(self: Any, x: Tensor) -> Any:
    """Conv-bn-relu, conv-bn, add, linear; no pooling, whose kernels round each in its own way."""
    x = self.relu(self.norm1(self.conv1(x)))
    return self.fc((self.norm2(self.conv2(x)) + x).flatten(1))


def build(forward: Callable[..., Any] = straight, seed: int = 0) -> nn.Module:
    """Return a model of these layers, or one that computes otherwise with them."""

    def make() -> nn.Module:
        return net(
            forward,
            conv1=nn.Conv2d(3, 8, 3, padding=1, bias=False),
            norm1=nn.BatchNorm2d(8, eps=0.01),
            relu=nn.ReLU(),
            conv2=nn.Conv2d(8, 8, 3, padding=1),
            norm2=nn.BatchNorm2d(8),
            fc=nn.Linear(8 * 64, 4),
        )

    return seeded(make, seed=seed)


SAMPLE = (normal(1, 3, 8, 8, seed=0),)


def batches(n: int = 8) -> Iterator[Tensor]:
    """To calibrate and to train with."""
    for seed in range(n):
        yield normal(8, 3, 8, 8, seed=seed)


def evaluation() -> Iterator[Tensor]:
    """What nothing has been calibrated with."""
    for seed in range(32):
        yield normal(1, 3, 8, 8, seed=100 + seed)


def prepare(model: nn.Module, backend: str = "qnnpack") -> Any:
    """FX, post-training, calibrated."""
    prepared = fx.prepare_fx(model, ao.get_default_qconfig_mapping(backend), SAMPLE)
    with torch.no_grad():
        for batch in batches():
            prepared(batch)
    return prepared


def prepare_qat(model: nn.Module, backend: str = "qnnpack") -> Any:
    """FX, quantization-aware, trained for a few steps; still in train mode."""
    prepared = fx.prepare_qat_fx(model.train(), ao.get_default_qat_qconfig_mapping(backend), SAMPLE)
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.001)
    for batch in batches(16):
        optimizer.zero_grad()
        torch.autograd.backward(prepared(batch).square().mean())
        optimizer.step()
    return prepared


@contextlib.contextmanager
def engine(name: str) -> Iterator[None]:
    """Kernels that torch's own integer modules are packed for."""
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = name
    try:
        yield
    finally:
        torch.backends.quantized.engine = before


def convert(prepared: Any, backend: str) -> nn.Module:
    """What FX makes of it; its modules are in train mode, as torch leaves them."""
    with engine(backend):
        converted: nn.Module = fx.convert_fx(copy.deepcopy(prepared).eval())
    return converted


@dataclass
class Case:
    """A prepared model, its file, and what FX converts it to."""

    prepared: Any
    quantized: QuantizedModel
    converted: nn.Module
    granularity: str
    requantized: int


def _post_training(edgeq: Edgeq) -> Case:
    """Per channel, with `reduce_range`; quantized by the quantizer's own float model."""
    prepared = prepare(build(), "fbgemm")
    quantizer = quantizer_from_fx(prepared)
    quantized = edgeq.quantize(quantizer.float_model, SAMPLE, quantizer=quantizer)
    return Case(prepared, quantized, convert(prepared, "fbgemm"), "per_channel", 0)


def _trained(edgeq: Edgeq) -> Case:
    """Per tensor; FX trains the user's own parameters, so that the model itself can be given."""
    model = build()
    prepared = prepare_qat(model, "qnnpack")
    quantized = edgeq.quantize(model.eval(), SAMPLE, quantizer=quantizer_from_fx(prepared))
    # Trained, a flatten has an observer of its own, and its output other parameters.
    return Case(prepared, quantized, convert(prepared, "qnnpack"), "per_tensor", 1)


@pytest.fixture(
    scope="module", params=[_post_training, pytest.param(_trained, marks=pytest.mark.slow)]
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """One of both, converted once."""
    made: Case = request.param(Edgeq(directory=tmp_path_factory.mktemp("fx")))
    return made


def test_every_op_is_int8(case: Case) -> None:
    """With the convolutions' batch norms folded, and the ReLU of the first."""
    quantized = case.quantized
    assert_input_dtypes(quantized, "int8")
    assert_output_dtypes(quantized, "int8")
    assert_op_counts(
        quantized, {"CONV_2D": 2, "ADD": 1, "FULLY_CONNECTED": 1, "MUL": 0, "DEQUANTIZE": 0}
    )
    assert_op_counts(quantized, {"QUANTIZE": case.requantized})
    expected = {"input": "int8", "weight": "int8", "bias": "int32", "output": "int8"}
    for op, count in (("CONV_2D", 2), ("FULLY_CONNECTED", 1)):
        assert_op_dtypes(quantized, op, count=count, granularity=case.granularity, **expected)
        assert_qparams(quantized, op, symmetric=True, granularity=case.granularity)
    assert_op_dtypes(quantized, "ADD", input="int8", output="int8", scheme="int8", count=1)
    assert_no_float_ops(quantized)
    fused = [op.fused_activation for op in quantized.graph.ops if op.name == "CONV_2D"]
    assert fused == ["RELU", None]
    assert quantized.flow == "pt2e"


def _observed(prepared: Any) -> set[tuple[float, int]]:
    """Scales and zero points that the observers on FX's activations have arrived at."""
    modules = dict(prepared.named_modules(remove_duplicate=False))
    found = set()
    for node in prepared.graph.nodes:
        if node.op == "call_module" and hasattr(modules[node.target], "calculate_qparams"):
            scale, zero_point = modules[node.target].calculate_qparams()
            found.add((float(scale), int(zero_point)))
    return found


def test_the_file_has_the_observers_parameters(case: Case) -> None:
    """All of them and no other: scales to the bit, zero points less 128."""
    graph = case.quantized.graph
    stored = set()
    for op in graph.ops:
        roles = roles_of(graph, op)
        for tensor in (*roles.inputs, *roles.outputs):
            stored.add((float(tensor.scales[0]), int(tensor.zero_points[0]) + 128))

    assert stored == _observed(case.prepared)
    border = case.quantized.outputs[0]
    last = list(case.prepared.graph.nodes)[-1].args[0]
    scale, zero_point = case.prepared.get_submodule(last.target).calculate_qparams()
    assert (border.scale, border.zero_point) == (float(scale), int(zero_point) - 128)


@pytest.mark.slow
def test_weights_have_their_own_parameters(case: Case) -> None:
    """The scales of torch's converted modules."""
    for entry in case.quantized.op_dtypes:
        if entry.weight is None:
            continue
        stored = roles_of(case.quantized.graph, case.quantized.graph.ops[entry.index]).weights[0]
        assert entry.module is not None
        layer: Any = case.converted.get_submodule(entry.module.split(".")[0])
        weight = layer.weight()
        if case.granularity == "per_channel":
            expected = weight.q_per_channel_scales().tolist()
        else:
            expected = [weight.q_scale()]
        torch.testing.assert_close(
            list(map(float, stored.tensor.scales)), expected, rtol=1e-7, atol=0
        )


@pytest.mark.sweep(1)
def test_the_file_computes_what_fx_computes(maker: Edgeq, case: Case) -> None:
    """
    Held against torch's own integer kernels.

    The same parameters, but kernels that round each in its own way: a code of one less in what
    three layers give, averaged over the 512 inputs of the last. Measured: 1 and 2 LSB.
    """
    loaded = maker.load(case.quantized.tflite, reference=case.converted)
    comparison = maker.compare(loaded, evaluation())

    assert_within_budget(comparison, Budget(max_lsb_error=3))
    assert_within_budget(
        maker.compare(case.quantized, evaluation()), lowering=Budget(max_lsb_error=2)
    )


def test_the_prepared_model_is_left_as_it_was() -> None:
    """Its mode, its observers, its modules."""
    prepared = prepare_qat(build())
    before = {name: tensor.clone() for name, tensor in prepared.state_dict().items()}
    quantizer = quantizer_from_fx(prepared)
    plain = quantizer.float_model

    assert prepared.training
    assert not any(module.training for module in plain.modules())
    assert before.keys() == prepared.state_dict().keys()
    for name, tensor in prepared.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0, equal_nan=True)
    assert not any(
        "fake_quant" in name or "post_process" in name for name, _ in plain.named_modules()
    )


@pytest.mark.slow
def test_a_layer_that_fx_leaves_in_float(maker: Edgeq) -> None:
    """It stays in float in the file, and it alone."""
    mapping = ao.get_default_qconfig_mapping("qnnpack").set_module_name("fc", None)
    prepared = fx.prepare_fx(build(), mapping, SAMPLE)
    for batch in batches():
        prepared(batch)
    quantizer = quantizer_from_fx(prepared)
    quantized = maker.quantize(quantizer.float_model, SAMPLE, quantizer=quantizer)

    assert_op_dtypes(quantized, "CONV_2D", scheme="int8", weight="int8", count=2)
    assert_op_dtypes(quantized, "FULLY_CONNECTED", scheme="float", weight="float32", count=1)
    assert_no_float_ops(quantized, allow=("FULLY_CONNECTED",))


def _sigmoid(self: Any, x: Tensor) -> Any:
    """Another op than was prepared."""
    x = torch.sigmoid(self.norm1(self.conv1(x)))
    return self.fc((self.norm2(self.conv2(x)) + x).flatten(1))


def _swapped(self: Any, x: Tensor) -> Any:
    """The same ops on other operands: the sum the other way round."""
    x = self.relu(self.norm1(self.conv1(x)))
    return self.fc((x + self.norm2(self.conv2(x))).flatten(1))


def _other_name(self: Any, image: Tensor) -> Any:
    return straight(self, image)


def _longer(self: Any, x: Tensor) -> Any:
    return straight(self, x) * 2


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("model", "told"),
    [
        (lambda: build(seed=1), r"conv1\.weight of the model differs by up to .* from conv1"),
        (lambda: build(_sigmoid), "op 1 is aten.relu.default in 'conv1' in the prepared"),
        (lambda: build(_swapped), r"aten.add.Tensor.* has .* in the prepared model and relu in"),
        (lambda: build(_other_name), r"has \['x'\], the model \['image'\]"),
        (lambda: build(_longer), "the prepared model has 6 ops, the model 7"),
    ],
)
def test_another_model_is_refused(maker: Edgeq, model: Callable[[], nn.Module], told: str) -> None:
    """Parameters on the wrong tensors would convert in silence."""
    quantizer = quantizer_from_fx(_calibrated())
    with pytest.raises(ValueError, match=told) as refused:
        maker.quantize(model(), SAMPLE, quantizer=quantizer)
    assert "quantizer.float_model" in str(refused.value)


@functools.cache
def _calibrated() -> Any:
    return prepare(build())


def _converted() -> Any:
    return convert(_calibrated(), "qnnpack")


def _never_run() -> Any:
    return fx.prepare_fx(build(), ao.get_default_qconfig_mapping("qnnpack"), SAMPLE)


def _dynamic() -> Any:
    mapping = ao.QConfigMapping().set_global(ao.default_dynamic_qconfig)
    return fx.prepare_fx(nn.Sequential(nn.Linear(4, 4)).eval(), mapping, (torch.ones(1, 4),))


def _eager() -> Any:
    model: Any = build()
    model.qconfig = ao.get_default_qconfig("qnnpack")
    return ao.prepare(model)


@pytest.mark.parametrize(
    ("make", "error", "told"),
    [
        (_never_run, ValueError, r"6 observer\(s\) saw no data: those of x, conv1, "),
        (_dynamic, ValueError, "is quantized dynamically: there are no parameters to take over"),
        (_eager, TypeError, "got a Net that eager mode prepared"),
        (lambda: build(), TypeError, "expected a result of prepare_fx or prepare_qat_fx.* Net"),
        (_converted, TypeError, "before convert_fx; got a GraphModule"),
    ],
)
def test_what_is_not_prepared(make: Callable[[], Any], error: type[Exception], told: str) -> None:
    """Said at once, and what to pass instead."""
    with pytest.raises(error, match=told):
        quantizer_from_fx(make())


def test_weights_with_zero_points(maker: Edgeq) -> None:
    """`.tflite` has symmetric weights only."""
    affine = ao.MinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_tensor_affine)
    mapping = ao.QConfigMapping().set_global(
        ao.QConfig(activation=ao.default_observer, weight=affine)
    )
    linear = nn.Linear(4, 4)
    nn.init.uniform_(linear.weight, 0.5, 1)  # its range, which holds 0, is not symmetric
    model = nn.Sequential(linear).eval()
    prepared = fx.prepare_fx(model, mapping, (torch.ones(1, 4),))
    prepared(normal(8, 4, seed=0))
    quantizer = quantizer_from_fx(prepared)
    with pytest.raises(ValueError, match=r"the weight 0\.weight has zero points other than 0"):
        maker.quantize(quantizer.float_model, (torch.ones(1, 4),), quantizer=quantizer)


@pytest.mark.parametrize("compute", [lambda x: x + 10.0, lambda x: x * 3.0], ids=["sum", "product"])
def test_a_sum_with_a_number(maker: Edgeq, compute: Callable[[Tensor], Tensor]) -> None:
    """FX observes it with its operand's observer: the file would clip it."""
    model = seeded(lambda: net(lambda self, x: compute(self.fc(x)), fc=nn.Linear(4, 4)))
    mapping = ao.get_default_qconfig_mapping("qnnpack")
    prepared = fx.prepare_fx(model, mapping, (torch.ones(1, 4),))
    prepared(normal(8, 4, seed=0))
    quantizer = quantizer_from_fx(prepared)
    with pytest.raises(
        ValueError, match=r"has a number operand, \(linear, 1?[03]\.0\), and FX has no"
    ):
        maker.quantize(quantizer.float_model, (torch.ones(1, 4),), quantizer=quantizer)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (_calibrated, "quantizer=pytest_edgeq.quantizer_from_fx"),
        (_eager, "holds observers or fake quantizers of torch's eager or FX graph mode"),
        (_converted, r"can be the reference of a file: edgeq\.load"),
    ],
)
def test_they_cannot_be_quantized_as_they_are(
    maker: Edgeq, make: Callable[[], nn.Module], told: str
) -> None:
    """The converter would fail on their ops, or leave the observers out without a word."""
    with pytest.raises(ValueError, match=told):
        maker.quantize(make(), SAMPLE)


def _stubs(*, codes: bool = False) -> nn.Module:
    """A model for eager mode, which says itself where integers begin and end."""

    def forward(self: Any, x: Tensor) -> Any:
        x = self.relu(self.norm(self.conv(self.quant(x))))
        return self.dequant(self.fc(x.flatten(1)))

    return net(
        forward,
        quant=ao.QuantStub(),
        conv=nn.Conv2d(3, 8, 3, padding=1),
        norm=nn.BatchNorm2d(8),
        relu=nn.ReLU(),
        fc=nn.Linear(8 * 64, 4),
        dequant=nn.Identity() if codes else ao.DeQuantStub(),
    )


def _eager_static(*, codes: bool = False, trained: bool = False) -> nn.Module:
    model: Any = seeded(lambda: _stubs(codes=codes))
    fused = [["conv", "norm", "relu"]]
    if trained:
        model = ao.fuse_modules_qat(model.train(), fused)
        model.qconfig = ao.get_default_qat_qconfig("qnnpack")
        prepared = ao.prepare_qat(model).eval()
    else:
        model = ao.fuse_modules(model, fused)
        model.qconfig = ao.get_default_qconfig("qnnpack")
        prepared = ao.prepare(model)
    for batch in batches():
        prepared(batch)
    converted: nn.Module = ao.convert(prepared)
    return converted


def _eager_codes() -> nn.Module:
    return _eager_static(codes=True)


def _eager_qat() -> nn.Module:
    return _eager_static(trained=True)


def _eager_dynamic() -> nn.Module:
    converted: nn.Module = ao.quantize_dynamic(seeded(_stubs), {nn.Linear})
    return converted


def _fx() -> nn.Module:
    return convert(prepare(seeded(_stubs)), "qnnpack")


@pytest.fixture(scope="module")
def tflite(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The same model by our own flow, calibrated on the same batches, one by one."""
    images = (image[None] for batch in batches() for image in batch)
    edgeq = Edgeq(directory=tmp_path_factory.mktemp("eager"))
    return edgeq.quantize(seeded(_stubs), SAMPLE, calibration=images).tflite


@pytest.mark.sweep(1)
@pytest.mark.parametrize("make", [_eager_static, _eager_codes, _eager_qat, _eager_dynamic, _fx])
def test_quantized_models_as_references(
    maker: Edgeq, tflite: bytes, make: Callable[[], nn.Module]
) -> None:
    """As torch leaves them: with the flag of train mode set, some of them giving codes."""
    with engine("qnnpack"):
        reference = make()
        state = {name: str(value) for name, value in reference.state_dict().items()}
        loaded = maker.load(tflite, reference=reference)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            comparison = maker.compare(loaded, evaluation())

    assert any(module.training for module in reference.modules())
    assert not [finding for finding in comparison.health if finding.kind == "stateful_reference"]
    assert state == {name: str(value) for name, value in reference.state_dict().items()}
    # Two quantizations of one model, each with its own ranges: moving averages clip most.
    # Measured: 36.3, 36.3, 21.8, 27.2 and 36.3 dB.
    assert_within_budget(comparison, Budget(sqnr_db=18))


def test_a_quantized_lstm_in_train_mode(maker: Edgeq, tflite: bytes) -> None:
    """The one quantized module whose flag counts: it drops out."""
    model = nn.Sequential(nn.LSTM(4, 4, 2, dropout=0.5)).eval()
    with engine("qnnpack"):
        quantized = ao.quantize_dynamic(model, {nn.LSTM})
        quantized.train()
        with pytest.raises(ValueError, match="the reference is in train mode"):
            maker.load(tflite, reference=quantized)
