"""Products whose factors stand in their constants, or behind them, and defects in these."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fixtures.models import SmallModel, normal, seeded
from pytest_edgeq import Edgeq
from tests.detection.flatfile import FlatFile
from tests.localize.builds import PT2E, STATIC, Build, blamed, localized


class Weighed(SmallModel):
    """A constant, a value and a product of two values, each added with factors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(normal(8, 6, seed=n)) for n in (1, 2))
        self.bias, self.head = nn.Parameter(normal(6, seed=3)), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Give three scores of five things."""
        one = torch.addmm(self.bias, x, self.first, beta=0.5, alpha=2.0)
        other = torch.addmm(x[:, 2:], x, self.second, beta=0.3, alpha=0.7)
        both = torch.addmm(x[:, :6], x, x.T @ other.relu(), beta=0.4, alpha=0.2)
        return self.head(one.relu()), other, both

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Five things."""
        return (normal(5, 8, seed=seed),)


@pytest.mark.parametrize("flow", [PT2E, STATIC, None])
def test_factors_are_found_where_the_converter_puts_them(
    maker: Edgeq, build: Build, flow: str | None
) -> None:
    """PT2E's matrices stand behind codes, which the converter leaves as they are."""
    errors = localized(maker, build(Weighed, flow), Weighed)

    assert [row.name for row in errors.rows if not row.matched] == [], errors
    assert blamed(errors) == {}

    given = maker.load(build(Weighed, flow).tflite, reference=seeded(Weighed))
    assert blamed(localized(maker, given, Weighed)) == {}, "without the quantizer's own graph"


def _ops(file: FlatFile, name: str) -> list[int]:
    return [i for i in range(len(file.operators)) if file.name(i) == name]


def _changed(file: FlatFile, name: str, which: int) -> int:
    """Of the float constants that ops of a name take, one by 5 % larger; gives its op."""
    held = []
    for op in _ops(file, name):
        for tensor in map(int, file.operators[op].inputs):
            values = file.constant(tensor) if tensor >= 0 else None
            if values is not None and values.dtype == np.float32:
                held.append((op, tensor, values))
    op, tensor, values = held[which]
    file.store(tensor, values * np.float32(1.05))
    return op


@pytest.mark.parametrize(
    ("flow", "name", "which"),
    [
        (PT2E, "MUL", 0),
        (PT2E, "MUL", 1),
        (PT2E, "ADD", 0),
        (None, "MUL", 0),
        (None, "FULLY_CONNECTED", 0),
        (None, "FULLY_CONNECTED", 1),
    ],
)
def test_another_factor_is_found(
    maker: Edgeq, build: Build, flow: str | None, name: str, which: int
) -> None:
    """Wherever it stands."""
    file = FlatFile(build(Weighed, flow).tflite)
    op = _changed(file, name, which)
    changed = maker.load(file.content(), reference=seeded(Weighed))

    errors = localized(maker, changed, Weighed)

    # Of a product and a sum in a row whose constants nothing tells apart the first is named.
    assert blamed(errors).keys() & {op, op - 1}, errors
