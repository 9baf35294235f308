"""Tables of distances that the file computes from constants, and defects in these."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from fixtures.models import SmallModel, normal, seeded
from pytest_edgeq import Edgeq
from tests.detection.flatfile import FlatFile
from tests.localize.builds import STATIC, Build, blamed, localized

DYNAMIC = "recipe_dynamic_wi8_afp32"


class Disentangled(SmallModel):
    """Scores by distance, near and far ones with a sign, of which each place looks its own up."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.head = nn.Linear(8, 8), nn.Linear(12, 4)
        self.far = nn.Parameter(normal(8, 14, seed=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give as many tokens."""
        place = torch.arange(12)
        apart = place[:, None] - place[None]
        near = (apart < 3) & (apart > -3)
        size = torch.where(near, torch.tensor(2).type_as(apart), apart.abs())
        steps = torch.ceil(torch.log(size / 3) / math.log(4) * 2) + 3
        bucket = torch.where(size <= 3, apart.type_as(steps), steps * apart.sign()).long()
        scores = (self.lift(x) @ self.far).gather(-1, (bucket + 6).clamp(0, 13)[None])
        tokens: torch.Tensor = self.head(scores)
        return tokens

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """A dozen tokens."""
        return (normal(1, 12, 8, seed=seed),)


class Continuous(SmallModel):
    """Scores with what two layers make of each distance."""

    apart: torch.Tensor
    places: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values = nn.Linear(6, 6), nn.Linear(6, 6)
        self.first, self.second = nn.Linear(1, 12), nn.Linear(12, 1, bias=False)
        place = torch.arange(7)
        self.register_buffer("apart", torch.linspace(-1, 1, 13).reshape(1, 13, 1))
        self.register_buffer("places", place[:, None] - place[None] + 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give as many tokens."""
        far = self.second(torch.relu(self.first(self.apart))).reshape(-1)
        scores = x @ self.keys(x).transpose(1, 2) + 4 * torch.sigmoid(far[self.places])
        tokens: torch.Tensor = scores.softmax(-1) @ self.values(x)
        return tokens

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Seven tokens."""
        return (normal(1, 7, 6, seed=seed),)


@pytest.mark.parametrize(
    ("kind", "flow"),
    [
        *((Disentangled, flow) for flow in (STATIC, DYNAMIC)),
        *((Continuous, flow) for flow in (STATIC, DYNAMIC, None)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_the_file_computes_of_constants_is_matched(
    maker: Edgeq, build: Build, kind: type[SmallModel], flow: str | None
) -> None:
    """As any other ops are, and none computes anything else."""
    errors = localized(maker, build(kind, flow), kind)

    assert [row.name for row in errors.rows if not row.matched] == [], errors
    assert blamed(errors) == {}


def _ops(file: FlatFile, name: str) -> list[int]:
    return [i for i in range(len(file.operators)) if file.name(i) == name]


def _constant(
    name: str, place: int, change: Callable[[np.ndarray], np.ndarray], which: int = 0
) -> Callable[[FlatFile], int]:
    def spoil(file: FlatFile) -> int:
        op = _ops(file, name)[which]
        tensor = int(file.operators[op].inputs[place])
        values = file.constant(tensor)
        assert values is not None
        file.store(tensor, change(values).astype(values.dtype))
        return op

    return spoil


def _other_sign(file: FlatFile) -> int:
    """What takes the signs takes the distances."""
    op = _ops(file, "SIGN")[0]
    taker = next(i for i in _ops(file, "CAST") if file.producer(file.operators[i].inputs[0]) == op)
    file.operators[taker].inputs = [file.operators[op].inputs[0]]
    return taker


def _exchanged(file: FlatFile) -> int:
    """What near distances are, and far ones."""
    op = _ops(file, "SELECT_V2")[0]
    condition, near, far = file.operators[op].inputs
    file.operators[op].inputs = [condition, far, near]
    return op


def _flipped(values: np.ndarray) -> np.ndarray:
    changed = values.copy()
    changed.flat[values.argmax()] *= -1
    return changed


DEFECTS: dict[str, tuple[type[SmallModel], str, Callable[[FlatFile], int]]] = {
    "far for near ones": (Disentangled, DYNAMIC, _exchanged),
    "the base of a logarithm": (Disentangled, DYNAMIC, _constant("MUL", 1, lambda v: v * 1.3, 1)),
    "distances for their signs": (Disentangled, DYNAMIC, _other_sign),
    "a table's product": (Continuous, DYNAMIC, _constant("ADD", 0, lambda v: v * 1.05)),
    "a table's bias": (Continuous, STATIC, _constant("ADD", 1, _flipped)),
}


@pytest.mark.parametrize("what", DEFECTS)
def test_a_defect_in_a_table_is_found(maker: Edgeq, build: Build, what: str) -> None:
    """Behind it the rest of the table is sound."""
    kind, flow, change = DEFECTS[what]
    file = FlatFile(build(kind, flow).tflite)
    op = change(file)
    changed = maker.load(file.content(), reference=seeded(kind))

    errors = localized(maker, changed, kind)

    assert errors.culprit is not None, errors
    assert abs(errors.culprit.index - op) <= 1, errors
