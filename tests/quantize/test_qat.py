"""Quantization-aware training: what `train=` is given, and what becomes of it in the file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fixtures.models import ConvBnRelu, PositionalAndKeyword, net, normal, seeded
from fixtures.tflite.writer import pack, unpack
from pytest_edgeq import (
    Budget,
    Edgeq,
    QuantizedModel,
    assert_no_float_ops,
    assert_op_counts,
    assert_op_dtypes,
    assert_within_budget,
    litert,
)
from pytest_edgeq.tflite.constants import read_constant
from pytest_edgeq.tflite.roles import roles_of
from tests.quantize import making
from tests.quantize.quantizers import ByHand, activation, converters, per_tensor, weight, xnnpacks

with litert.quiet():
    from torchao.quantization.pt2e import observer
    from torchao.quantization.pt2e.fake_quantize import FakeQuantize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BATCH = 16


def build() -> nn.Module:
    """Conv-bn-relu and conv-bn, the one without and the other with a bias; dropout and linear."""

    def forward(self: Any, x: Tensor) -> Any:
        x = torch.relu(self.norm1(self.conv1(x)))
        x = self.norm2(self.conv2(x)) + x
        return self.fc(self.drop(x).flatten(1))

    return net(
        forward,
        conv1=nn.Conv2d(3, 8, 3, padding=1, bias=False),
        # Neither is torch's default: what forgets them computes something else.
        norm1=nn.BatchNorm2d(8, eps=0.1, momentum=0.3),
        conv2=nn.Conv2d(8, 8, 3, padding=1),
        norm2=nn.BatchNorm2d(8, eps=0.1, momentum=0.3),
        drop=nn.Dropout(0.25),
        fc=nn.Linear(8 * 64, 4),
    )


def batches(n: int) -> Iterator[Tensor]:
    """What is trained with: a little off what the model's statistics are of."""
    for seed in range(n):
        yield normal(BATCH, 3, 8, 8, seed=seed) + 0.2


def evaluation() -> Iterator[Tensor]:
    """What neither training nor calibration has seen."""
    for seed in range(16):
        yield normal(1, 3, 8, 8, seed=100 + seed) + 0.2


def settled() -> Any:
    """A model whose batch norms know their data, as trained models do."""
    model = seeded(build).train()
    with torch.no_grad():
        for seed in range(20):
            model(normal(BATCH, 3, 8, 8, seed=200 + seed))
    return model.eval()


def observe(prepared: Any) -> None:
    """No training: the weights stay as they are, the fake quantizers see data."""
    with torch.no_grad():
        for batch in batches(8):
            prepared(batch)


