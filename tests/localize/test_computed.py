"""What the file computes of constants at each run, or holds in other constants."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from fixtures.models import SmallModel, normal, seeded
from pytest_edgeq import Edgeq
from pytest_edgeq.litert import with_computed_weights
from pytest_edgeq.localize.rows import LOWERING
from tests.detection.flatfile import FlatFile
from tests.localize.builds import PT2E, STATIC, Build, blamed, localized
from tests.localize.edits import halved_row

pytestmark = pytest.mark.slow

DYNAMIC = "recipe_dynamic_wi8_afp32"


class Between(SmallModel):
    """A layer without a bias between two batch norms over tokens, of which one is taken twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up = (nn.Linear(8, 8, bias=False) for _ in range(2))
        self.before, self.behind = nn.BatchNorm1d(8), nn.BatchNorm1d(8)
        for seed, norm in enumerate((self.before, self.behind)):
            norm.weight.data, norm.bias.data = 1 + normal(8, seed=seed), normal(8, seed=seed + 2)
            norm.running_mean = normal(8, seed=seed + 4)
            norm.running_var = 0.2 + normal(8, seed=seed + 6).square()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give as many tokens."""
        x = self.before(self.first(x).flatten(0, 1)).reshape(1, 4, 8)
        y = self.behind(self.up(x).flatten(0, 1)).reshape(1, 4, 8)
        return x + nn.functional.hardswish(y)

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Four tokens."""
        return (normal(1, 4, 8, seed=seed),)


