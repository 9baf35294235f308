"""Masks in front of a softmax: those that a range cuts, and those that mask."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fixtures.models import SmallModel, normal, seeded
from pytest_edgeq import Edgeq
from pytest_edgeq.localize.rows import LOWERING
from tests.bench.detection.flatfile import FlatFile
from tests.localize.builds import PT2E, STATIC, Build, blamed, localized
from tests.localize.rows import culprit

pytestmark = pytest.mark.slow


class Filled(SmallModel):
    """An attention whose scores are capped, and filled in where tokens are later ones."""

    later: torch.Tensor
    lows: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values = nn.Linear(6, 6), nn.Linear(6, 6)
        later = torch.ones(8, 8).triu(1).bool()
        self.register_buffer("later", later)
        self.register_buffer("lows", torch.zeros(8, 8).masked_fill(later, -30.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give as many tokens."""
        scores = 3 * torch.tanh(x @ self.keys(x).transpose(1, 2))
        mixed: torch.Tensor = self.masked(scores).softmax(-1) @ self.values(x)
        return mixed

    def masked(self, scores: torch.Tensor) -> torch.Tensor:
        """Leave the later ones out."""
        return scores.masked_fill(self.later, -30.0)

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Eight tokens."""
        return (normal(2, 8, 6, seed=seed),)


class Added(Filled):
    """By a sum."""

    def masked(self, scores: torch.Tensor) -> torch.Tensor:
        """Leave the later ones out."""
        return scores + self.lows


class Deep(Filled):
    """By a sum with far more than it takes."""

    def masked(self, scores: torch.Tensor) -> torch.Tensor:
        """Leave the later ones out."""
        return scores + self.lows * (1e9 / 30)


class Floored(Filled):
    """By a sum that is held above the least number there is, as XGLM does."""

    def masked(self, scores: torch.Tensor) -> torch.Tensor:
        """Leave the later ones out."""
        least = torch.finfo(torch.float32).min
        later = torch.arange(8)[:, None] < torch.arange(8)
        lows = torch.where(later, torch.full((), least), torch.zeros(()))
        return torch.max(scores + lows, torch.tensor(least))


class Wide(Filled):
    """By far more than scores reach, which reach far below 0 themselves."""

    def masked(self, scores: torch.Tensor) -> torch.Tensor:
        """Leave the later ones out."""
        return (4 * scores - 13).masked_fill(self.later, -1e4)


class Sloped(Filled):
    """Beside a slope that PT2E computes when the file runs, and a float file holds."""

    def masked(self, scores: torch.Tensor) -> torch.Tensor:
        """Leave the later ones out."""
        slope = torch.arange(-7, 1) * (1 / torch.pow(2, torch.arange(1, 2) * 1.0))
        return (scores + slope).masked_fill(self.later, -30.0)


@pytest.mark.parametrize(
    ("kind", "flow"),
    [(Added, PT2E), *((kind, flow) for kind in (Filled, Added) for flow in (STATIC, None))],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_mask_that_masks_is_not_blamed(
    maker: Edgeq, build: Build, kind: type[Filled], flow: str | None
) -> None:
    """A range that reaches it leaves nothing of what is masked."""
    errors = localized(maker, build(kind, flow), kind)

    assert [row.name for row in errors.rows if not row.matched] == [], errors
    assert blamed(errors) == {}


@pytest.mark.parametrize("kind", [Filled, Sloped])
def test_a_mask_that_shares_the_range_of_the_scores_is_found(
    maker: Edgeq, build: Build, kind: type[Filled]
) -> None:
    """PT2E gives what is filled in the observer of the scores: −30 is −3, and later tokens leak."""
    errors = localized(maker, build(kind, PT2E), kind)

    assert culprit(errors).op == "SELECT_V2"
    assert culprit(errors).verdict == LOWERING
    assert culprit(errors).local_lsb_error == 0
    at = "−6." if kind is Sloped else "−3.0"
    assert f"the mask is lost: −30 in torch is {at}" in errors.cause
    assert "add a mask of −30 to the scores" in errors.cause


def test_a_mask_behind_which_scores_are_clamped_is_found(maker: Edgeq, build: Build) -> None:
    """The recipe makes 0 of the mask, and the clamp stands between it and the softmax."""
    errors = localized(maker, build(Floored, STATIC), Floored)

    assert culprit(errors).verdict == LOWERING
    assert "the mask is lost: −3.4e+38 (or −inf) in torch is " in errors.cause
    assert errors.cause.endswith(
        "mask with −30, of which a softmax makes 1e-13, or leave that op in float"
    )


@pytest.mark.parametrize("flow", [PT2E, STATIC])
def test_a_mask_that_takes_the_range_is_found(maker: Edgeq, build: Build, flow: str) -> None:
    """All scores are one step of −1e9: each token looks at all before it alike."""
    errors = localized(maker, build(Deep, flow), Deep)

    assert (culprit(errors).op, culprit(errors).verdict) == ("ADD", LOWERING)
    assert "the mask's −1e+09 takes the range: a step is 3.9" in errors.cause


def test_a_mask_that_masks_though_it_is_cut_is_not_blamed(maker: Edgeq, build: Build) -> None:
    """Of −10 000 the scores' range keeps −25, which leaves nothing of a token either."""
    errors = localized(maker, build(Wide, PT2E), Wide)

    assert blamed(errors) == {}
    assert errors.culprit is None, errors


def test_a_mask_whose_scale_is_another_is_found(maker: Edgeq, build: Build) -> None:
    """A tenth of −30 masks nothing."""
    file = FlatFile(build(Added, STATIC).tflite)
    ((op, mask),) = (
        (op, int(tensor))
        for op in range(len(file.operators))
        for tensor in file.operators[op].inputs
        if file.name(op) == "ADD" and file.constant(int(tensor)) is not None
    )
    scales = np.array(file.scales(mask), np.float32) * np.float32(0.1)
    file.tensor(mask).quantization.scale = scales
    loaded = maker.load(file.content(), reference=seeded(Added))

    errors = localized(maker, loaded, Added)

    assert culprit(errors).index == op
    assert "the mask is lost: " in errors.cause