@dataclass
class Trained:
    """A model, its file, and what the training left in the graph."""

    model: nn.Module
    before: dict[str, Tensor]
    quantized: QuantizedModel
    state: dict[str, Tensor]
    notes: dict[str, Any]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Twelve steps with batches of sixteen, for a file of one."""
    model = settled()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    goal = settled()
    with torch.no_grad():
        goal.fc.bias.add_(0.5)
    state: dict[str, Tensor] = {}
    notes: dict[str, Any] = {}

    def train(prepared: Any) -> list[float]:
        notes["mode"] = prepared.training
        mean = prepared.get_buffer("norm1.running_mean")
        batch = next(batches(1))
        for mode in ("train", "eval"):
            first = mean.clone()
            getattr(prepared, mode)()
            # Its observers go on moving, by less than what a dropout does.
            repeats = (prepared(batch) - prepared(batch)).abs().max() < 0.05
            notes[f"repeats in {mode}"] = bool(repeats)
            notes[f"keeps statistics in {mode}"] = torch.equal(mean, first)
        prepared.train()
        optimizer = torch.optim.Adam(prepared.parameters(), lr=0.001)
        losses = []
        for inputs in batches(12):
            optimizer.zero_grad()
            loss = F.mse_loss(prepared(inputs), goal(inputs).detach())
            torch.autograd.backward(loss)
            optimizer.step()
            losses.append(float(loss.detach()))
        prepared.eval()
        # Ranges are moving averages that forget a hundredth a batch: what the first saw goes.
        for _ in range(30):
            observe(prepared)
        state.update({name: tensor.clone() for name, tensor in prepared.state_dict().items()})
        return losses

    edgeq = Edgeq(directory=tmp_path_factory.mktemp("qat"))
    quantized = edgeq.quantize(
        model, (normal(1, 3, 8, 8, seed=0),), quantizer="pt2e_qat_int8", train=train
    )
    return Trained(model, before, quantized, state, notes)


UNFOLDED = dict.fromkeys(("MUL", "DIV", "SUB", "SQRT", "RSQRT"), 0)
INT8 = {"input": "int8", "weight": "int8", "bias": "int32", "output": "int8", "scheme": "int8"}


@pytest.mark.slow
def test_every_op_is_folded_and_int8(trained: Trained) -> None:
    """Batch norms are gone into the convolutions, the ReLU is fused; the model is as it was."""
    quantized = trained.quantized
    assert_op_counts(
        quantized,
        # Dropout scales what it keeps while it trains: behind it the range is another one.
        {"CONV_2D": 2, "ADD": 1, "FULLY_CONNECTED": 1, "QUANTIZE": 1, "RELU": 0, **UNFOLDED},
    )
    for op, count in (("CONV_2D", 2), ("FULLY_CONNECTED", 1)):
        assert_op_dtypes(quantized, op, granularity="per_channel", count=count, **INT8)
    assert_no_float_ops(quantized)
    assert quantized.flow == "pt2e"
    assert not any(module.training for module in trained.model.modules())
    for name, tensor in trained.model.state_dict().items():
        torch.testing.assert_close(tensor, trained.before[name], rtol=0, atol=0)


@pytest.mark.slow
def test_the_trained_weights_and_statistics_reach_the_file(maker: Edgeq, trained: Trained) -> None:
    """A float model with what the training left computes the same; the one before does not."""
    after = build().eval()
    learned = {name: trained.state[name] for name in trained.before if "num_batches" not in name}
    after.load_state_dict(learned, strict=False)
    moved = (learned["norm1.running_mean"] - trained.before["norm1.running_mean"]).abs().max()
    against_trained = maker.load(trained.quantized.tflite, reference=after)
    comparison = maker.compare(against_trained, evaluation())
    original = maker.compare(trained.quantized, evaluation())

    assert moved > 0.05
    # Measured: 32.6 and −3.3 dB, lowering 1 LSB.
    assert_within_budget(comparison, Budget(sqnr_db=28))
    assert original.total.sqnr_db < 5
    assert_within_budget(original, lowering=Budget(max_lsb_error=2))


@pytest.mark.slow
def test_what_train_is_given(trained: Trained) -> None:
    """A graph in eval mode whose switches reach dropout and batch statistics."""
    assert trained.notes == {
        "mode": False,
        "repeats in eval": True,
        "keeps statistics in eval": True,
        "repeats in train": False,
        "keeps statistics in train": False,
    }


def _xnnpack() -> Any:
    quantizer, config = xnnpacks(is_per_channel=True, is_qat=True)
    return quantizer.set_global(config)


def _users_own() -> Any:
    """Written as for post-training: it knows nothing of batch norms, and annotates the conv."""
    taken = activation(FakeQuantize.with_args(observer=observer.MovingAverageMinMaxObserver))
    kind = observer.MovingAveragePerChannelMinMaxObserver
    by_channel = weight(FakeQuantize.with_args(observer=kind))
    return ByHand("conv2d", taken=taken, weight=by_channel, given=taken)


@pytest.mark.slow
@pytest.mark.parametrize("make", [_xnnpack, _users_own])
def test_other_quantizers_with_fake_quantizers(maker: Edgeq, make: Callable[[], Any]) -> None:
    """The convolutions are int8 with their batch norms folded, by the model's own eps."""
    quantized = maker.quantize(
        seeded(build), (normal(1, 3, 8, 8, seed=0),), quantizer=make(), train=observe
    )

    assert_op_dtypes(quantized, "CONV_2D", granularity="per_channel", count=2, **INT8)
    assert_op_counts(quantized, UNFOLDED)
    # Nothing was trained: it is the float model. Measured: 31.0 and 36.6 dB.
    assert_within_budget(maker.compare(quantized, evaluation()), Budget(sqnr_db=20))


