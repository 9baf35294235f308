"""What the converter moves in front of moves or writes twice, and defects of these."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fixtures.models import SmallModel, normal
from pytest_edgeq import Edgeq
from tests.detection.flatfile import FlatFile
from tests.localize.builds import PT2E, STATIC, Build, blamed, localized
from tests.localize.edits import Change, Defect, edited, localized_with, ops_of

pytestmark = pytest.mark.slow

DYNAMIC = "recipe_dynamic_wi8_afp32"
FLOWS = (STATIC, DYNAMIC, PT2E, None)


class Embedded(SmallModel):
    """A layer whose result is given away, and goes on from its ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.embed, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Give scores, and what they are made of."""
        x = self.embed(torch.relu(self.first(x)))
        return self.head(torch.relu(x)), x

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Features."""
        return (normal(1, 8, seed=seed),)


class Turned(SmallModel):
    """The same, turned in front of the ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, 10), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Give scores, and what they are made of."""
        x = self.embed(x)
        return self.head(torch.relu(x.transpose(1, 2))), x

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Six steps."""
        return (normal(1, 6, 8, seed=seed),)


class Enlarged(SmallModel):
    """Clamps behind what turns channels to pixels, and behind what makes rows of maps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other = (nn.Conv2d(3, 12, 3, padding=1) for _ in range(2))
        self.second, self.third = (nn.Conv2d(3, 4, 3, stride=2, padding=1) for _ in range(2))
        self.head = nn.Linear(64, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Give images of twice the size, and scores."""
        large = torch.relu(functional.pixel_shuffle(self.first(x), 2))
        bounded = functional.pixel_shuffle(self.other(x) + x.repeat_interleave(4, 1), 2)
        small = self.second(large)
        rows = torch.relu(self.third(x).flatten(1))
        tokens = functional.relu6((small * torch.sigmoid(small)).flatten(2).transpose(1, 2))
        return bounded.clamp(-1, 1), self.head(rows), tokens

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """One image."""
        return (normal(1, 3, 8, 8, seed=seed),)


class Negated(SmallModel):
    """Heads of a layer, negated where they are laid out already."""

    def __init__(self) -> None:
        super().__init__()
        self.split, self.head = nn.Linear(8, 8), nn.Linear(48, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give scores."""
        heads = -self.split(x).reshape(1, 6, 2, 4).transpose(1, 2)
        scores: torch.Tensor = self.head(heads.flatten(1))
        return scores

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Six steps."""
        return (normal(1, 6, 8, seed=seed),)


class Named(SmallModel):
    """An input that is named as a function is, which a clamp takes."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        """Give scores."""
        scores: torch.Tensor = self.head(torch.relu(t))
        return scores

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Features."""
        return (normal(1, 8, seed=seed),)


class ClampedAgain(SmallModel):
    """Behind ReLUs another clamp, which is an op, and the lesser of two values, which is none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(3, 8, 3, padding=1) for _ in range(2))
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Give features of both."""
        mapped = torch.relu(self.second(x))
        least = torch.minimum(mapped, 1 - mapped)
        return self.head(torch.relu(self.first(x)).clamp(max=0.7)), self.head(least)

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """An image."""
        return (normal(1, 3, 8, 8, seed=seed),)


@pytest.mark.parametrize("flow", FLOWS, ids=str)
@pytest.mark.parametrize("kind", [Embedded, Turned, Enlarged, Negated, Named, ClampedAgain])
def test_what_the_converter_moves_is_matched_and_not_blamed(
    maker: Edgeq, build: Build, kind: type[SmallModel], flow: str | None
) -> None:
    """Every op is measured, and none computes anything else."""
    errors = localized(maker, build(kind, flow), kind)

    assert [row.name for row in errors.rows if not row.matched] == []
    assert blamed(errors) == {}


def _fused(file: FlatFile, name: str, clamp: int, place: int = 0) -> int:
    """The op of a name, of those with this clamp in them, that stands at a place."""
    return [
        i
        for i in ops_of(file, name)
        if file.operators[i].builtinOptions.fusedActivationFunction == clamp
    ][place]


def _becomes(name: str, was: int, clamp: int, place: int = 0) -> Change:
    """Give an op another clamp."""

    def change(file: FlatFile) -> int:
        op = _fused(file, name, was, place)
        file.operators[op].builtinOptions.fusedActivationFunction = clamp
        return op

    return change


def _first_of_two(file: FlatFile) -> int:
    """Of the convolution in front of the second clamp."""
    return _becomes("CONV_2D", RELU, NONE, 1)(file)


def _row_negated(name: str, was: int, place: int = 0) -> Change:
    """Negate the first row of an op's weight."""

    def change(file: FlatFile) -> int:
        op = _fused(file, name, was, place)
        edited(file, op, 1, lambda values: np.negative(values[0], out=values[0]))
        return op

    return change


LAYER = "FULLY_CONNECTED"
NONE, RELU, RELU_N1_TO_1, RELU6 = range(4)
DEFECTS: dict[str, Defect] = {
    # In a range that begins at 0, no code tells whether the op clamps.
    "the clamp of pixels lost": (Enlarged, None, _becomes("CONV_2D", RELU, NONE)),
    "the clamp of pixels another": (Enlarged, None, _becomes("ADD", RELU_N1_TO_1, RELU)),
    "the clamp of rows lost": (Enlarged, DYNAMIC, _becomes("CONV_2D", RELU, NONE, 1)),
    "the clamp of tokens lost": (Enlarged, None, _becomes("MUL", RELU6, NONE)),
    "a convolution clamped": (Enlarged, STATIC, _becomes("CONV_2D", NONE, RELU)),
    "a weight behind pixels": (Enlarged, STATIC, _row_negated("CONV_2D", RELU)),
    "a weight behind rows": (Enlarged, DYNAMIC, _row_negated("CONV_2D", RELU, 1)),
    "the clamp of the lesser lost": (ClampedAgain, None, _becomes("CONV_2D", RELU, NONE)),
    "the first of two clamps lost": (ClampedAgain, None, _first_of_two),
    "a negated weight": (Negated, None, _row_negated(LAYER, NONE)),
    "a weight behind what is negated": (Negated, DYNAMIC, _row_negated(LAYER, NONE, 1)),
    "what is given away clamped": (Embedded, None, _becomes(LAYER, NONE, RELU)),
    "the same in integers": (Embedded, PT2E, _becomes(LAYER, NONE, RELU)),
    "what is given away of another weight": (Embedded, STATIC, _row_negated(LAYER, NONE)),
}


@pytest.mark.parametrize("what", DEFECTS)
def test_a_defect_of_the_same_place_is_found(maker: Edgeq, build: Build, what: str) -> None:
    """What a sound file is allowed hides none that is not."""
    op, errors = localized_with(maker, build, DEFECTS[what])

    assert op in blamed(errors), errors


@pytest.mark.parametrize(("kind", "place"), [(Embedded, 1), (Turned, 0)])
def test_a_layer_that_is_not_clamped_for_what_goes_on_is_found(
    maker: Edgeq, build: Build, kind: type[SmallModel], place: int
) -> None:
    """It gives what is given away."""
    quantized = build(kind, DYNAMIC)
    file = FlatFile(quantized.tflite)
    op = _becomes(LAYER, RELU, NONE, place)(file)

    found = blamed(localized(maker, quantized.with_tflite(file.content()), kind))

    assert list(found) == [op], found
    assert found[op][1] == ("fused activation: expected RELU, got None",)
