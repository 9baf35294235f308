"""Sound models of the bench: what is believed to be right, and what defects are made from."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fixtures import digits
from fixtures.models import ConcatSkip, ResidualNet, SmallModel, normal, samples, seeded
from pytest_edgeq import Edgeq, QuantizedModel
from tests.bench.detection.nets import DsCnn, EncoderBlock, Mlp

Sample = tuple[torch.Tensor, ...]

FLOWS = (
    "pt2e_static_int8",
    "pt2e_static_int8_per_tensor",
    "recipe_static_wi8_ai8",
    "recipe_static_wi8_ai16",
    "pt2e_dynamic_int8",
    "recipe_dynamic_wi8_afp32",
    "recipe_weight_only_wi8_afp32",
)
FLOAT = "float"
STATIC = tuple(flow for flow in FLOWS if "static" in flow)


@dataclass(frozen=True)
class Net:
    """A network and its data."""

    name: str  # for tables
    make: Callable[[int], nn.Module]  # gives the module in eval mode with the weights of a seed
    # gives samples: the first argument chooses among disjoint streams, of which 0 traces, 1
    # calibrates and 2 evaluates
    inputs: Callable[[int], Iterator[Sample]]
    n_evaluate: int = 8  # how many samples are evaluated
    n_calibrate: int = 32  # how many calibrate
    large: bool = False  # only in full
    # flows whose file is rightly refused, so that no defect can be made from it
    unsound: tuple[str, ...] = ()

    def trace(self) -> Sample:
        """The sample that the model is traced with."""
        return next(self.inputs(0))

    def calibration(self, n: int | None = None) -> list[Sample]:
        """Samples that calibrate."""
        return list(itertools.islice(self.inputs(1), n or self.n_calibrate))

    def evaluation(self) -> list[Sample]:
        """Samples that are evaluated."""
        return list(itertools.islice(self.inputs(2), self.n_evaluate))


@dataclass(frozen=True)
class Sound:
    """A sound build: the network, its module, and what the flow made of it."""

    net: Net
    flow: str
    seed: int
    module: nn.Module = field(repr=False)
    quantized: QuantizedModel = field(repr=False)
    evaluation: list[Sample] = field(repr=False)

    @property
    def name(self) -> str:
        """For tables and for the memory."""
        return f"{self.net.name}-{self.flow}-{self.seed}"


def build(
    maker: Edgeq,
    net: Net,
    flow: Any,
    module: nn.Module,
    *,
    calibration: list[Sample] | None = None,
    strict_export: bool = True,
) -> QuantizedModel:
    """Quantize a network's module as its owner does."""
    return maker.quantize(
        module,
        net.trace(),
        quantizer=flow,
        calibration=net.calibration() if calibration is None else calibration,
        strict_export=strict_export,
        name=net.name,
    )


def sound(maker: Edgeq, net: Net, flow: str, seed: int = 0) -> Sound:
    """Make a sound build, of `FLOAT` without a quantizer."""
    module = net.make(seed)
    made = build(maker, net, None if flow == FLOAT else flow, module)
    return Sound(net, flow, seed, module, made, net.evaluation())


def small(model: type[SmallModel]) -> Net:
    """Return a model of the fixtures as a network of the bench."""

    def inputs(stream: int) -> Iterator[Sample]:
        return samples(model, 1000, seed=stream)

    return Net(model.__name__, functools.partial(seeded, model), inputs, n_evaluate=128)


def _digits_inputs(stream: int) -> Iterator[Sample]:
    # Traced with a training digit: held-out ones are evaluated, the first training ones calibrate.
    data = digits.held_out() if stream == 2 else digits.training()
    return ((image,) for image in data.samples())


def _efficientnet(seed: int) -> nn.Module:
    from fixtures.efficientnet import efficientnet_lite0

    del seed  # its weights are the trained ones
    return efficientnet_lite0()


def _photographs(stream: int) -> Iterator[Sample]:
    from fixtures import photographs

    found = photographs.calibration_crops() if stream < 2 else photographs.evaluation_crops()
    return ((image,) for image in found)


class Wrapped(nn.Module):
    """A transformers model that takes an image and gives its logits."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Give the logits."""
        logits: torch.Tensor = self.net(image).logits
        return logits


def _settled(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Let batch norms learn what comes in, or the activations of random weights vanish."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make()
        with torch.no_grad():
            for step in range(10):
                model(normal(8, 3, 64, 64, seed=5000 + step))
    return model.eval()


def _resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=64, hidden_sizes=[64, 128, 256, 512], depths=[2] * 4, layer_type="basic"
    )
    config.num_labels = 10
    return Wrapped(ResNetForImageClassification(config))


def _mobilenet() -> nn.Module:
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    config = MobileNetV2Config(depth_multiplier=0.35)
    config.num_labels = 10
    return Wrapped(MobileNetV2ForImageClassification(config))


def _images(stream: int) -> Iterator[Sample]:
    return ((normal(1, 3, 64, 64, seed=10_000 * stream + i),) for i in itertools.count())


def _trained_digits(seed: int) -> nn.Module:
    return digits.trained(seed)


NETS: dict[str, Net] = {
    net.name: net
    for net in (
        Net("digits", _trained_digits, _digits_inputs),
        small(ResidualNet),
        small(DsCnn),
        small(ConcatSkip),
        small(Mlp),
        small(EncoderBlock),
        Net("ResNet-18", functools.partial(_settled, _resnet), _images, 3, 16, large=True),
        Net("MobileNetV2", functools.partial(_settled, _mobilenet), _images, 3, 16, large=True),
        Net(
            "EfficientNet-Lite0",
            _efficientnet,
            _photographs,
            n_evaluate=3,
            n_calibrate=8,
            large=True,
            # Channels whose trained weights are next to zero: their biases overflow INT32.
            unsound=("recipe_static_wi8_ai8",),
        ),
    )
}