class Bucketed(SmallModel):
    """Scores with a bias for each distance, far ones in buckets of a logarithm."""

    places: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values, self.far = nn.Linear(6, 6), nn.Linear(6, 6), nn.Embedding(12, 1)
        self.register_buffer("places", torch.arange(24, dtype=torch.int32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give as many tokens."""
        distance = (self.places[None] - self.places[:, None]).abs()
        large = 6 + (torch.log(distance.float() / 6) / math.log(4) * 6).int()
        buckets = torch.where(distance < 6, distance, large.clamp(max=11))
        scores = x @ self.keys(x).transpose(1, 2) + self.far(buckets)[..., 0]
        mixed: torch.Tensor = scores.softmax(-1) @ self.values(x)
        return mixed

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Two dozen tokens."""
        return (normal(1, 24, 6, seed=seed),)


class Spiking(SmallModel):
    """A layer that is used twice, the second time behind a product with a number."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.head = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give scores."""
        level = self.lift(x)
        first = (level >= 0.3).float()
        second = (level + (level - 0.3 * first) >= 0.3).float()
        scores: torch.Tensor = self.head(first) + self.head(second)
        return scores

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Three things."""
        return (normal(3, 8, seed=seed),)


class Mixed(SmallModel):
    """Tokens that a parameter mixes from the left."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.mix = nn.Linear(6, 6), nn.Parameter(normal(4, 5, seed=3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give four tokens."""
        tokens: torch.Tensor = self.mix @ self.lift(x)
        return tokens

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Five tokens."""
        return (normal(5, 6, seed=seed),)


class Asked(SmallModel):
    """Learned queries, which attend to one another before they do to what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(normal(1, 4, 16, seed=3))
        self.decoder = nn.TransformerDecoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give scores a query."""
        scores: torch.Tensor = self.head(self.decoder(self.queries, x))
        return scores

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Nine tokens."""
        return (normal(1, 9, 16, seed=seed),)


class Distances(SmallModel):
    """Attention whose scores have a learned bias for each distance, as Swin's do."""

    places: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values = nn.Linear(8, 8), nn.Linear(8, 8)
        self.table = nn.Parameter(normal(13, 2, seed=4))
        place = torch.arange(7)
        self.register_buffer("places", place[:, None] - place[None] + 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give as many tokens."""
        bias = self.table[self.places.view(-1)].view(7, 7, -1).permute(2, 0, 1)
        scores = (x @ self.keys(x).transpose(1, 2)).unsqueeze(1) + bias.unsqueeze(0)
        tokens: torch.Tensor = scores.softmax(-1) @ self.values(x).unsqueeze(1)
        return tokens

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Seven tokens."""
        return (normal(1, 7, 8, seed=seed),)


@pytest.mark.parametrize(
    ("kind", "flow"),
    [
        *((Between, flow) for flow in (DYNAMIC, None)),
        (Bucketed, STATIC),
        (Spiking, DYNAMIC),
        (Mixed, PT2E),
        (Asked, None),
        (Distances, PT2E),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_is_computed_or_folded_is_matched_and_not_blamed(
    maker: Edgeq, build: Build, kind: type[SmallModel], flow: str | None
) -> None:
    """Every op is measured, and none computes anything else."""
    errors = localized(maker, build(kind, flow), kind)

    assert [row.name for row in errors.rows if not row.matched] == [], errors
    assert blamed(errors) == {}


def test_a_quantized_graph_may_compute_its_constants_once(build: Build) -> None:
    """The operands of an index are a list; the results are equal to the last bit."""
    simulated = build(Distances, PT2E).simulated
    assert simulated is not None
    (given,) = Distances.sample_inputs(5)

    with torch.no_grad():
        assert torch.equal(with_computed_weights(simulated)(given), simulated(given))


def _largest_flipped(file: FlatFile) -> int:
    """Of the second layer's weight."""
    op = [i for i in range(len(file.operators)) if file.name(i) == "FULLY_CONNECTED"][1]
    tensor = int(file.operators[op].inputs[1])
    values = file.constant(tensor)
    assert values is not None
    changed = values.copy()
    changed.flat[np.abs(values.astype(int)).argmax()] *= -1
    file.store(tensor, changed)
    return op


def _other_base(file: FlatFile) -> int:
    """The logarithm's factor."""
    op = [i for i in range(len(file.operators)) if file.name(i) == "MUL"][1]
    tensor = int(file.operators[op].inputs[1])
    scales = np.array(file.scales(tensor), np.float32) * np.float32(1.2)
    file.tensor(tensor).quantization.scale = scales
    return op


@pytest.mark.parametrize(
    ("kind", "flow", "change"),
    [
        (Between, DYNAMIC, _largest_flipped),
        (Bucketed, STATIC, _other_base),
        (Spiking, DYNAMIC, _largest_flipped),
        (Asked, None, halved_row(0)),
    ],
    ids=["a weight", "a step of a table", "a weight that two ops take", "one of constants alone"],
)
def test_a_defect_in_what_is_computed_or_folded_is_found(
    maker: Edgeq,
    build: Build,
    kind: type[SmallModel],
    flow: str | None,
    change: Callable[[FlatFile], int],
) -> None:
    """At its op."""
    file = FlatFile(build(kind, flow).tflite)
    op = change(file)
    loaded = maker.load(file.content(), reference=seeded(kind))

    errors = localized(maker, loaded, kind)

    assert errors.culprit is not None, errors
    assert (errors.culprit.index, errors.culprit.verdict) == (op, LOWERING), errors


@pytest.mark.parametrize(
    ("kind", "flow", "told"),
    [
        (Mixed, STATIC, "its constant operand has 5 scales, and its kernels know one"),
        (Asked, STATIC, "its constant operand has 8 scales, and its kernels know one"),
        (Asked, DYNAMIC, "it gives floats of two constants that are codes"),
    ],
    ids=["one constant", "two constants", "two constants, in float"],
)
def test_a_constant_that_kernels_cannot_read_is_told(
    maker: Edgeq, build: Build, kind: type[SmallModel], flow: str, told: str
) -> None:
    """ai-edge-quantizer 0.10 gives a BATCH_MATMUL's constant a scale a channel, and codes."""
    errors = localized(maker, build(kind, flow), kind)

    assert errors.culprit is not None, errors
    assert errors.culprit.op == "BATCH_MATMUL"
    assert told in errors.cause


class Prepared(SmallModel):
    """An image that the model itself brings to its range."""

    def __init__(self, *, tint: bool = False) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3)
        self.tint = tint

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give a smaller image."""
        if self.tint:
            x = x.flip(1) * torch.tensor([1.0, 0.8, 0.6]).reshape(1, 3, 1, 1)
        image: torch.Tensor = self.first((x / 255 - 0.4) / 0.25)
        return image

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """An image."""
        return (normal(1, 3, 8, 8, seed=seed).abs() * 80,)


def test_a_weight_is_not_blamed_for_what_stands_in_front_of_it(maker: Edgeq, build: Build) -> None:
    """The weight is the reference's; what the reference multiplies the image by is not."""

    class Tinted(Prepared):
        def __init__(self) -> None:
            super().__init__(tint=True)

    content = build(Prepared, PT2E).tflite
    sound = localized(maker, maker.load(content, reference=seeded(Prepared)), Prepared)
    assert blamed(sound) == {}

    errors = localized(maker, maker.load(content, reference=seeded(Tinted)), Prepared)

    assert errors.culprit is not None, errors
    assert [row.findings for row in errors.rows if "weight" in row.dtypes] == [()], errors
