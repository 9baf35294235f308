"""Products with −1, with 0 and with constants as the converter has them, and defects of these."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fixtures.models import SmallModel, normal
from pytest_edgeq import Edgeq
from tests.detection.flatfile import FlatFile
from tests.localize.builds import PT2E, STATIC, Build, blamed, localized
from tests.localize.edits import (
    Change,
    Defect,
    halved_row,
    localized_with,
    moved_bias,
    negated_row,
    ops_of,
)

pytestmark = pytest.mark.slow

DYNAMIC = "recipe_dynamic_wi8_afp32"


class Sloped(SmallModel):
    """Two layers with a slope below zero: the lower half is a layer of negated weights."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.Linear(8, 12), nn.PReLU(12), nn.Linear(12, 3, bias=False))
        self.last = nn.PReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give scores."""
        scores: torch.Tensor = self.last(self.parts(x))
        return scores

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Features."""
        return (normal(1, 8, seed=seed),)


class Queried(SmallModel):
    """A learned query, which is the first of a product's two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds = nn.Parameter(normal(1, 4, 8, seed=3))
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give shares of ten tokens."""
        scores = torch.bmm(self.query(self.seeds), self.key(x).transpose(1, 2))
        shares: torch.Tensor = scores.softmax(2)
        return shares

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Ten tokens."""
        return (normal(1, 10, 8, seed=seed),)


class Cached(SmallModel):
    """Parts of a join that lie in one or two of the three that are joined."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Give tokens, some of them twice."""
        joined = torch.cat([torch.tanh(x[:, :2]), self.first(x), self.second(x)], 1)
        alone = torch.cat([x, self.head(x), torch.relu(x)], 1)[:, 7:12]
        return self.head(joined), joined[:, 4:9], joined[:, -3:], joined[:, 1] * 2 + alone

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Five tokens."""
        return (normal(1, 5, 8, seed=seed),)


class Streamed(SmallModel):
    """A convolution over what comes and what came, whose end is given for the next time."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 6, 5)

    def forward(self, x: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Give features, and the new cache."""
        joined = torch.cat([cache, x], 2)
        return torch.relu(self.conv(joined)), joined[:, :, -4:]

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Eight steps, and the last four before them."""
        return normal(1, 4, 8, seed=seed), normal(1, 4, 4, seed=seed + 1000)


class Mixture(SmallModel):
    """Shares and their energy, which take one maximum, and energies of more axes than one."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Give shares by energy, and the energy of all."""
        x = self.lift(x)
        weighed = torch.softmax(x, -1) * torch.logsumexp(x, -1, keepdim=True)
        return weighed, torch.tanh(x).logsumexp((1, 2))

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Five tokens."""
        return (normal(1, 5, 8, seed=seed),)


class Shifted(SmallModel):
    """A layer that is given away, whose bias is folded into the layer behind it."""

    ADDED = 0

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.embed = nn.Linear(8, 16), nn.Linear(16, 8)
        self.decode, self.head = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Give scores, and what they are made of."""
        x = self.embed(torch.relu(self.lift(x)))
        return self.head(torch.relu(self.decode(x + self.ADDED))), x

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Features."""
        return (normal(1, 8, seed=seed),)


class Raised(Shifted):
    """The same with a number that is folded as well."""

    ADDED = 1


class Centred(SmallModel):
    """Features that are brought about 0 in front of each layer, by a number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give scores."""
        x = torch.relu(self.first((x - 0.4) / 0.3)) - 0.5
        x = 1 - torch.sigmoid(self.second(x)) * 2
        scores: torch.Tensor = self.third(x)
        return scores

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Features."""
        return (normal(1, 8, seed=seed),)


class CentredImages(SmallModel):
    """The same in front of convolutions, of which one pads: its zeros are none of the numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 8, 3), nn.Conv2d(8, 8, 3, padding=1, stride=2)
        self.third, self.head = nn.Conv2d(8, 8, 1, bias=False), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give scores."""
        x = torch.relu(self.first((x - 0.1307) / 0.3081))
        x = torch.relu(self.second(x - 0.5)) * 2 - 1
        scores: torch.Tensor = self.head(torch.relu(self.third(x)).mean((2, 3)))
        return scores

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Images."""
        return (normal(1, 2, 10, 10, seed=seed),)


class Volumes(SmallModel):
    """Convolutions of volumes: the converter adds their biases behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv3d(3, 8, 3, padding=1), nn.BatchNorm3d(8)
        self.second, self.third = nn.Conv3d(8, 4, 3, padding=1), nn.Conv3d(4, 4, 1, bias=False)
        self.head = nn.Linear(4, 3)
        self.norm.running_mean, self.norm.running_var = normal(8, seed=4), 0.5 + torch.rand(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give scores."""
        x = torch.relu(self.norm(self.first(x)))
        x = self.third(torch.relu(self.second(x)))
        scores: torch.Tensor = self.head(x.mean((2, 3, 4)))
        return scores

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Four small images in a row."""
        return (normal(1, 3, 4, 5, 5, seed=seed),)


class Unshifted(SmallModel):
    """A batch norm that shifts nothing: no sum is left of it in front of what clamps."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv3d(3, 4, 3), nn.BatchNorm3d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give features."""
        return torch.relu(self.norm(self.conv(x)))

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Four small images in a row."""
        return (normal(1, 3, 4, 5, 5, seed=seed),)


class Unscaled(SmallModel):
    """The same of a norm of each image, whose scale multiplies by 1."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8, affine=True)
        self.head = nn.Conv2d(8, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give features."""
        x = torch.relu(self.norm(self.conv(x)))
        features: torch.Tensor = self.head(x) + x
        return features

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """An image."""
        return (normal(1, 3, 12, 12, seed=seed),)


class Branched(SmallModel):
    """A block of RepVGG, untrained: one of its branches is a norm alone, which is a MUL."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.branch = nn.Conv2d(3, 8, 3, bias=False), nn.Conv2d(8, 8, 1)
        self.first, self.alone = nn.BatchNorm2d(8), nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give features."""
        x = torch.relu(self.first(self.stem(x)))
        return torch.relu(self.branch(x) + self.alone(x))

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """An image."""
        return (normal(1, 3, 12, 12, seed=seed),)


class NormedTwice(SmallModel):
    """A norm of what a norm gives, whose scale is 1: the mean of that is what float32 leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.head = nn.Linear(16, 16), nn.Linear(16, 5)
        self.first, self.second = nn.LayerNorm(16), nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give scores a token."""
        scores: torch.Tensor = self.head(self.second(self.first(x + self.lift(x))))
        return scores

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Nine tokens."""
        return (normal(1, 9, 16, seed=seed),)


@pytest.mark.parametrize(
    ("kind", "flow"),
    [
        *((Sloped, flow) for flow in (STATIC, DYNAMIC, None)),
        *((Queried, flow) for flow in (STATIC, DYNAMIC)),
        *((Cached, flow) for flow in (STATIC, PT2E, None)),
        *((Mixture, flow) for flow in (STATIC, None)),
        *((Streamed, flow) for flow in (STATIC, PT2E)),
        *((Shifted, flow) for flow in (STATIC, DYNAMIC, PT2E, None)),
        *((Raised, flow) for flow in (STATIC, DYNAMIC)),
        *((Centred, flow) for flow in (STATIC, DYNAMIC, PT2E, None)),
        *((CentredImages, flow) for flow in (STATIC, DYNAMIC, PT2E, None)),
        *((Volumes, flow) for flow in (STATIC, PT2E, None)),
        *((Unshifted, flow) for flow in (STATIC, None)),
        *((Unscaled, flow) for flow in (STATIC, PT2E, None)),
        *((Branched, flow) for flow in (STATIC, DYNAMIC, PT2E, None)),
        *((NormedTwice, flow) for flow in (STATIC, DYNAMIC, PT2E, None)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_the_converter_rewrites_is_matched_and_not_blamed(
    maker: Edgeq, build: Build, kind: type[SmallModel], flow: str | None
) -> None:
    """Every op is measured, and none computes anything else."""
    errors = localized(maker, build(kind, flow), kind)

    assert [row.name for row in errors.rows if not row.matched] == []
    assert blamed(errors) == {}


def test_a_layer_of_negated_weights_is_one(build: Build) -> None:
    """Else nothing of it would be seen above."""
    file = FlatFile(build(Sloped, STATIC).tflite)
    first, second = (file.constant(file.operators[op].inputs[1]) for op in ops_of(file)[:2])
    assert first is not None
    assert second is not None
    assert (first == -second).all()


def _not_clamped(file: FlatFile) -> int:
    op = ops_of(file)[0]
    file.operators[op].builtinOptions.fusedActivationFunction = 0
    return op


def _another_query(file: FlatFile) -> int:
    op = ops_of(file)[1]
    tensor = int(file.operators[op].inputs[1])
    values = file.constant(tensor)
    assert values is not None
    file.store(tensor, values[::-1].copy())
    return op


def _summed_of_differences(file: FlatFile) -> int:
    """The first sum of exponentials, which takes the exponents."""
    op = ops_of(file, "SUM")[0]
    exponential = ops_of(file, "EXP")[0]
    assert file.operators[op].inputs[0] == file.operators[exponential].outputs[0]
    source = file.operators[exponential].inputs[0]
    file.operators[op].inputs = [source, *file.operators[op].inputs[1:]]
    return op


def _of_another_place(file: FlatFile) -> int:
    """The last slice, one token further up."""
    op = ops_of(file, "SLICE")[-1]
    tensor = int(file.operators[op].inputs[1])
    values = file.constant(tensor)
    assert values is not None
    file.store(tensor, values - (values > 0))
    return op


def _volume(place: int, kind: str = "CONV_3D") -> Change:
    """Another value of a weight, or of a bias that is added behind it."""

    def change(file: FlatFile) -> int:
        op = ops_of(file, kind)[place]
        tensor = int(file.operators[op].inputs[1])
        values = file.constant(tensor)
        assert values is not None
        values = values.copy()
        values[..., 1] = -2 * values[..., 1]
        file.store(tensor, values)
        return op

    return change


def _scaled_and_not_clamped(file: FlatFile) -> int:
    op = ops_of(file, "MUL")[-1]
    assert file.operators[op].builtinOptions.fusedActivationFunction == 1
    file.operators[op].builtinOptions.fusedActivationFunction = 0
    return op


def _mean_apart(file: FlatFile) -> int:
    """What the second norm takes off is a product with the mean of what the first one takes."""
    op, mean = ops_of(file, "MUL")[2], ops_of(file, "MEAN")[0]
    file.operators[op].inputs = [file.operators[op].inputs[0], file.operators[mean].outputs[0]]
    return op


DEFECTS: dict[str, Defect] = {
    "a row of the lower half as in the upper one": (
        Sloped,
        STATIC,
        negated_row("FULLY_CONNECTED", 1),
    ),
    "a half that is not clamped": (Sloped, DYNAMIC, _not_clamped),
    "queries in another order": (Queried, DYNAMIC, _another_query),
    "tokens of another place": (Cached, None, _of_another_place),
    "a bias of the layer behind": (Shifted, STATIC, moved_bias(3)),
    "a bias that is added apart": (Shifted, None, moved_bias(-1)),
    "a weight without its bias": (Shifted, DYNAMIC, halved_row(1)),
    "a bias with a number in it": (Raised, DYNAMIC, moved_bias(2)),
    "a bias with a number taken off it": (Centred, DYNAMIC, moved_bias(1)),
    "a convolution's bias with numbers in it": (CentredImages, STATIC, moved_bias(7)),
    "a bias of volumes": (Volumes, None, _volume(0, "ADD")),
    "the last bias of volumes": (Volumes, STATIC, _volume(-1, "ADD")),
    "a weight of volumes": (Volumes, STATIC, _volume(0)),
    "a weight without a bias": (Volumes, PT2E, _volume(2)),
    "features that are not clamped": (Unshifted, None, _scaled_and_not_clamped),
    "normed features that are not clamped": (Unscaled, None, _scaled_and_not_clamped),
    "a mean of what is not normed": (NormedTwice, None, _mean_apart),
    "a layer beside a norm alone": (Branched, STATIC, negated_row("CONV_2D", 0)),
    "an energy without exponentials": (Mixture, None, _summed_of_differences),
}


@pytest.mark.parametrize("what", DEFECTS)
def test_a_defect_of_the_same_place_is_found(maker: Edgeq, build: Build, what: str) -> None:
    """What a sound file is allowed hides none that is not."""
    op, errors = localized_with(maker, build, DEFECTS[what])

    assert op in blamed(errors), errors
