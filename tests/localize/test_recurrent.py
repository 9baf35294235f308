"""Recurrent layers and cells as the converter has them, step by step, and defects of these."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fixtures.models import LstmNet, SmallModel, normal, samples, seeded
from pytest_edgeq import Edgeq
from tests.detection.flatfile import FlatFile
from tests.localize.builds import PT2E, STATIC, Build, blamed, localized
from tests.localize.edits import Defect, halved_row, localized_with, moved_bias, ops_of

pytestmark = pytest.mark.slow

DYNAMIC, WIDE = "recipe_dynamic_wi8_afp32", "recipe_static_wi8_ai16"


class Scanned(SmallModel):
    """A recurrence that begins with the number 0, of which no op is left."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.given, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give scores a step."""
        decay, given = torch.sigmoid(self.decay(x)), self.given(x)
        state, states = 0, []
        for step in range(3):
            state = decay[:, step] * state + given[:, step]
            states.append(state * decay[:, step])
        scores: torch.Tensor = self.head(torch.stack(states, 1))
        return scores

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Three steps."""
        return (normal(1, 3, 8, seed=seed),)


class LastStep(SmallModel):
    """A recurrence over the first axis, of which the last step goes on, and its state."""

    step = -1

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.head = nn.LSTM(5, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Give scores and states."""
        found, (state, cell) = self.steps(x)
        return self.head(torch.relu(found[self.step])), state, cell

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Three steps."""
        return (normal(3, 1, 5, seed=seed),)


class Stepped(SmallModel):
    """One step of a recurrence, whose input comes from a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.cell = nn.Linear(8, 8), nn.LSTMCell(8, 8)

    def forward(
        self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Give the state behind it."""
        state: tuple[torch.Tensor, torch.Tensor] = self.cell(self.project(x), (h, c))
        return state

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Features and a state."""
        return tuple(normal(1, 8, seed=seed + 1000 * place) for place in range(3))


class Gated(SmallModel):
    """The same of another recurrence."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.cell = nn.Linear(8, 8), nn.GRUCell(8, 8)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        """Give the state behind it."""
        state: torch.Tensor = self.cell(self.project(x), h)
        return state

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Features and a state."""
        return normal(1, 8, seed=seed), normal(1, 8, seed=seed + 1000)


class Fed(SmallModel):
    """Cells behind layers, whose biases go into theirs but for the first use."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.back = nn.Linear(8, 6), nn.Linear(4, 6)
        self.long, self.gated = nn.LSTMCell(6, 4), nn.GRUCell(6, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Give the states of two recurrences, of two steps each."""
        state, cell = x.new_zeros(1, 4), x.new_zeros(1, 4)
        other = self.gated(x[:, 0, :6], x.new_zeros(1, 4))
        for step in range(2):
            state, cell = self.long(self.lift(x[:, step]), (state, cell))
        return state, self.gated(self.back(other), other)

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Two steps."""
        return (normal(1, 2, 8, seed=seed),)


class Projected(SmallModel):
    """Each state is projected: the converter joins them first, and makes one product of all."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.LSTM(8, 6, proj_size=4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give the last state."""
        states: torch.Tensor = self.steps(x)[0]
        return states[:, -1]

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Three steps."""
        return (normal(1, 3, 8, seed=seed),)


@pytest.mark.parametrize(
    ("kind", "flow"),
    [
        *((Scanned, flow) for flow in (STATIC, DYNAMIC, PT2E)),
        *((LastStep, flow) for flow in (STATIC, DYNAMIC, PT2E, None)),
        *((Stepped, flow) for flow in (STATIC, DYNAMIC, None)),
        *((Gated, flow) for flow in (STATIC, None)),
        *((Fed, flow) for flow in (STATIC, DYNAMIC, None)),
        *((Projected, flow) for flow in (STATIC, DYNAMIC, None)),
        (LstmNet, WIDE),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_every_step_is_matched_and_not_blamed(
    maker: Edgeq, build: Build, kind: type[SmallModel], flow: str | None
) -> None:
    """Every op is measured, and none computes anything else."""
    errors = localized(maker, build(kind, flow), kind)

    assert [row.name for row in errors.rows if not row.matched] == []
    assert blamed(errors) == {}


def _clamped(file: FlatFile) -> int:
    """The first sum of the recurrence, which is that of its second step."""
    op = ops_of(file, "ADD")[0]
    file.operators[op].builtinOptions.fusedActivationFunction = 1
    return op


def _an_earlier_step(file: FlatFile) -> int:
    """What the last layer's clamp takes is what the second step gives."""
    op = ops_of(file, "RELU")[-1]
    own = file.producer(file.operators[op].inputs[0])
    others = [i for i in ops_of(file, "MUL") if own is not None and i < own]
    taken = file.operators[others[-3]].outputs[0]
    file.operators[op].inputs = [taken]
    return op


def _sigmoid_of_the_first_state(file: FlatFile) -> int:
    op, other = ops_of(file, "TANH")[1], ops_of(file, "LOGISTIC")[0]
    file.operators[op].opcodeIndex = file.operators[other].opcodeIndex
    return op


def _joined_in_another_order(file: FlatFile) -> int:
    """Of the states that are projected together."""
    (op,) = ops_of(file, "CONCATENATION")
    file.operators[op].inputs = file.operators[op].inputs[::-1]
    return op


DEFECTS: dict[str, Defect] = {
    "a state that is clamped": (Scanned, STATIC, _clamped),
    "a step in front of the last one": (LastStep, None, _an_earlier_step),
    "a cell's bias with the layer's in it": (Stepped, STATIC, moved_bias(2)),
    "a weight in front of a cell": (Stepped, None, halved_row(0)),
    "a weight of a cell": (Stepped, DYNAMIC, halved_row(2)),
    "a weight in front of cells": (Fed, STATIC, halved_row(1)),
    "the bias of a cell's last step": (Fed, None, moved_bias(47)),
    "states in another order": (Projected, None, _joined_in_another_order),
    "another function of a first state": (LstmNet, WIDE, _sigmoid_of_the_first_state),
}


@pytest.mark.parametrize("what", DEFECTS)
def test_a_defect_of_a_step_is_found(maker: Edgeq, build: Build, what: str) -> None:
    """What a sound file is allowed hides none that is not."""
    op, errors = localized_with(maker, build, DEFECTS[what])

    assert op in blamed(errors), errors


@pytest.mark.parametrize("flow", [STATIC, DYNAMIC, None])
def test_another_step_than_the_file_takes_is_found(
    maker: Edgeq, build: Build, flow: str | None
) -> None:
    """At what takes it: torch's is the last but one."""
    other = seeded(LastStep)
    other.step = -2
    loaded = maker.load(build(LastStep, flow).tflite, reference=other)

    errors = maker.localize(loaded, list(samples(LastStep, 4, seed=2)))

    assert errors.culprit is not None, errors
    assert errors.culprit.op in ("RELU", "MUL", "FULLY_CONNECTED"), errors
    assert errors.culprit.verdict == "lowering", errors
