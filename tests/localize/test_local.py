"""Tensors that only hold others in another way are not measured anew, unless they differ."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fixtures.models import normal
from pytest_edgeq import Edgeq, QuantizedModel
from pytest_edgeq.localize.localizer import Localizer
from pytest_edgeq.localize.rows import LayerErrors
from pytest_edgeq.samples import read_samples

PRESETS = ["pt2e_static_int8", "recipe_static_wi8_ai8", "recipe_dynamic_wi8_afp32"]


@pytest.fixture(scope="module", params=PRESETS)
def quantized(request: pytest.FixtureRequest, tmp_path_factory: Any) -> QuantizedModel:
    """Convolutions whose channels are turned to the front and flattened, in many small steps."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 24, 3), nn.ReLU6(), nn.Conv2d(24, 8, 3), nn.Flatten(), nn.Linear(1152, 10)
    ).eval()
    maker = Edgeq(directory=tmp_path_factory.mktemp("local"))
    calibration = (normal(1, 3, 16, 16, seed=seed) for seed in range(8))
    return maker.quantize(
        model, (normal(1, 3, 16, 16, seed=0),), quantizer=request.param, calibration=calibration
    )


def _localized(quantized: QuantizedModel, *, hand_on: bool, swapped: bool = False) -> LayerErrors:
    given = [normal(1, 3, 16, 16, seed=seed) for seed in range(100, 103)]
    # The interpreter is the file's, and serves the next one, too.
    with Localizer(quantized) as localizer, pytest.MonkeyPatch.context() as patch:
        first, *rest = read_samples(given, quantized.spec, "evaluation")
        localizer.update(first)
        (plan,) = localizer._plans.values()
        steps = [step for step in plan.steps if step.handed_on is not None and step.sources[0].op]
        assert steps, "some op of the file only holds its input in another way"
        if not hand_on:
            for step in plan.steps:
                step.handed_on = None
        if swapped:
            _swap(patch, localizer, steps[0].match.tensor)
        for sample in rest:
            localizer.update(sample)
    return localizer.result()


def _swap(patch: pytest.MonkeyPatch, localizer: Localizer, index: int) -> None:
    """Let kernels give one tensor with its least and its greatest value exchanged."""
    true = localizer._runner.tensor

    def tensor(asked: int) -> np.ndarray[Any, Any]:
        value = true(asked)
        if asked == index:
            places = [int(value.argmin()), int(value.argmax())]
            value.flat[places] = value.flat[places[::-1]]
        return value

    patch.setattr(localizer._runner, "tensor", tensor)


def test_what_is_handed_on_is_what_would_be_measured(quantized: QuantizedModel) -> None:
    """Every number of every row, up to what float32 rounds."""
    handed, measured = (_localized(quantized, hand_on=each) for each in (True, False))

    assert handed.cause == measured.cause
    for one, other in zip(handed.rows, measured.rows, strict=True):
        ours, theirs = one.to_dict(), other.to_dict()
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            expected = theirs[name]
            if isinstance(value, float) and isinstance(expected, float):
                # Codes that are equal are off by nothing; as floats by 256 roundings of 2^−24.
                expected = pytest.approx(expected, rel=1e-6, abs=2e-5)
            assert value == expected, (name, ours, theirs)


def test_what_differs_in_one_element_is_not_handed_on(quantized: QuantizedModel) -> None:
    """It is measured, and named."""
    sound = _localized(quantized, hand_on=True)
    assert sound.culprit is None
    wrong = _localized(quantized, hand_on=True, swapped=True)

    assert wrong.culprit is not None
    assert wrong.culprit.verdict == "lowering"
    assert wrong.culprit.op in ("TRANSPOSE", "RESHAPE")
    assert (wrong.culprit.excess_lsb or 0) > 0
