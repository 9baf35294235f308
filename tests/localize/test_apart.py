"""What the converter takes apart or carries on, and defects of the same places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fixtures.models import SmallModel, normal, samples, seeded
from pytest_edgeq import Edgeq
from pytest_edgeq.localize.rows import LOWERING, QUANTIZATION
from tests.detection.flatfile import FlatFile
from tests.localize.builds import PT2E, STATIC, Build, blamed, localized

pytestmark = pytest.mark.slow


class Branched(SmallModel):
    """Branches that are stacked and summed, windows that end beyond the image, and two bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1)
        self.last = nn.Conv2d(4, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give a smaller image."""
        both = torch.stack([torch.relu(self.first(x)), torch.relu(self.second(x))], 1)
        y = functional.avg_pool2d(both.sum(1), 3, 2, ceil_mode=True)
        image: torch.Tensor = (self.last(y) + y[:, :3]).clamp(-0.1, 0.6)
        return image

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """An image."""
        return (normal(1, 3, 8, 8, seed=seed),)


class Normalised(SmallModel):
    """Means and variances by hand, which are shared, products as einsum, and what is added."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.head = nn.Linear(8, 12), nn.Linear(6, 3)
        self.mix, self.bands = (nn.Parameter(normal(12, 6, seed=n)) for n in (1, 2))
        self.bands.data.abs_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give scores."""
        x = self.lift(x)
        deviation = torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 0.1)
        y = (x - x.mean(-1, keepdim=True)) / deviation
        levels = torch.log(x.abs() @ self.bands + 0.2)
        levels = levels + 0.1 * levels.std(-1, keepdim=True)
        mixed = torch.einsum("bnd,dc->bnc", y, self.mix) + levels
        scores: torch.Tensor = self.head(torch.einsum("bnc->bc", mixed) / 5)
        return scores

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Five tokens."""
        return (normal(1, 5, 8, seed=seed),)


class Pooled(SmallModel):
    """Shares over an axis that is not the last one, and a mean beside its deviation."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.weigh, self.head = nn.Linear(8, 6), nn.Linear(6, 1), nn.Linear(18, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give scores."""
        x = self.lift(x)
        pooled = (x * torch.softmax(2 * self.weigh(x), 1)).sum(1)
        scores: torch.Tensor = self.head(torch.cat([pooled, x.mean(1), x.std(1)], 1))
        return scores

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Five tokens."""
        return (normal(1, 5, 8, seed=seed),)


class Cells(SmallModel):
    """Recurrent cells in a loop of its own, from zeros on."""

    def __init__(self) -> None:
        super().__init__()
        self.gated, self.long = nn.GRUCell(4, 5), nn.LSTMCell(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give the last state."""
        state, last, cell = x.new_zeros(1, 5), x.new_zeros(1, 3), x.new_zeros(1, 3)
        for step in range(x.shape[1]):
            state = self.gated(x[:, step], state)
            last, cell = self.long(state, (last, cell))
        return last

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Three steps."""
        return (normal(1, 3, 4, seed=seed),)


class Twofold(SmallModel):
    """Two sums with one value: where the file's scale for the ε reaches, 1 is none."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give scores."""
        x = self.lift(x)
        size = (x * x).sum(-1, keepdim=True)
        scores: torch.Tensor = self.head(x * size / (1 + size) / torch.sqrt(size + 1e-6))
        return scores

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Twelve things."""
        return (4 * normal(12, 6, seed=seed),)


class Repeated(SmallModel):
    """One layer three times, whose γ and β are folded into the next use, and not into the first."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.norm, self.head = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.norm.weight.data = 1 + 0.2 * normal(8, seed=4)
        self.norm.bias.data = 0.3 * normal(8, seed=5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give scores a token."""
        for _ in range(3):
            x = self.norm(torch.tanh(self.wide(x)))
        scores: torch.Tensor = self.head(x)
        return scores

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Five tokens."""
        return (normal(1, 5, 8, seed=seed),)


class Causal(SmallModel):
    """Attention whose mask the file computes from a table of truth at each run."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.out = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give as many tokens."""
        query, key, value = (part(x).reshape(1, 5, 2, 4).transpose(1, 2) for part in self.parts)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        tokens: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(1, 5, 8))
        return tokens

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Five tokens."""
        return (normal(1, 5, 8, seed=seed),)


class Carried(SmallModel):
    """Ops in front of what has one scale on both sides: resizes, a join, a pad."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
        self.narrow, self.wide = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.merge = nn.Conv2d(8, 4, 3, padding=1)
        self.last = nn.Conv2d(4, 3, 3, padding=1, padding_mode="replicate")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give an image of the same size."""
        x = torch.relu(self.first(x))
        small = torch.relu(self.second(functional.max_pool2d(x, 2)))
        fine = functional.interpolate(self.narrow(small), scale_factor=2, mode="bilinear")
        y = torch.relu(fine + x)
        wide = functional.interpolate(self.wide(small) + small, scale_factor=2, mode="nearest")
        y = torch.relu(self.merge(torch.cat([y, wide], 1)))
        image: torch.Tensor = self.last(y)
        return image

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """An image."""
        return (normal(1, 3, 8, 8, seed=seed),)


class Scored(SmallModel):
    """Functions of two branches: a mixture, how alike they are, scores with factors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.bias, self.weight = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(8, 6))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Give each of them."""
        one, other = self.first(x), self.second(x)
        mixed = torch.lerp(one, other, 0.3)
        alike = functional.cosine_similarity(one, other, dim=-1)
        scores = torch.baddbmm(x[..., :5], one, other.transpose(1, 2), beta=0.5, alpha=0.3)
        folded = torch.addmm(self.bias, mixed[0], self.weight, beta=0.5, alpha=2.0)
        return folded, alike, scores

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Five places of features."""
        return (normal(1, 5, 8, seed=seed),)


