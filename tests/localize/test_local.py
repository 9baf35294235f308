"""What is not run or measured anew, and what only looks as if it need not be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fixtures.models import normal
from pytest_edgeq import Edgeq, QuantizedModel
from pytest_edgeq.localize.kernels import HybridInput
from pytest_edgeq.localize.local import Step
from pytest_edgeq.localize.localizer import Localizer
from pytest_edgeq.localize.reference import ReferenceGraph, export
from pytest_edgeq.localize.rows import LayerErrors
from pytest_edgeq.samples import read_samples

pytestmark = pytest.mark.figures

PRESETS = ["pt2e_static_int8", "recipe_static_wi8_ai8", "recipe_dynamic_wi8_afp32"]


@pytest.fixture(scope="module", params=PRESETS)
def quantized(request: pytest.FixtureRequest, tmp_path_factory: Any) -> QuantizedModel:
    """Convolutions whose channels are turned to the front and flattened, in many small steps."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 24, 3), nn.ReLU6(), nn.ZeroPad2d((2, 1, 0, 1)), nn.Conv2d(24, 8, 3)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 13 * 15, 10)).eval()
    maker = Edgeq(directory=tmp_path_factory.mktemp("local"))
    calibration = (normal(1, 3, 16, 16, seed=seed) for seed in range(8))
    return maker.quantize(
        model, (normal(1, 3, 16, 16, seed=0),), quantizer=request.param, calibration=calibration
    )


def _localized(
    quantized: QuantizedModel, *, hand_on: bool, swapped: str | None = None
) -> LayerErrors:
    given = [normal(1, 3, 16, 16, seed=seed) for seed in range(100, 103)]
    # The interpreter is the file's, and serves the next one, too.
    with Localizer(quantized) as localizer, pytest.MonkeyPatch.context() as patch:
        first, *rest = read_samples(given, quantized.spec, "evaluation")
        localizer.update(first)
        (plan,) = localizer._plans.values()
        steps = [step for step in plan.steps if step.handed_on is not None and step.sources[0].op]
        assert steps, "some op of the file only holds its input in another way"
        assert any(step.border for step in steps), "one of them pads"
        if not hand_on:
            patch.setattr(Step, "_told", lambda *_: None)
            for step in plan.steps:
                step.handed_on = None
        if swapped is not None:
            step = next(step for step in steps if bool(step.border) == (swapped == "padded"))
            _swap(patch, localizer, step.match.tensor)
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


@pytest.mark.parametrize("swapped", ["turned", "padded"])
def test_what_differs_in_one_element_is_not_handed_on(
    quantized: QuantizedModel, swapped: str
) -> None:
    """It is measured, and named."""
    sound = _localized(quantized, hand_on=True)
    # A moving average over random samples keeps less than all values: the recipe's own loss.
    assert sound.culprit is None or sound.culprit.verdict == "quantization"
    wrong = _localized(quantized, hand_on=True, swapped=swapped)

    assert wrong.culprit is not None
    assert wrong.culprit.verdict == "lowering"
    assert wrong.culprit.op in ({"PAD"} if swapped == "padded" else {"TRANSPOSE", "RESHAPE"})
    assert (wrong.culprit.excess_lsb or 0) > 0


class _Idle(nn.Module):
    """Padded by something and by nothing, with what only training drops."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Two nodes compute; the last one does not."""
        padded = functional.pad(functional.pad(x, (0, 0)), (0, 1))
        dropped: torch.Tensor = self.drop(functional.pad(torch.tanh(padded), (0, 0, 0, 0)))
        return dropped


@pytest.mark.parametrize("training", [False, True])
def test_what_gives_what_it_takes_is_not_run(training: bool) -> None:
    """Padding by nothing never, a dropout only in training."""
    x = normal(2, 3, seed=0)
    graph = ReferenceGraph(export(_Idle().train(training), (x,), {}))
    (returned,) = (node for node in graph.nodes if node.op == "output")
    (last,) = returned.all_input_nodes
    program = graph.program({last: 1})
    made = program.start([x]).take(last)

    assert len(program.calls) == (3 if training else 2)
    expected = torch.tanh(functional.pad(x, (0, 1)))
    assert torch.equal(made, expected) != training


@pytest.mark.parametrize("quantized", ["recipe_dynamic_wi8_afp32"], indirect=True)
@pytest.mark.parametrize("halves", [(), (0.5, -3.5, 2.5)])
def test_inputs_halfway_between_two_codes_are_told(
    quantized: QuantizedModel, halves: tuple[float, ...]
) -> None:
    """Each is worth a step, of 1 here; C rounds them away from zero, and ours are rounded so."""
    with Localizer(quantized) as localizer:
        given = iter([normal(1, 3, 16, 16, seed=0)])
        localizer.update(next(read_samples(given, quantized.spec, "evaluation")))
        (plan,) = localizer._plans.values()
    hybrid = next(step.hybrid for step in plan.steps if step.hybrid is not None)
    # 255 steps from end to end, more values than are looked at in one go.
    x = np.full((1, 300, 300, 3), 0.25, np.float32)
    x.flat[:2] = -128, 127
    x.flat[-1 - len(halves) : -1] = halves
    seen, found = hybrid.input.look(x)

    away = [np.sign(each) * np.ceil(abs(each)) for each in halves]
    assert seen.flat[-1 - len(halves) : -1].tolist() == away
    assert (seen.flat[:3] == [-128, 127, 0]).all()
    assert hybrid.input.ties(x, found) == len(halves)


@pytest.mark.parametrize("quantized", ["recipe_dynamic_wi8_afp32"], indirect=True)
def test_a_kernel_quantizes_whole_rows(quantized: QuantizedModel) -> None:
    """Values that are none are not what it takes, as where an op in front is wired wrongly."""
    graph = quantized.graph
    (op,) = (op for op in graph.subgraphs[0].ops if op.name == "FULLY_CONNECTED")
    hybrid = HybridInput(graph, op)
    size = graph.tensor(op, op.inputs[1]).shape[-1]

    assert all(map(hybrid.takes, [(1, size), (3, size), (size,), (1, 2, size)]))
    assert not any(map(hybrid.takes, [(), (1,), (1, size - 1), (2, size + 1)]))
