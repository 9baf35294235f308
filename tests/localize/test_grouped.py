"""Transposed convolutions of several groups, and defects in one group."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from fixtures.models import SmallModel, normal
from pytest_edgeq import Edgeq
from tests.detection.flatfile import FlatFile
from tests.localize.builds import PT2E, STATIC, Build, blamed, localized

pytestmark = pytest.mark.slow

DYNAMIC = "recipe_dynamic_wi8_afp32"


class Widened(SmallModel):
    """Two groups in front of a layer, and a group a channel."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Conv2d(3, 4, 3, padding=1)
        self.widen = nn.ConvTranspose2d(4, 6, 2, 2, groups=2, bias=False)
        self.mix = nn.Conv2d(6, 3, 1)
        self.again = nn.ConvTranspose2d(3, 3, 4, 2, 1, groups=3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give an image of four times the size."""
        image: torch.Tensor = self.again(self.mix(self.widen(self.lift(x))))
        return image

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """An image."""
        return (normal(1, 3, 5, 5, seed=seed),)


class Normed(SmallModel):
    """Groups in front of a batch norm, which the converter leaves behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(6, 3, 1)
        self.widen, self.norm = nn.ConvTranspose2d(4, 6, 2, 2, groups=2), nn.BatchNorm2d(6)
        self.norm.weight.data, self.norm.bias.data = 1 + 0.3 * normal(6, seed=1), normal(6, seed=2)
        self.norm.running_mean = 0.3 * normal(6, seed=3)
        self.norm.running_var = 0.2 + normal(6, seed=4).square()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give an image of twice the size."""
        image: torch.Tensor = self.head(torch.relu(self.norm(self.widen(self.lift(x)))))
        return image

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """An image."""
        return (normal(1, 3, 5, 5, seed=seed),)


@pytest.mark.parametrize(
    ("kind", "flow"),
    [
        *((Widened, flow) for flow in (PT2E, STATIC, DYNAMIC, None)),
        *((Normed, flow) for flow in (STATIC, DYNAMIC, None)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_each_group_has_ops_of_its_own(
    maker: Edgeq, build: Build, kind: type[SmallModel], flow: str | None
) -> None:
    """None waits for those behind it to be told with them."""
    errors = localized(maker, build(kind, flow), kind)

    assert [row.name for row in errors.rows if not row.matched] == [], errors
    assert [row.name for row in errors.rows if row.local_sqnr_db is None] == [], errors
    assert blamed(errors) == {}


def _ops(file: FlatFile, name: str) -> list[int]:
    return [i for i in range(len(file.operators)) if file.name(i) == name]


def _flipped(file: FlatFile) -> int:
    """The sign of a weight of the second group."""
    op = _ops(file, "TRANSPOSE_CONV")[1]
    weight = int(file.operators[op].inputs[1])
    values = file.constant(weight)
    assert values is not None
    values.flat[np.abs(values.astype(int)).argmax()] *= -1
    file.store(weight, values)
    return op


def _exchanged(file: FlatFile) -> int:
    op = _ops(file, "CONCATENATION")[0]
    file.operators[op].inputs = file.operators[op].inputs[::-1]
    return op


def _begins_earlier(file: FlatFile) -> int:
    """A channel of the first group in the second one."""
    op = _ops(file, "SLICE")[1]
    begin = int(file.operators[op].inputs[1])
    values = file.constant(begin)
    assert values is not None
    values[3] -= 1
    file.store(begin, values)
    return op


@pytest.mark.parametrize("flow", [PT2E, STATIC, DYNAMIC])
@pytest.mark.parametrize("spoil", [_flipped, _exchanged, _begins_earlier])
def test_a_defect_in_one_group_is_found_there(
    maker: Edgeq, build: Build, flow: str, spoil: Callable[[FlatFile], int]
) -> None:
    """What follows is judged by what it takes."""
    file = FlatFile(build(Widened, flow).tflite)
    op = spoil(file)
    changed = maker.load(file.content(), reference=build(Widened, flow).float_model)

    errors = localized(maker, changed, Widened)

    assert errors.culprit is not None
    assert errors.culprit.index == op, errors
