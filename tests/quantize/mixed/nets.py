"""Nets and samples of the tests of sensitivities and plans."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fixtures import digits
from fixtures.models import net, normal, seeded
from pytest_edgeq import Budget, Edgeq, QuantizedModel

PT2E = "pt2e_static_int8"


def chain(seed: int = 0) -> nn.Module:
    """Build six convolutions, each but the last with a ReLU, whose signal keeps its power."""

    def forward(self: Any, x: Tensor) -> Any:
        for conv in (self.a, self.b, self.c, self.d, self.e):
            x = torch.relu(conv(x))
        return self.f(x)

    def build() -> nn.Module:
        channels = dict(zip("abcdef", (3, 8, 8, 8, 8, 8), strict=True))
        convs = {name: nn.Conv2d(n, 8, 3, padding=1) for name, n in channels.items()}
        for conv in convs.values():
            nn.init.kaiming_normal_(conv.weight)
        return net(forward, "Chain", **convs)

    return seeded(build, seed)


def with_wide_channel(model: nn.Module, layer: str, seed: int) -> nn.Module:
    """Multiply one channel of a layer by 30, and the next layer's weights of it by 1/30."""
    names = [*"abcdef"]
    here = model.get_submodule(layer)
    behind = model.get_submodule(names[names.index(layer) + 1])
    channel = seed % 8
    with torch.no_grad():
        for parameter in here.parameters():
            parameter[channel] *= 30
        behind.weight[:, channel] /= 30  # type: ignore[operator, index] # a parameter
    return model


def images(n: int, seed: int = 0) -> list[Tensor]:
    """Draw images for `chain`."""
    return [normal(1, 3, 12, 12, seed=1000 * seed + i) for i in range(n)]


def quantized_chain(
    maker: Edgeq, quantizer: Any = PT2E, model: nn.Module | None = None, seed: int = 0
) -> QuantizedModel:
    """Quantize `chain`, or another model of its inputs."""
    model = chain(seed) if model is None else model
    samples = images(16, seed=1)
    return maker.quantize(model, (samples[0],), quantizer=quantizer, calibration=samples)


def quantized_digits(maker: Edgeq, quantizer: Any = PT2E) -> QuantizedModel:
    """Quantize the trained net of digits."""
    samples = list(digits.calibration(64))
    return maker.quantize(digits.trained(), (samples[0],), quantizer=quantizer, calibration=samples)


def budget_of_two_layers(maker: Edgeq, quantized: QuantizedModel) -> Budget:
    """Return a budget for held-out digits that two layers in float meet, and none alone."""
    rows = maker.sensitivity(quantized, held_out()).rows
    best = max(row.in_float_db for row in rows)
    # Another layer gains 0.5 dB more; the weights, and with them the SQNR, differ between machines.
    return Budget(sqnr_db=round(best + 0.15, 2), top1_agreement=0.95)


def held_out(n: int = 64) -> list[Tensor]:
    """Return digits that are neither trained nor calibrated with."""
    return list(digits.held_out().samples())[:n]
