"""How far ops may be off together, held against what the kernels do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fixtures.models import SmallModel, normal, samples, seeded
from pytest_edgeq import Edgeq
from pytest_edgeq.localize.biases import qparams
from pytest_edgeq.localize.groups import group_bound


class Chain(SmallModel):
    """Three ops that round, one after the other."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Give as many values."""
        return torch.sigmoid(x + y) * x - y

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Two rows of numbers."""
        return (normal(1, 256, seed=seed), normal(1, 256, seed=seed + 50))


def test_a_chain_is_no_further_off_than_its_bound_says(tmp_path: Path) -> None:
    """Held against float64 on the values that the file took, where no range cuts any off."""
    quantized = Edgeq(directory=tmp_path).quantize(
        seeded(Chain),
        Chain.sample_inputs(),
        quantizer="recipe_static_wi8_ai8",
        calibration=samples(Chain, 16),
    )
    graph, edge = quantized.graph, quantized.edge
    ops = graph.subgraphs[0].ops
    assert [op.name for op in ops] == ["ADD", "LOGISTIC", "MUL", "SUB"]
    bound = group_bound(graph, ops)
    assert bound is not None
    runner = edge.runner("builtin", keep=True)
    worst = 0.0
    for x, y in samples(Chain, 8, seed=3):
        names = quantized.input_names
        runner.run(edge.encode(names, [0.5 * x.numpy(), 0.5 * y.numpy()]))

        def read(index: int) -> np.ndarray:
            scale, point = qparams(graph.subgraphs[0].tensors[index]) or (1.0, 0)
            return (np.asarray(runner.tensor(index), np.float64) - point) * scale

        a, b = (read(index) for index in ops[0].inputs)
        first = read(ops[2].inputs[0 if ops[2].inputs[1] == ops[1].outputs[0] else 1])
        second = read(ops[3].inputs[1])
        exact = first / (1 + np.exp(-(a + b))) - second
        scale, _ = qparams(graph.tensor(ops[3], ops[3].outputs[0])) or (1.0, 0)
        worst = max(worst, float(np.abs(exact - read(ops[3].outputs[0])).max()) / scale)
    # More than one rounding, or there is nothing to add up.
    assert 0.5 < worst <= bound + 0.5
    # And it is no bound that anything keeps: a sixteenth of the codes.
    assert bound < 16


@pytest.mark.parametrize("name", ["SOFTMAX", "RSQRT"])
def test_what_has_no_slope_that_is_known_has_no_bound(tmp_path: Path, name: str) -> None:
    """1/√x is as steep as one likes, and a softmax's neighbours move it."""

    class Steep(Chain):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            z = x + y
            return torch.rsqrt(z.abs() + 1) if name == "RSQRT" else torch.softmax(z, 1)

    quantized = Edgeq(directory=tmp_path).quantize(
        seeded(Steep),
        Steep.sample_inputs(),
        quantizer="recipe_static_wi8_ai8",
        calibration=samples(Steep, 4),
    )
    ops = quantized.graph.subgraphs[0].ops
    last = next(op.index for op in ops if op.name == name)
    assert group_bound(quantized.graph, ops[: last + 1]) is None
