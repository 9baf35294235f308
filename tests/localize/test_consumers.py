"""Ranges that are not those of the values, but of what is taken with them behind."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from ai_edge_litert import schema_py_generated as schema
from torch import nn

from fixtures.models import SmallModel, SqueezeExcite, normal, samples, seeded, small_model
from fixtures.tflite.writer import chain, constant
from pytest_edgeq import Edgeq, QuantizedModel
from pytest_edgeq.localize.rows import LOWERING, QUANTIZATION
from tests.localize.builds import PT2E, STATIC, Build, localized
from tests.localize.rows import culprit


@small_model(
    (2, 8, 6),
    layers=lambda: {
        "keys": nn.Linear(6, 6),
        "values": nn.Linear(6, 6),
        "later": torch.ones(8, 8).triu(1).bool(),
    },
)
def _masked(m: Any, x: torch.Tensor) -> Any:
    """An attention that fills in a mask of −10 000."""
    scores = x @ m.keys(x).transpose(1, 2)
    return scores.masked_fill(m.later, -1e4).softmax(-1) @ m.values(x)


def _large() -> nn.Conv2d:
    convolution = nn.Conv2d(3, 3, 1)
    convolution.weight.data = 50 * normal(3, 3, 1, 1, seed=8)
    return convolution


@small_model(
    (1, 3, 6, 6),
    layers=lambda: {"large": _large(), "small": nn.Conv2d(3, 3, 1), "last": nn.Conv2d(6, 3, 1)},
)
def _joined(m: Any, x: torch.Tensor) -> Any:
    """Two branches, one of which is far larger, side by side."""
    return m.last(torch.cat([m.large(x), m.small(x)], 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "flow", "text"),
    [
        (_masked, STATIC, "mask with −30, which a softmax maps to 1e-13"),
        (_joined, PT2E, "has one scale for all of its operands; scale the operand"),
    ],
    ids=["mask", "join"],
)
def test_who_has_widened_a_range_is_told(
    maker: Edgeq, build: Build, kind: type[SmallModel], flow: str, text: str
) -> None:
    """No calibration can help."""
    errors = localized(maker, build(kind, flow), kind)

    assert [row.name for row in errors.rows if row.verdict == LOWERING] == []
    assert culprit(errors).verdict == QUANTIZATION
    assert " levels are used" in errors.cause
    assert text in errors.cause


@small_model(
    (1, 4, 8),
    layers=lambda: {"last": nn.Linear(6, 3), "below": torch.tensor([4, 8, 9, 12, 13, 14])},
)
def _products(m: Any, x: torch.Tensor) -> Any:
    """_products of different tokens, without the far larger squares."""
    return m.last((x @ x.mT).flatten(1).index_select(1, m.below))


@pytest.mark.slow
def test_a_range_that_a_mean_shares_is_not_the_means(maker: Edgeq) -> None:
    """Near miss: the values of the layer fill it, and more samples widen it."""
    model, image = seeded(SqueezeExcite), SqueezeExcite.sample_inputs()
    quantized = maker.quantize(model, image, calibration=samples(SqueezeExcite, 4, seed=1))
    worst = maker.compare(quantized, samples(SqueezeExcite, 48, seed=900)).worst_samples
    errors = maker.localize(quantized, [each.inputs.args for each in worst])

    assert culprit(errors).op == "CONV_2D", errors
    assert "is too narrow: " in errors.cause
    assert "calibration cannot widen it" not in errors.cause


@small_model((1, 16), layers=lambda: {"linear": nn.Linear(16, 8)})
def _bent(m: Any, x: torch.Tensor) -> Any:
    """An activation with another slope below a threshold."""
    y = m.linear(x)
    return torch.where(y > 0.1, y, 3 * y - 1)


@pytest.mark.slow
def test_a_scale_that_the_converter_took_from_another_operand_is_told(
    maker: Edgeq, build: Build
) -> None:
    """Both operands of a SELECT share a scale, whose range fits the values of the layer alone."""
    errors = maker.localize(build(_bent, PT2E), samples(_bent, 8, seed=2))

    assert culprit(errors).op == "SUB", errors
    assert "is too narrow: " in errors.cause
    told = r"its scale is that of FULLY_CONNECTED #0.*, another operand of SELECT\w* #\d.*; "
    assert re.search(
        f"{told}calibration cannot widen it; leave FULLY_CONNECTED #0 in", errors.cause
    )
    helped, hurt = (
        maker.compare(build(_bent, flow), samples(_bent, 8, seed=2)).total.sqnr_db
        for flow in (STATIC, PT2E)
    )
    assert helped > hurt + 6


@pytest.mark.slow
def test_what_is_cut_and_never_chosen_is_no_loss(maker: Edgeq, build: Build) -> None:
    """The range is that of the products that an index chooses."""
    errors = localized(maker, build(_products, PT2E), _products)

    assert any((row.clipped or 0) > 0.1 for row in errors.rows), errors
    assert errors.culprit is None, errors


def _observed_before_relu6(reach: float) -> QuantizedModel:
    """Load a FULLY_CONNECTED with a fused RELU6 and one row of large weights."""
    weights = normal(8, 16, seed=3).numpy().astype(np.float32)
    weights[5] *= 60
    scales = np.abs(weights).max(axis=1) / 127
    relu6 = {"fusedActivationFunction": schema.ActivationFunctionType.RELU6}
    content = chain(
        ("FULLY_CONNECTED", "taken stored -", "given", "FullyConnectedOptions", relu6),
        inputs="taken",
        outputs="given",
        key="run",
        taken={"dtype": "int8", "shape": (1, 16), "scales": [4 / 127]},
        stored=constant(np.round(weights / scales[:, None]), "int8", scales=scales.tolist()),
        given={"dtype": "int8", "shape": (1, 8), "scales": [reach / 127]},
    )

    def model(x: object) -> np.ndarray:
        clamped: np.ndarray = np.clip(np.asarray(x, np.float32) @ weights.T, 0, 6)
        return clamped

    return Edgeq().load(content, reference=model, name="clamped")


def test_a_range_that_was_observed_before_a_fused_activation_is_named() -> None:
    """No outlier of the calibration: the activation cuts off what the range holds."""
    inputs = [normal(1, 16, seed=i).numpy() for i in range(40)]
    cause = Edgeq().localize(_observed_before_relu6(346.0), inputs).cause

    assert "the fused RELU6 of FULLY_CONNECTED #0 clamps to [0, 6], so its range was obs" in cause
    assert "channel 5 has " in cause
    assert "observe the output of RELU6" in cause
    assert "outlier" not in cause
    assert "observed before" not in Edgeq().localize(_observed_before_relu6(6.0), inputs).cause
