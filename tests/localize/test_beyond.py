"""Values of the reference beyond the file's scales: a defect, or what a quantizer does."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from fixtures.models import SmallModel, integers, normal, samples, seeded
from pytest_edgeq import Edgeq
from pytest_edgeq.localize.constants import check_weight, hold_all
from pytest_edgeq.tflite.constants import Constant, read_constant
from pytest_edgeq.tflite.roles import roles_of
from tests.localize.builds import PT2E, STATIC, Build, blamed

Array: TypeAlias = npt.NDArray[Any]

DYNAMIC = "recipe_dynamic_wi8_afp32"


class Tabled(SmallModel):
    """Rows of a table, a constant that is added, and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 12)
        self.shift = nn.Parameter(normal(5, 12, seed=3))
        self.wide, self.head = nn.Linear(12, 24), nn.Linear(24, 6)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Give scores a token."""
        x = self.table(ids) + self.shift
        scores: torch.Tensor = self.head(torch.relu(self.wide(x)))
        return scores

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Five tokens."""
        return (integers(1, 5, below=11, seed=seed),)


class Heavy(SmallModel):
    """Weights of which some are far larger than the others."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.head = nn.Linear(288, 24), nn.Linear(24, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give scores."""
        scores: torch.Tensor = self.head(torch.relu(self.wide(x)))
        return scores

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Features."""
        return (normal(2, 288, seed=seed),)


def _larger(kind: type[SmallModel], name: str, by: float) -> SmallModel:
    """The model with the largest value of one parameter made larger."""
    model = seeded(kind)
    values = model.get_parameter(name).data.view(-1)
    values[int(values.abs().argmax())] *= by
    return model


@pytest.mark.parametrize("flow", [STATIC, PT2E, DYNAMIC])
def test_values_beyond_their_scale_are_told(maker: Edgeq, build: Build, flow: str) -> None:
    """Scales of all values hold the largest, too, be it of a layer, a table or what is added."""
    file, inputs = build(Tabled, flow).tflite, list(samples(Tabled, 3, seed=2))
    sound = maker.localize(maker.load(file, reference=seeded(Tabled)), inputs)
    assert blamed(sound) == {}

    for name in ("table", "wide", "head"):
        model = _larger(Tabled, f"{name}.weight", 1.1)
        errors = maker.localize(maker.load(file, reference=model), inputs)
        ((place, (_, findings)),) = blamed(errors).items()
        assert errors.rows[place].module == name
        # A table that stays in float is held to its values.
        is_float = errors.rows[place].dtypes["weight"] == "float32"
        assert ("differs" if is_float else "lies beyond what its scale reaches") in findings[0]

    errors = maker.localize(maker.load(file, reference=_larger(Tabled, "shift", 1.1)), inputs)
    # A constant operand shares a range with others: what it loses is in its op's figures.
    (now,), (before,) = ([r for r in each.rows if r.op == "ADD"] for each in (errors, sound))
    assert now.local_sqnr_db is not None
    assert before.local_sqnr_db is not None
    assert now.local_sqnr_db < before.local_sqnr_db - 1


def _four_bits(algorithm: str) -> list[dict[str, Any]]:
    weights = {"num_bits": 4, "symmetric": True, "granularity": "CHANNELWISE", "dtype": "INT"}
    return [
        {
            "regex": ".*",
            "operation": "FULLY_CONNECTED",
            "algorithm_key": algorithm,
            "op_config": {
                "weight_tensor_config": weights,
                "compute_precision": "FLOAT",
                "explicit_dequantize": True,
                "min_weight_elements": 0,
            },
        }
    ]


@pytest.mark.parametrize("algorithm", ["OCTAV", "MSE"])
def test_what_a_quantizer_cuts_off_on_purpose_is_sound(maker: Edgeq, algorithm: str) -> None:
    """One that minimises an error leaves the largest weights beyond its scales."""
    model = seeded(Heavy)
    with torch.no_grad():
        model.wide.weight[:, ::96] *= 6
    quantized = maker.quantize(model, Heavy.sample_inputs(), quantizer=_four_bits(algorithm))
    op = next(op for op in quantized.graph.ops if op.name == "FULLY_CONNECTED")
    (stored,) = roles_of(quantized.graph, op).weights
    scales = read_constant(quantized.graph, op, stored).scales
    assert scales is not None
    assert (np.abs(model.wide.weight.detach().numpy()) / scales > 8).any()

    errors = maker.localize(quantized, list(samples(Heavy, 2, seed=2)))

    assert blamed(errors) == {}


def _rounded(weight: Array, scales: Array, grouping: str, dtype: str = "int8") -> Constant:
    high = {"int8": 127, "int4": 7}[dtype]
    codes = np.clip(np.rint(weight / scales), -high, high).astype(np.int64)
    return Constant(dtype, codes, scales, np.zeros((1, 1), np.int64), grouping)


def test_scales_that_hold_all_values_are_told_by_those_beside_them() -> None:
    """One channel, or one block, has a value beyond its scale, and all others have theirs."""
    weight = np.random.default_rng(0).normal(size=(6, 64))
    least = np.abs(weight).max(axis=1, keepdims=True) / 127
    changed = weight.copy()
    changed[4, 9] = 140.2 * least[4, 0]
    stored = _rounded(changed, least, "per_channel")
    (found,) = check_weight("FULLY_CONNECTED", stored, changed, torch_op="linear")
    assert found == (
        "the weight's codes: 1 of 384 lies beyond what its scale reaches: [4, 9] is 127 where the "
        "reference gives 140.2"
    )
    # Where every scale is too small, it is the quantizer's way, if not all others' of the file.
    narrow = _rounded(weight, least * np.linspace(0.5, 0.8, 6)[:, None], "per_channel")
    assert check_weight("FULLY_CONNECTED", narrow, weight, torch_op="linear") == ()
    (found,) = check_weight("FULLY_CONNECTED", narrow, weight, torch_op="linear", kept=lambda: True)
    assert "lie beyond what their scale reaches: " in found

    blocks = np.repeat(np.abs(weight.reshape(6, 2, 32)).max(axis=2) / 7, 32, axis=1)
    changed = weight.copy()
    changed[2, 40] = 9 * blocks[2, 40]
    stored = _rounded(changed, blocks, "blockwise_32", "int4")
    (found,) = check_weight("FULLY_CONNECTED", stored, changed, torch_op="linear")
    assert "[2, 40] is 7 where the reference gives 9" in found


def test_a_file_whose_scales_hold_all_values() -> None:
    """Told by most of them, symmetric or not; none is told of what a minimum of errors chose."""
    weight = np.random.default_rng(0).normal(size=(6, 64))
    least = np.abs(weight).max(axis=1, keepdims=True) / 127
    span = np.maximum(weight.max(), 0) - np.minimum(weight.min(), 0)
    points = np.full((1, 1), int(np.rint(-128 - weight.min() / (span / 255))))
    codes = np.clip(np.rint(weight / (span / 255)) + points, -128, 127).astype(np.int64)
    uneven = Constant("int8", codes, np.full((1, 1), span / 255), points, "per_tensor")
    even, narrow = (_rounded(weight, scales, "per_channel") for scales in (least, least * 0.97))

    def holds(*constants: Constant) -> bool:
        return hold_all((each, weight) for each in constants)

    assert holds(even)
    assert holds(uneven)
    assert not holds(narrow)
    assert not holds()