@pytest.mark.slow
def test_a_model_that_fixes_its_batch(maker: Edgeq) -> None:
    """It is trained with the batch that its reshape names."""

    def train(prepared: Any) -> None:
        for seed in range(8):
            prepared(normal(1, 4, 4, seed=seed))

    model = seeded(lambda: net(lambda self, x: self.fc(x.reshape(1, 16)), fc=nn.Linear(16, 4)))
    quantized = maker.quantize(
        model, (normal(1, 4, 4, seed=0),), quantizer="pt2e_qat_int8", train=train
    )
    assert_op_dtypes(quantized, "FULLY_CONNECTED", scheme="int8", weight="int8", count=1)


class _Stopped(Exception):
    """Raised by a training that has seen enough."""


def test_inputs_by_name_and_what_train_raises(maker: Edgeq) -> None:
    """Any batch for all inputs alike; an error in train() is the user's own, and comes through."""
    model, shapes = seeded(PositionalAndKeyword), []

    def train(prepared: Any) -> None:
        args = [torch.cat([x] * 5) for x in PositionalAndKeyword.sample_inputs()]
        kwargs = {k: torch.cat([x] * 5) for k, x in PositionalAndKeyword.sample_kwargs().items()}
        shapes.append(prepared(*args, **kwargs).shape[0])
        raise _Stopped

    with pytest.raises(_Stopped):
        maker.quantize(
            model,
            PositionalAndKeyword.sample_inputs(),
            sample_kwargs=PositionalAndKeyword.sample_kwargs(),
            quantizer="pt2e_qat_int8",
            train=train,
        )
    assert shapes == [5]


def _linear() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4)).eval()


def _with_nan(prepared: Any) -> None:
    prepared(torch.ones(2, 4))
    with torch.no_grad():
        next(prepared.parameters())[0] = torch.nan


def _partly(prepared: Any) -> None:
    name = next(n for n, m in prepared.named_modules() if n.endswith("process_0"))
    prepared.get_submodule(name).disable_observer()
    prepared(torch.ones(2, 4))


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("train", "told"),
    [
        (lambda prepared: None, r"train\(\) never ran the prepared graph: none of its 3"),
        (_partly, r"in train\(\), 1 of 3 fake quantizers saw no data: "),
        (_with_nan, r"after train\(\), 1 tensor\(s\) of the graph are not finite: 0\.weight"),
        (lambda prepared: nn.Identity(), r"train\(\) returned another module, a Identity"),
    ],
)
def test_a_training_that_went_wrong(maker: Edgeq, train: Any, told: str) -> None:
    """Nothing is converted."""
    with pytest.raises(ValueError, match=told):
        maker.quantize(_linear(), (torch.ones(1, 4),), quantizer="pt2e_qat_int8", train=train)


QAT = "pt2e_qat_int8"


@pytest.mark.parametrize(
    ("quantizer", "options", "error", "told"),
    [
        (QAT, {}, ValueError, "pt2e_qat_int8 needs train=, a function"),
        (QAT, {"train": 3}, TypeError, "train: expected a function of the prepared graph, got 3"),
        (
            "pt2e_static_int8",
            {"train": observe},
            ValueError,
            "train= is for quantization-aware training, which pt2e_static_int8 is not",
        ),
        (None, {"train": observe}, ValueError, "which None is not"),
        (
            "recipe_static_wi8_ai8",
            {"train": observe},
            ValueError,
            "which recipe_static_wi8_ai8 is not",
        ),
        (
            QAT,
            {"train": observe, "sample_inputs": {"a": (torch.ones(1, 4),), "b": (torch.ones(2),)}},
            ValueError,
            "train= supports one signature, got 2",
        ),
    ],
)
def test_train_where_it_does_not_belong(
    maker: Edgeq, quantizer: str | None, options: dict[str, Any], error: type[Exception], told: str
) -> None:
    """Refused before anything is exported."""
    options = {"sample_inputs": (torch.ones(1, 4),), "quantizer": quantizer, **options}
    with pytest.raises(error, match=told):
        maker.quantize(_linear(), **options)


def test_train_with_a_quantizer_of_plain_observers(maker: Edgeq) -> None:
    """It would be trained in float: told once its annotations are known."""
    quantizer = converters().set_global(per_tensor())
    with pytest.raises(ValueError, match="PT2EQuantizer inserts no fake quantizer"):
        maker.quantize(_linear(), (torch.ones(1, 4),), quantizer=quantizer, train=observe)


