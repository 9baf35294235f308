"""Usual ways to write a model, which the converter has in another form, and defects of these."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fixtures.models import SmallModel, normal, samples, seeded
from pytest_edgeq import Edgeq
from tests.localize.builds import PT2E, STATIC, Build, blamed, localized

DYNAMIC = "recipe_dynamic_wi8_afp32"


class Normalised(SmallModel):
    """Its statistics are buffers, which are called as functions of torch are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("std", 0.5 + normal(8, seed=1).abs())
        self.register_buffer("mean", normal(8, seed=2))
        self.softmax = nn.Parameter(normal(8, seed=3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give scores."""
        scores: torch.Tensor = self.head((x - self.mean) / self.std * self.softmax)
        return scores

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Features."""
        return (normal(1, 8, seed=seed),)


class Scaled(SmallModel):
    """Queries are divided behind where their heads are laid out."""

    width = 8.0

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend with two heads."""
        query, key, value = (
            layer(x).view(1, 6, 2, 8).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        shares = (query / math.sqrt(self.width) @ key.transpose(2, 3)).softmax(-1)
        attended: torch.Tensor = self.out((shares @ value).transpose(1, 2).reshape(1, 6, 16))
        return attended

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Six tokens."""
        return (normal(1, 6, 16, seed=seed),)


class LastStep(SmallModel):
    """A recurrent layer, time first, of which one step is taken by its place."""

    step = -1

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Give scores, and the state."""
        steps, (hidden, _) = self.recurrent(x)
        return self.head(torch.relu(steps[self.step])), hidden

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Three steps."""
        return (normal(3, 1, 6, seed=seed),)


@pytest.mark.parametrize("flow", [STATIC, DYNAMIC, PT2E, None])
@pytest.mark.parametrize("kind", [Normalised, Scaled, LastStep])
def test_every_op_is_matched_and_sound(
    maker: Edgeq, build: Build, kind: type[SmallModel], flow: str | None
) -> None:
    """Under every flow."""
    errors = localized(maker, build(kind, flow), kind)

    assert all(row.matched for row in errors.rows), str(errors)
    assert not blamed(errors), str(errors)


@pytest.mark.parametrize(
    ("kind", "changes", "op"),
    [
        (Normalised, {"std": 1.1}, {"DIV", "MUL", "FULLY_CONNECTED"}),
        (Scaled, {"width": 9.0}, {"FULLY_CONNECTED"}),
        (LastStep, {"step": -2}, {"RELU", "MUL", "FULLY_CONNECTED"}),
    ],
)
@pytest.mark.parametrize("flow", [STATIC, DYNAMIC, None])
def test_what_torch_has_otherwise_is_found_there(
    maker: Edgeq,
    build: Build,
    kind: type[SmallModel],
    changes: dict[str, float],
    op: set[str],
    flow: str | None,
) -> None:
    """Another statistic, another width, another step than the file was made with."""
    quantized = build(kind, flow)
    other = seeded(kind)
    for name, value in changes.items():
        if name in dict(other.named_buffers()):
            getattr(other, name).mul_(value)
        else:
            setattr(other, name, value)
    loaded = maker.load(quantized.tflite, reference=other)
    errors = maker.localize(loaded, list(samples(kind, 4, seed=2)))

    assert errors.culprit is not None, str(errors)
    assert errors.culprit.op in op, str(errors)
    assert errors.culprit.verdict == "lowering", str(errors)
