"""Usual ways to write a model, which the converter has in another form, and defects of these."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from fixtures.models import SmallModel, normal, samples, seeded
from pytest_edgeq import Edgeq
from pytest_edgeq.localize.localizer import Localizer
from pytest_edgeq.samples import read_samples
from tests.detection.flatfile import FlatFile
from tests.localize.builds import PT2E, STATIC, Build, blamed, localized
from tests.localize.edits import ops_of, rescaled

pytestmark = pytest.mark.slow

DYNAMIC = "recipe_dynamic_wi8_afp32"


class Normalised(SmallModel):
    """Its statistics are buffers, which are called as functions of torch are."""

    mean: torch.Tensor
    std: torch.Tensor

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


class Pyramid(SmallModel):
    """Features of half the size, made large again: averaged pixels have a narrower range."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.small = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give a map."""
        large = torch.relu(self.first(x))
        small = torch.relu(self.small(functional.avg_pool2d(large, 2)))
        again = functional.interpolate(small, scale_factor=2, mode="bilinear", align_corners=False)
        made: torch.Tensor = self.head(large + again)
        return made

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Noise, the worst case."""
        return (normal(1, 4, 12, 12, seed=seed),)


class Ranked(SmallModel):
    """The greatest scores and their places, of which several are the same as codes."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(8, 40)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Give both."""
        values, places = torch.topk(self.scores(x), 12)
        return values, places

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Features."""
        return (normal(1, 8, seed=seed),)


class Apart(SmallModel):
    """How far two things are from each other, as the module of that name has it."""

    eps = 1e-6

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Give a distance each."""
        return functional.pairwise_distance(self.lift(x), y, eps=self.eps)

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Three pairs."""
        return normal(3, 8, seed=seed), normal(3, 8, seed=seed + 1000)


class Turned(SmallModel):
    """Tokens turned by angles, which the forward computes twice of numbers of its own."""

    angle = 0.3

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give scores a token."""
        x = self.lift(x)
        turned = torch.cat([-x[..., 4:], x[..., :4]], -1)
        cosine = torch.cos(torch.arange(6.0)[:, None] * self.angle)
        scores: torch.Tensor = self.head(
            x * cosine + turned * torch.sin(torch.arange(6.0)[:, None] * self.angle)
        )
        return scores

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Six tokens."""
        return (normal(1, 6, 8, seed=seed),)


class Floored(SmallModel):
    """A clamp of one end, whose range the converter carries up to the layer in front."""

    least = -0.5

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give scores."""
        scores: torch.Tensor = self.head(self.lift(x).clamp(min=self.least))
        return scores

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Six tokens."""
        return (normal(1, 6, 8, seed=seed),)


@pytest.mark.parametrize("flow", [STATIC, DYNAMIC, PT2E, None])
@pytest.mark.parametrize("kind", [Normalised, Scaled, Pyramid, Ranked, Apart, Turned, Floored])
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
        (Apart, {"eps": 0.5}, {"ADD"}),
        (Turned, {"angle": 0.4}, {"MUL", "COS", "SIN"}),
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
    """Another statistic, another width than the file was made with."""
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
    # A number beyond the scale of a constant is told by what its op loses.
    beyond = kind is Apart and flow == STATIC
    assert errors.culprit.verdict == ("quantization" if beyond else "lowering"), str(errors)


@pytest.mark.parametrize("factor", [1.0, 0.98, 1.1])
def test_a_range_that_comes_from_behind_is_told_from_a_wrong_one(
    maker: Edgeq, build: Build, factor: float
) -> None:
    """The converter gives what is made large the range of what it becomes."""
    quantized = build(Pyramid, PT2E)
    file = FlatFile(quantized.tflite)
    (place,) = ops_of(file, "RESIZE_BILINEAR")
    op = file.operators[place]
    rescaled(file, (op.inputs[0], op.outputs[0]), factor)
    errors = localized(maker, quantized.with_tflite(file.content()), Pyramid)
    (row,) = (row for row in errors.rows if row.module == "small")

    assert row.local_rmse_lsb is not None
    assert row.local_rmse_lsb > 2 / math.sqrt(12), "it costs a bit and more"
    assert any("× the reference's" in text for text in row.findings) == (factor != 1)
    found = blamed(errors)
    assert not found if factor == 1 else errors.culprit == row


@pytest.mark.parametrize("factor", [1.0, 0.98, 1.1])
def test_a_range_that_a_clamp_ends_is_told_from_a_wrong_one(
    maker: Edgeq, build: Build, factor: float
) -> None:
    """What it cuts off in front is clamped behind."""
    quantized = build(Floored, PT2E)
    file = FlatFile(quantized.tflite)
    (place,) = ops_of(file, "MAXIMUM")
    clamp = file.operators[place]
    rescaled(file, (*clamp.inputs, clamp.outputs[0]), factor)
    errors = localized(maker, quantized.with_tflite(file.content()), Floored)
    (row,) = (row for row in errors.rows if row.module == "lift")

    assert row.clipped is not None
    assert row.clipped > 0.1
    assert bool(row.findings) == (factor != 1)


def test_places_that_are_exchanged_are_found(
    maker: Edgeq, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An output of whole numbers is held to them."""
    quantized = build(Ranked, STATIC)
    (op,) = (op for op in quantized.graph.subgraphs[0].ops if op.name == "TOPK_V2")
    with Localizer(quantized) as localizer:
        read, turned = localizer._runner.tensor, list[int]()

        def exchanged(index: int) -> Any:
            places = read(index)
            if index == op.outputs[1]:
                values = read(op.inputs[0])[0, places[0]]
                for at in range(11):
                    if values[at] != values[at + 1]:
                        places[0, [at, at + 1]] = places[0, [at + 1, at]]
                        turned.append(at)
                        break
            return places

        monkeypatch.setattr(localizer._runner, "tensor", exchanged)
        for sample in read_samples(samples(Ranked, 3, seed=3), quantized.spec, "evaluation"):
            localizer.update(sample)
        errors = localizer.result()

    assert turned, "all values are equal"
    assert op.index in blamed(errors), str(errors)
