"""Masks in front of a softmax: those that a range cuts, and those that mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fixtures.models import SmallModel, seeded, small_model
from pytest_edgeq import Edgeq
from pytest_edgeq.localize.rows import LOWERING
from tests.bench.detection.flatfile import FlatFile
from tests.localize.builds import PT2E, STATIC, Build, blamed, localized
from tests.localize.rows import culprit

pytestmark = pytest.mark.slow


Mask = Callable[[Any, torch.Tensor], torch.Tensor]


_attention_model = small_model(
    (2, 8, 6),
    layers=lambda: {
        "keys": nn.Linear(6, 6),
        "values": nn.Linear(6, 6),
        "later": torch.ones(8, 8).triu(1).bool(),
        "lows": torch.full((8, 8), -30.0).triu(1),
    },
)


def _attention(masked: Mask) -> type[SmallModel]:
    """Return an attention whose scores are capped, and masked where tokens are later ones."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        scores = 3 * torch.tanh(x @ m.keys(x).transpose(1, 2))
        return masked(m, scores).softmax(-1) @ m.values(x)

    forward.__name__ = masked.__name__
    return _attention_model(forward)


@_attention
def _filled(m: Any, scores: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill(m.later, -30.0)


@_attention
def _added(m: Any, scores: torch.Tensor) -> torch.Tensor:
    masked: torch.Tensor = scores + m.lows
    return masked


@_attention
def _deep(m: Any, scores: torch.Tensor) -> torch.Tensor:
    """By a sum with far more than it takes."""
    masked: torch.Tensor = scores + m.lows * (1e9 / 30)
    return masked


@_attention
def _floored(m: Any, scores: torch.Tensor) -> torch.Tensor:
    """By a sum that is held above the least number there is, as XGLM does."""
    least = torch.finfo(torch.float32).min
    later = torch.arange(8)[:, None] < torch.arange(8)
    lows = torch.where(later, torch.full((), least), torch.zeros(()))
    return torch.max(scores + lows, torch.tensor(least))


@_attention
def _wide(m: Any, scores: torch.Tensor) -> torch.Tensor:
    """By far more than scores reach, which reach far below 0 themselves."""
    return (4 * scores - 13).masked_fill(m.later, -1e4)


@_attention
def _sloped(m: Any, scores: torch.Tensor) -> torch.Tensor:
    """Beside a slope that PT2E computes when the file runs, and a float file holds."""
    slope = torch.arange(-7, 1) * (1 / torch.pow(2, torch.arange(1, 2) * 1.0))
    return (scores + slope).masked_fill(m.later, -30.0)


@pytest.mark.parametrize(
    ("kind", "flow"),
    [(_added, PT2E), *((kind, flow) for kind in (_filled, _added) for flow in (STATIC, None))],
)
def test_a_mask_that_masks_is_not_blamed(
    maker: Edgeq, build: Build, kind: type[SmallModel], flow: str | None
) -> None:
    """A range that reaches it leaves nothing of what is masked."""
    errors = localized(maker, build(kind, flow), kind)

    assert [row.name for row in errors.rows if not row.matched] == [], errors
    assert blamed(errors) == {}


@pytest.mark.parametrize("kind", [_filled, _sloped])
def test_a_mask_that_shares_the_range_of_the_scores_is_found(
    maker: Edgeq, build: Build, kind: type[SmallModel]
) -> None:
    """PT2E gives what is filled in the observer of the scores: −30 is −3, and later tokens leak."""
    errors = localized(maker, build(kind, PT2E), kind)

    assert culprit(errors).op == "SELECT_V2"
    assert culprit(errors).verdict == LOWERING
    assert culprit(errors).local_lsb_error == 0
    at = "−6." if kind is _sloped else "−3.0"
    assert f"the mask is lost: −30 in torch is {at}" in errors.cause
    assert "add a mask of −30 to the scores" in errors.cause


def test_a_mask_behind_which_scores_are_clamped_is_found(maker: Edgeq, build: Build) -> None:
    """The recipe makes 0 of the mask, and the clamp stands between it and the softmax."""
    errors = localized(maker, build(_floored, STATIC), _floored)

    assert culprit(errors).verdict == LOWERING
    assert "the mask is lost: −3.4e+38 (or −inf) in torch is " in errors.cause
    assert errors.cause.endswith(
        "mask with −30, which a softmax maps to 1e-13, or leave that op in float"
    )


@pytest.mark.parametrize("flow", [PT2E, STATIC])
def test_a_mask_that_takes_the_range_is_found(maker: Edgeq, build: Build, flow: str) -> None:
    """All scores are one step of −1e9: each token looks at all before it alike."""
    errors = localized(maker, build(_deep, flow), _deep)

    assert (culprit(errors).op, culprit(errors).verdict) == ("ADD", LOWERING)
    assert "the mask value −1e+09 widens the range: a step is 3.9" in errors.cause


def test_a_mask_that_masks_though_it_is_cut_is_not_blamed(maker: Edgeq, build: Build) -> None:
    """Of −10 000 the scores' range keeps −25, which leaves nothing of a token either."""
    errors = localized(maker, build(_wide, PT2E), _wide)

    assert blamed(errors) == {}
    assert errors.culprit is None, errors


def test_a_mask_whose_scale_is_another_is_found(maker: Edgeq, build: Build) -> None:
    """A tenth of −30 masks nothing."""
    file = FlatFile(build(_added, STATIC).tflite)
    ((op, mask),) = (
        (op, int(tensor))
        for op in range(len(file.operators))
        for tensor in file.operators[op].inputs
        if file.name(op) == "ADD" and file.constant(int(tensor)) is not None
    )
    scales = np.array(file.scales(mask), np.float32) * np.float32(0.1)
    file.tensor(mask).quantization.scale = scales
    loaded = maker.load(file.content(), reference=seeded(_added))

    errors = localized(maker, loaded, _added)

    assert culprit(errors).index == op
    assert "the mask is lost: " in errors.cause
