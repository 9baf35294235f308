"""Values of the reference beyond the file's scales: a defect, or what a quantizer does."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from fixtures.models import SmallModel, integers, normal, samples, seeded, small_model
from pytest_edgeq import Edgeq
from pytest_edgeq.localize.constant_checks import check_stored_weight, cover_all_values
from pytest_edgeq.tflite.constants import Constant, read_constant
from pytest_edgeq.tflite.roles import roles_of
from tests.localize.builds import DYNAMIC, PT2E, STATIC, Build, blamed, rounded
from tests.quantize.rules import weight_only

Array: TypeAlias = npt.NDArray[Any]


class Tabled(SmallModel):
    """Rows of a table, a constant that is added, and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 12)
        self.shift = nn.Parameter(normal(5, 12, seed=3))
        self.wide, self.head = nn.Linear(12, 288), nn.Linear(288, 24)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Give scores a token."""
        x = self.table(ids) + self.shift
        scores: torch.Tensor = self.head(torch.relu(self.wide(x)))
        return scores

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Five tokens."""
        return (integers(1, 5, below=11, seed=seed),)


def _larger(kind: type[SmallModel], name: str, by: float) -> SmallModel:
    """The model with the largest value of one parameter made larger."""
    model = seeded(kind)
    values = model.get_parameter(name).data.view(-1)
    values[int(values.abs().argmax())] *= by
    return model


@pytest.mark.sweep(0)
@pytest.mark.parametrize("flow", [STATIC, PT2E, DYNAMIC])
def test_values_beyond_their_scale_are_told(maker: Edgeq, build: Build, flow: str) -> None:
    """Scales of all values hold the largest, too, be it of a layer, a table or what is added."""
    file, inputs = build(Tabled, flow).tflite, list(samples(Tabled, 3, seed=2))
    sound = maker.localize(maker.load(file, reference=seeded(Tabled)), inputs)
    assert blamed(sound) == {}

    for name in ("table", "head"):
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


def test_what_a_quantizer_cuts_off_on_purpose_is_sound(maker: Edgeq) -> None:
    """One that minimises an error leaves the largest weights beyond its scales."""
    model = seeded(Tabled)
    with torch.no_grad():
        model.head.weight[:, ::96] *= 6
    rules = [weight_only(".*", "FULLY_CONNECTED", bits=4, algorithm="OCTAV")]
    quantized = maker.quantize(model, Tabled.sample_inputs(), quantizer=rules)
    op = [op for op in quantized.graph.ops if op.name == "FULLY_CONNECTED"][-1]
    (stored,) = roles_of(quantized.graph, op).weights
    scales = read_constant(quantized.graph, op, stored).scales
    assert scales is not None
    assert (np.abs(model.head.weight.detach().numpy()) / scales > 8).any()

    errors = maker.localize(quantized, list(samples(Tabled, 2, seed=2)))

    assert blamed(errors) == {}


WEIGHT = np.random.default_rng(0).normal(size=(6, 64))
LEAST = np.abs(WEIGHT).max(axis=1, keepdims=True) / 127
BLOCKS = np.repeat(np.abs(WEIGHT.reshape(6, 2, 32)).max(axis=2) / 7, 32, axis=1)
BLOCKS = torch.from_numpy(BLOCKS).to(torch.bfloat16).to(torch.float64).numpy()


@pytest.mark.parametrize(
    ("scales", "grouping", "place", "steps", "last"),
    [(LEAST, "per_channel", (4, 9), 140.2, 127), (BLOCKS, "blockwise_32", (2, 40), 9, 7)],
)
def test_scales_that_hold_all_values_are_told_by_those_beside_them(
    scales: Array, grouping: str, place: tuple[int, int], steps: float, last: int
) -> None:
    """One channel, or one block, has a value beyond its scale, and all others have theirs."""
    changed = WEIGHT.copy()
    changed[place] = steps * np.broadcast_to(scales, WEIGHT.shape)[place]
    stored = rounded(changed, scales, grouping, last=last)
    told = (
        f"the weight's codes: 1 of 384 lies beyond what its scale reaches: {list(place)} is {last} "
        f"where the reference has {steps}"
    )
    assert check_stored_weight("FULLY_CONNECTED", stored, changed, kept=lambda: False) == (told,)
    # An operand's scale may be another tensor's.
    assert check_stored_weight("FULLY_CONNECTED", stored, changed) == ()


def test_scales_that_all_cut_values_off() -> None:
    """That is the quantizer's way, if not all others of the file hold theirs, or at little cost."""
    narrow, nearly = (rounded(WEIGHT, LEAST * by) for by in (0.9, 0.99))
    assert check_stored_weight("FULLY_CONNECTED", narrow, WEIGHT, kept=lambda: False) == ()
    assert check_stored_weight("FULLY_CONNECTED", nearly, WEIGHT, kept=lambda: True) == ()
    (found,) = check_stored_weight("FULLY_CONNECTED", narrow, WEIGHT, kept=lambda: True)
    assert "lie beyond what their scale reaches: " in found
    # What is cut off has the last code, and no other.
    narrow.values[tuple(np.argwhere(narrow.values == 127)[0])] = 126
    (found,) = check_stored_weight("FULLY_CONNECTED", narrow, WEIGHT, kept=lambda: False)
    assert found.endswith(" is 126 where the reference has 127")


def test_a_file_whose_scales_hold_all_values() -> None:
    """Told by most of them, symmetric or not; none is told of what a minimum of errors chose."""
    span = np.full((1, 1), WEIGHT.max() - WEIGHT.min()) / 255
    point = np.rint(-128 - WEIGHT.min() / span).astype(np.int64)
    codes = np.clip(np.rint(WEIGHT / span) + point, -128, 127).astype(np.int64)
    uneven = Constant("int8", codes, span, point, "per_tensor")
    even, narrow = (rounded(WEIGHT, LEAST * by) for by in (1, 0.97))
    assert cover_all_values([(even, WEIGHT)])
    assert cover_all_values([(uneven, WEIGHT)])
    assert cover_all_values([(narrow, WEIGHT), (even, WEIGHT), (uneven, WEIGHT)])
    assert not cover_all_values([(narrow, WEIGHT), (uneven, WEIGHT)])
    assert not cover_all_values([])


@small_model((1, 8, 8), layers=lambda: {"bands": nn.Linear(8, 12), "head": nn.Linear(12, 3)})
def _log_power(m: Any, x: torch.Tensor) -> Any:
    """Features of audio: the logarithm of a power, in which a step of the range is more than 1."""
    return m.head(torch.log(1000 * m.bands(x) ** 2 + 1))


def test_a_logarithm_of_what_rounding_made_0_is_told(maker: Edgeq, build: Build) -> None:
    """Not what reads the −∞: the kernel that makes a code of it, or the quantizer's range."""
    with pytest.raises(AssertionError, match=r"^LOG #") as caught:
        maker.check(build(_log_power, STATIC), list(samples(_log_power, 3, seed=2)))
    text = str(caught.value)
    assert " output values are NaN or infinite; the first op that has any" in text
    assert "torch has none there" in text
    assert "wrote this" not in text, "it is the quantizer's rounding"
    assert "[2]" not in text, "the codes of what is infinite are no further findings"