class Placed(SmallModel):
    """Maps of positions behind convolutions: the bias of these goes into what is added."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 3, stride=2)
        self.places = nn.Parameter(0.5 * torch.randn(1, 4, 8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give a smaller image."""
        x = torch.relu(self.first(x) + self.places)
        image: torch.Tensor = self.second(x) + torch.linspace(-1, 1, 3).reshape(1, 1, 1, 3)
        return image

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """An image."""
        return (normal(1, 3, 8, 8, seed=seed),)


@pytest.mark.parametrize(
    ("kind", "flow"),
    [
        *((Branched, flow) for flow in (STATIC, PT2E, None)),
        *((Normalised, flow) for flow in (STATIC, PT2E, None)),
        *((Pooled, flow) for flow in (STATIC, PT2E, None)),
        *((Cells, flow) for flow in (STATIC, None)),
        (Repeated, STATIC),
        *((Causal, flow) for flow in (PT2E, None)),
        *((kind, PT2E) for kind in (Carried, Twofold)),
        *((Placed, flow) for flow in (STATIC, PT2E, None)),
        *((Scored, flow) for flow in (STATIC, None)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_the_converter_takes_apart_is_matched_and_not_blamed(
    maker: Edgeq, build: Build, kind: type[SmallModel], flow: str | None
) -> None:
    """Every op is measured, and none computes anything else."""
    errors = localized(maker, build(kind, flow), kind)

    assert [row.name for row in errors.rows if not row.matched] == [], errors
    assert blamed(errors) == {}


def _ops(file: FlatFile, name: str) -> list[int]:
    return [i for i in range(len(file.operators)) if file.name(i) == name]


def _constant(
    name: str, change: Callable[[Any], Any], which: int = 0, place: int | None = None
) -> Callable[[FlatFile], int]:
    """A constant operand of an op of a name, of those that have one."""

    def apply(file: FlatFile) -> int:
        found = []
        for op in _ops(file, name):
            taken = [int(i) for i in file.operators[op].inputs]
            taken = taken if place is None else taken[place : place + 1]
            found += [(op, i) for i in taken if i >= 0 and file.constant(i) is not None][:1]
        op, tensor = found[which]
        values = file.constant(tensor)
        assert values is not None
        file.store(tensor, change(values).astype(values.dtype))
        return op

    return apply


def _exchanged(file: FlatFile) -> int:
    op = _ops(file, "CONCATENATION")[0]
    file.operators[op].inputs = file.operators[op].inputs[::-1]
    return op


def _summed_before(file: FlatFile) -> int:
    """The sum that shares are divided by is that of what the EXP takes."""
    exp = _ops(file, "EXP")[0]
    taken, made = int(file.operators[exp].inputs[0]), int(file.operators[exp].outputs[0])
    op = next(i for i in _ops(file, "SUM") if int(file.operators[i].inputs[0]) == made)
    file.operators[op].inputs = [taken, *file.operators[op].inputs[1:]]
    return op


def _both_sides(factor: float) -> Callable[[FlatFile], int]:
    """The scale on both sides of a resize."""

    def change(file: FlatFile) -> int:
        resize = _ops(file, "RESIZE_BILINEAR")[0]
        taken = int(file.operators[resize].inputs[0])
        for tensor in (taken, int(file.operators[resize].outputs[0])):
            scales = np.array(file.scales(tensor), np.float32) * np.float32(factor)
            file.tensor(tensor).quantization.scale = scales
        op = file.producer(taken)
        assert op is not None
        return op

    return change


def _flipped(values: Any) -> Any:
    """One weight with its sign changed: the largest, so that it is not 0."""
    changed = values.copy()
    changed.flat[np.abs(values.astype(int)).argmax()] *= -1
    return changed


DEFECTS: dict[str, tuple[type[SmallModel], str | None, Callable[[FlatFile], int]]] = {
    "branches exchanged": (Branched, STATIC, _exchanged),
    "the shares of windows that end beyond": (
        *(Branched, STATIC, _constant("MUL", lambda v: np.where(v > 100, v - 20, v))),
    ),
    "the lower bound": (Branched, None, _constant("MAXIMUM", lambda v: v * 1.2)),
    "the upper bound": (Branched, None, _constant("MINIMUM", lambda v: v * 0.9)),
    "n − 1": (Normalised, None, _constant("MUL", lambda v: v * 1.02)),
    "the ε of a variance": (Normalised, None, _constant("ADD", lambda v: v * 1.5)),
    "what is added to a product": (
        *(Normalised, STATIC, _constant("FULLY_CONNECTED", lambda v: v * 2, 1, 2)),
    ),
    "a weight of an einsum": (*(Normalised, STATIC, _constant("FULLY_CONNECTED", _flipped, 2, 1)),),
    "a sum that shares are none of": (Pooled, None, _summed_before),
    "a bias of a cell": (Cells, None, _constant("FULLY_CONNECTED", lambda v: v * 1.1, 0, 2)),
    "a state that was not zero": (Cells, None, _constant("MUL", lambda v: v + 0.1)),
    "a weight of the second use": (
        *(Repeated, STATIC, _constant("FULLY_CONNECTED", _flipped, 1, 1)),
    ),
    "the factor of a mixture": (
        *(Scored, None, _constant("MUL", lambda v: np.where(v == np.float32(0.3), 0.33, v))),
    ),
    "a weight with a factor": (*(Scored, None, _constant("FULLY_CONNECTED", _flipped, 2, 1)),),
    "a row that is added": (Placed, None, _constant("ADD", lambda v: v * 1.05, 1)),
    "a map that is added": (Placed, STATIC, _constant("ADD", lambda v: np.roll(v, 1, -1))),
    "a scale narrower on both sides": (Carried, PT2E, _both_sides(0.5)),
}


@pytest.mark.parametrize("what", DEFECTS)
def test_a_defect_in_one_of_the_parts_is_found(maker: Edgeq, build: Build, what: str) -> None:
    """Steps that are told one by one hide none."""
    kind, flow, change = DEFECTS[what]
    file = FlatFile(build(kind, flow).tflite)
    op = change(file)
    changed = build(kind, flow).with_tflite(file.content())

    errors = localized(maker, changed, kind)

    assert op in blamed(errors), errors


def test_a_clamp_hides_no_range_that_is_too_narrow(maker: Edgeq, build: Build) -> None:
    """What lies beyond the bounds may be cut off in front of them, and nothing else."""
    sound = localized(maker, build(Branched, STATIC), Branched)
    assert [row.name for row in sound.rows if row.verdict == QUANTIZATION] == []

    file = FlatFile(build(Branched, STATIC).tflite)
    clamp = _ops(file, "MAXIMUM")[0]
    for tensor in {*map(int, file.operators[clamp].inputs), int(file.operators[clamp].outputs[0])}:
        scales = np.array(file.scales(tensor), np.float32) * np.float32(0.25)
        file.tensor(tensor).quantization.scale = scales
    narrow = maker.load(file.content(), reference=seeded(Branched))

    errors = localized(maker, narrow, Branched)

    assert errors.culprit is not None
    assert errors.culprit.index <= clamp, errors


class Alike(SmallModel):
    """Layers of one shape beside each other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give gated features."""
        gate = torch.sigmoid(self.second(x))
        gated: torch.Tensor = self.first(x) * gate + self.third(x)
        return gated

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Four things."""
        return (normal(4, 6, seed=seed),)


def test_layers_are_told_apart_where_all_is_less_than_a_step(maker: Edgeq) -> None:
    """One sample in the calibration was 300 times as large: nothing is swapped."""
    calibration = [*samples(Alike, 8), tuple(300 * each for each in Alike.sample_inputs(9))]
    quantized = maker.quantize(
        seeded(Alike), Alike.sample_inputs(), quantizer=PT2E, calibration=calibration
    )

    errors = localized(maker, quantized, Alike)

    assert [row.name for row in errors.rows if not row.matched] == []
    layers = [row for row in errors.rows if row.op == "FULLY_CONNECTED"]
    assert sorted(row.module or "" for row in layers) == ["first", "second", "third"]
    assert blamed(errors) == {}


def test_a_mask_that_is_gone_is_found(maker: Edgeq, build: Build) -> None:
    """A static recipe of ai-edge-quantizer 0.10 gives −inf a scale of 3.9e-12: it is 0 then."""
    errors = localized(maker, build(Causal, STATIC), Causal)

    assert errors.culprit is not None
    assert errors.culprit.op == "SELECT_V2"
    assert errors.culprit.verdict == LOWERING
    assert "the mask is lost: −inf in torch is 0 in the file" in errors.cause


def test_what_is_multiplied_by_zeros_is_no_op_of_the_file(maker: Edgeq, build: Build) -> None:
    """A bias that only the file has is told, whatever is left of it in torch."""
    quantized = build(Cells, None)
    other = seeded(Cells)
    with torch.no_grad():
        other.gated.bias_hh.zero_()

    errors = localized(maker, maker.load(quantized.tflite, reference=other), Cells)

    assert blamed(errors)