@pytest.mark.slow
def test_fake_quantizers_without_training() -> None:
    """They are calibrated as observers are; without samples the error is the usual one."""
    quantizer = converters().set_global(per_tensor(is_qat=True))
    quantized = making.quantize(quantizer, ConvBnRelu)
    assert_op_dtypes(quantized, "CONV_2D", scheme="int8", weight="int8", count=1)
    with pytest.raises(ValueError, match="needs calibration data and got none"):
        making.quantize(quantizer, ConvBnRelu, calibration=None)


def _levels() -> nn.Module:
    """One convolution for two levels, as in a detector's head, with a batch norm for each."""
    return net(
        lambda self, x: (self.norms[0](self.conv(x)), self.norms[1](self.conv(2 * x))),
        conv=nn.Conv2d(3, 4, 3),
        norms=nn.ModuleList(nn.BatchNorm2d(4) for _ in range(2)),
    )


@pytest.mark.slow
def test_a_shared_convolution_with_batch_norms(maker: Edgeq) -> None:
    """Torchao would fold the first batch norm into both calls: refused, with the way out."""
    model, image = seeded(_levels), (normal(1, 3, 8, 8, seed=0),)
    with pytest.raises(ValueError, match=r"2 calls share its weight .*'pt2e_static_int8'"):
        maker.quantize(model, image, quantizer="pt2e_qat_int8", train=lambda graph: graph(*image))
    data = [(normal(1, 3, 8, 8, seed=seed),) for seed in range(8)]
    comparison = maker.compare(maker.quantize(model, image, calibration=data), data)
    # 38 dB measured; 5 where the first batch norm is folded into both.
    assert comparison.total.sqnr_db > 25


def _dropping() -> nn.Module:
    """As classifiers are trained: a batch norm that learns its statistics, a dropout at the end."""

    def forward(self: Any, x: Tensor) -> Any:
        return self.fc(self.drop(torch.relu(self.norm(self.conv(x))).mean((2, 3))))

    return net(
        forward,
        conv=nn.Conv2d(3, 8, 3, bias=False),
        norm=nn.BatchNorm2d(8, momentum=0.03),
        drop=nn.Dropout(0.2),
        fc=nn.Linear(8, 4),
    )


@pytest.fixture(scope="module")
def lagging(tmp_path_factory: pytest.TempPathFactory) -> QuantizedModel:
    """Of a file whose batch norm moved faster than the averaged ranges of the weights behind it."""
    model: Any = seeded(_dropping).train()
    with torch.no_grad():
        model.conv.weight.mul_(0.1)
        for seed in range(60):
            model(normal(8, 3, 8, 8, seed=seed))

    def train(prepared: Any) -> None:
        prepared.train()
        with torch.no_grad():
            for batch in batches(4):
                prepared(batch * 0.8)
        prepared.eval()

    x = (normal(1, 3, 8, 8, seed=0),)
    edgeq = Edgeq(directory=tmp_path_factory.mktemp("lagging"))
    return edgeq.quantize(model.eval(), x, quantizer="pt2e_qat_int8", train=train)


@pytest.mark.slow
def test_a_range_that_lags_behind_its_batch_norm_is_no_fault_of_the_file(
    maker: Edgeq, lagging: QuantizedModel
) -> None:
    """The graph cuts the weights as the file does; a file that cuts more is told."""
    inputs = list(evaluation())
    (conv,) = (op for op in lagging.graph.ops if op.name == "CONV_2D")
    (weight,) = roles_of(lagging.graph, conv).weights
    codes = read_constant(lagging.graph, conv, weight).values
    assert (np.abs(codes) == 127).sum() > len(codes)  # more than the largest of each channel
    comparison = maker.compare(lagging, inputs)
    assert comparison.lowering is not None
    assert comparison.lowering.sqnr_db > 35
    errors = maker.localize(lagging, inputs)
    assert errors.culprit is None or errors.culprit.verdict != "lowering"

    file = unpack(lagging.tflite)
    stored = file.subgraphs[0].tensors[weight.tensor.index]
    stored.quantization.scale = np.asarray(stored.quantization.scale) * np.float32(0.9)
    buffer = file.buffers[stored.buffer]
    cut = np.clip(np.round(codes / 0.9), -127, 127).astype(np.int8)
    buffer.data = np.frombuffer(cut.tobytes(), np.uint8)
    damaged = maker.localize(lagging.with_tflite(pack(file)), inputs)
    assert damaged.culprit is not None
    assert damaged.culprit.op == "CONV_2D"
