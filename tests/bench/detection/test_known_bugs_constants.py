"""Real bugs of today's stack in constants, and in sums with them: what catches each."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fixtures.models import normal, seeded
from pytest_edgeq import Edgeq
from pytest_edgeq.tflite.graph import OpGraph
from tests.bench.detection.known_bugs import (
    Still,
    by_pt2e,
    by_recipe,
    converted,
    db,
    gate,
    interpret,
    normals,
)

# Several conversions a test.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


class _Shares(nn.Module):
    """Tokens are mixed by shares that come of two parameters, as of learned queries."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(normal(2, 4, 8, seed=1))
        self.keys = nn.Parameter(normal(2, 8, 4, seed=2))
        self.values = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Mix them."""
        mixed: Tensor = torch.softmax(self.queries @ self.keys, -1) @ self.values(x)
        return mixed


@pytest.mark.known_bug("ai-edge-quantizer 0.10.0", then="the finding on its op may stay")
def test_a_product_of_two_constants_is_read_as_floats(maker: Edgeq, still: Still) -> None:
    """Both become codes, and the op gives floats: no kernel knows that, and none refuses it."""
    model, (sample, *others) = seeded(_Shares), normals(17, 2, 4, 8, seed=1)
    tflite = by_recipe(converted(model, sample), "dynamic_wi8_afp32")
    (actual,) = interpret(tflite).get_signature_runner()(args_0=sample[0].numpy()).values()
    still(not np.isfinite(actual).all())

    files = [
        maker.quantize(model, sample, quantizer=quantizer)
        for quantizer in ("recipe_dynamic_wi8_afp32", None)
    ]
    told = gate(maker, files[0], others)
    assert told.startswith("BATCH_MATMUL #0: ")
    first, cause = told.splitlines()[:2]
    assert "its dtypes are input int8, weight int8, its output float32" in first
    assert cause.startswith("cause: no kernel has them together")
    assert not gate(maker, files[1], others)


class _Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Turn, then subtract."""
        y: Tensor = 1 - self.layer(x).transpose(1, 2)
        return y


class _TurnedBehind(_Turned):
    def forward(self, x: Tensor) -> Tensor:
        """Subtract, then turn."""
        y: Tensor = (1 - self.layer(x)).transpose(1, 2)
        return y


@pytest.mark.known_bug("litert-torch 0.10.0", then="the sentence on exchanged operands goes")
def test_a_difference_in_front_of_which_values_move_is_negated(maker: Edgeq, still: Still) -> None:
    """`1 − x`, with x turned in front, becomes `x − 1`, turned: in float already."""
    sample, *others = normals(17, 1, 4, 8, seed=1)
    model = seeded(_Turned)
    run = interpret(converted(model, sample)).get_signature_runner()
    (actual,) = run(args_0=sample[0].numpy()).values()
    still(db(model(*sample).detach().numpy(), -actual) > 100)

    files = [
        maker.quantize(seeded(kind), sample, quantizer=None) for kind in (_Turned, _TurnedBehind)
    ]
    told = gate(maker, files[0], others)
    first, cause = told.splitlines()[:2]
    assert first.startswith("SUB #1: its result is −1 × that of torch")
    assert cause.startswith("cause: its operands are exchanged")
    assert not gate(maker, files[1], others)


class _Reciprocal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Give features of what is one through a sum."""
        y: Tensor = self.second(1 / (torch.relu(self.first(x)) + 0.5))
        return y


class _Known(_Reciprocal):
    """The same of a sum that is not one of a convolution with a number."""

    def forward(self, x: Tensor) -> Tensor:
        """Give the same."""
        y: Tensor = self.second(1 / (torch.relu(self.first(x)).square().sqrt() + 0.5))
        return y


@pytest.mark.known_bug("litert-torch 0.10.0", then="nothing of ours names it")
def test_a_reciprocal_behind_a_convolution_is_dropped(maker: Edgeq, still: Still) -> None:
    """Of `1 / (conv(x) + c)` no DIV is left, in float already."""
    sample, *others = normals(17, 1, 3, 4, 4, seed=1)
    tflite = converted(seeded(_Reciprocal), sample)
    still(all(op.name != "DIV" for op in OpGraph.read(tflite).subgraphs[0].ops))

    files = [maker.quantize(seeded(kind), sample, quantizer=None) for kind in (_Reciprocal, _Known)]
    told = gate(maker, files[0], others)
    assert told.startswith("CONV_2D #2 (second): the file in float does not compute what torch")
    assert not gate(maker, files[1], others)


class _Prior(nn.Module):
    """A gate that is shut at first: its bias is one number."""

    spread = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 16)
        with torch.no_grad():
            self.gate.bias.copy_(torch.linspace(-1 - self.spread, -1, 16))

    def forward(self, x: Tensor) -> Tensor:
        """Give how far it is open."""
        return torch.sigmoid(self.gate(x))


class _Spread(_Prior):
    spread = 0.01


@pytest.mark.known_bug("litert-torch 0.10.0", then="nothing of ours names it")
def test_a_bias_of_one_number_has_the_codes_of_one_channel(maker: Edgeq, still: Still) -> None:
    """Its scales are those of the channels, and its codes are all made by that of the first."""
    calibration, others = normals(16, 1, 8, seed=1), normals(16, 1, 8, seed=2)
    _, tflite = by_pt2e(seeded(_Prior), calibration, dynamic=False, strict=True)
    graph = OpGraph.read(tflite)
    (op,) = (op for op in graph.subgraphs[0].ops if op.name == "FULLY_CONNECTED")
    bias = graph.tensor(op, op.inputs[2])
    codes = graph.constant(bias).view("<i4")
    still(len(set(codes.tolist())) == 1 and len(set(bias.scales.tolist())) > 1)

    files = [
        maker.quantize(
            seeded(kind), calibration[0], quantizer="pt2e_static_int8", calibration=calibration
        )
        for kind in (_Prior, _Spread)
    ]
    told = gate(maker, files[0], others)
    assert told.startswith("FULLY_CONNECTED #0 (gate): the bias's codes: 15 of 16 differ")
    assert not gate(maker, files[1], others)
