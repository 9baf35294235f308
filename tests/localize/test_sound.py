"""What the converter makes of sound models in its own way, and defects of the same places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fixtures.models import SmallModel, normal, samples, seeded
from pytest_edgeq import Edgeq, QuantizedModel
from pytest_edgeq.localize.rows import LOWERING, LayerErrors
from tests.detection.flatfile import FlatFile


class Patched(SmallModel):
    """Batch norms alone, patches merged as vision transformers do, and a U-Net's way back up."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.merge = nn.Conv2d(16, 4, 1)
        self.last = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give an image of the same size."""
        x = torch.relu(self.first(torch.relu(self.norm(x))))
        quarters = [x[:, :, i::2, j::2] for j in (0, 1) for i in (0, 1)]
        y = torch.relu(2 * self.merge(torch.cat(quarters, 1)))
        y = functional.interpolate(y, scale_factor=2, mode="bilinear")
        image: torch.Tensor = self.last(torch.cat([y, x], 1))
        return image

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """An image."""
        return (normal(1, 3, 8, 8, seed=seed),)


class Curved(SmallModel):
    """Activations that are taken apart, in place where torch has them so."""

    def __init__(self) -> None:
        super().__init__()
        curves = (
            *(nn.ELU(0.5, inplace=True), nn.SELU(), nn.CELU(0.7), nn.Softplus(2.0)),
            *(nn.Mish(inplace=True), nn.SiLU(inplace=True), nn.Hardsigmoid(inplace=True)),
        )
        layers = [layer for curve in curves for layer in (nn.Conv2d(3, 3, 1), curve)]
        self.layers = nn.Sequential(*layers, nn.Conv2d(3, 6, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give gated, normalised channels."""
        y = functional.glu(-(8 * self.layers(x)), 1)
        y = y / (y.norm(dim=1, keepdim=True) + 0.1)
        shares: torch.Tensor = y.flatten(2).softmax(2).view_as(y)
        return shares * torch.expm1(y)

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """An image."""
        return (3 * normal(1, 3, 4, 5, seed=seed),)


class Projected(SmallModel):
    """Linear layers in a row, an attention behind γ and β, and a query that is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.wide = nn.Linear(6, 8), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.start = nn.Parameter(normal(1, 5, 8, seed=3))
        self.head = nn.Linear(8, 3)
        self.norm.weight.data = 0.5 + normal(8, seed=4).abs()
        self.norm.bias.data = normal(8, seed=5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give scores a token."""
        x = self.lift(x)
        x = self.norm(x + self.wide(x))
        parts = (layer(x).view(1, -1, 2, 4) for layer in (self.query, self.key, self.value))
        y = functional.scaled_dot_product_attention(*(each.transpose(1, 2) for each in parts))
        y = y.transpose(1, 2).reshape(1, -1, 8)
        scores: torch.Tensor = self.head(torch.relu(y + self.start.expand(x.shape[0], -1, -1)))
        return scores

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Five tokens."""
        return (normal(1, 5, 6, seed=seed),)


class Turned(SmallModel):
    """Products of matrices that are stored as x·W takes them, behind γ and β."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.wide, self.narrow = (nn.Parameter(normal(8, n, seed=n)) for n in (6, 8))
        self.shift, self.end = (nn.Parameter(normal(n, seed=n + 1)) for n in (6, 8))
        self.norm.weight.data = 0.5 + normal(8, seed=4).abs()
        self.norm.bias.data = normal(8, seed=5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give scores a token."""
        y = torch.addmm(self.end, x.view(-1, 8), self.narrow).view(x.shape)
        scores = torch.addmm(self.shift, self.norm(y).view(-1, 8), self.wide)
        return scores.view(*x.shape[:-1], 6)

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Five tokens."""
        return (normal(1, 5, 8, seed=seed),)


class Placed(SmallModel):
    """Positions that the file resizes at each run, and rounds on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.grid = nn.Parameter(normal(1, 4, 2, 2, seed=3))
        self.first, self.last = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give an image of the same size."""
        grid = functional.interpolate(self.grid, size=(6, 6), mode="bilinear")
        x = self.first(x) + grid.flatten(2).transpose(1, 2).reshape(1, 6, 6, 4).permute(0, 3, 1, 2)
        image: torch.Tensor = self.last(torch.tanh(x))
        return image

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """An image."""
        return (normal(1, 4, 6, 6, seed=seed),)


class Scaled(SmallModel):
    """What is normalised by constants, and convolved along one axis."""

    mean: torch.Tensor
    deviation: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.5, 0.4, 0.3])[:, None])
        self.register_buffer("deviation", torch.tensor([0.8, 0.7, 0.23])[:, None])
        self.conv = nn.Conv1d(3, 4, 3, bias=False)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give scores."""
        x = self.norm(self.conv((x - self.mean) / self.deviation))
        scores: torch.Tensor = self.head(x.mean(2))
        return scores

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Ten places."""
        return (normal(1, 3, 10, seed=seed),)


class BothWays(SmallModel):
    """A recurrent net that reads tokens in either direction."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 3)
        self.recurrent = nn.LSTM(3, 4, batch_first=True, bidirectional=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give scores a token."""
        scores: torch.Tensor = self.head(self.recurrent(self.embedding(x))[0])
        return scores

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Four tokens, of which some are alike."""
        return (torch.tensor([[seed % 9, 1, seed % 9, 1]]),)


Build = Callable[[type[SmallModel], Any], QuantizedModel]
STATIC, PT2E = "recipe_static_wi8_ai8", "pt2e_static_int8"


@pytest.fixture(scope="module")
def maker(tmp_path_factory: pytest.TempPathFactory) -> Edgeq:
    """Builds outside of any test's own fixture."""
    return Edgeq(directory=tmp_path_factory.mktemp("sound"))


@pytest.fixture(scope="module")
def build(maker: Edgeq) -> Build:
    """Convert each model by each flow once."""
    known: dict[tuple[type[SmallModel], Any], QuantizedModel] = {}

    def get(kind: type[SmallModel], flow: Any) -> QuantizedModel:
        if (kind, flow) not in known:
            known[kind, flow] = maker.quantize(
                seeded(kind),
                kind.sample_inputs(),
                quantizer=flow,
                calibration=samples(kind, 16) if flow is not None else None,
            )
        return known[kind, flow]

    return get


def _localized(maker: Edgeq, quantized: QuantizedModel, kind: type[SmallModel]) -> LayerErrors:
    return maker.localize(quantized, list(samples(kind, 3, seed=2)))


def _blamed(errors: LayerErrors) -> dict[int, tuple[str, tuple[str, ...]]]:
    return {row.index: (row.name, row.findings) for row in errors.rows if row.verdict == LOWERING}


@pytest.mark.parametrize(
    ("kind", "flow"),
    [
        *((Patched, flow) for flow in (STATIC, PT2E)),
        *((Curved, flow) for flow in (STATIC, None)),
        *((Projected, flow) for flow in (STATIC, None)),
        *((Turned, flow) for flow in (STATIC, None)),
        *((Scaled, flow) for flow in (STATIC, PT2E)),
        (BothWays, None),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_the_converter_may_do_is_matched_and_not_blamed(
    maker: Edgeq, build: Build, kind: type[SmallModel], flow: str | None
) -> None:
    """Every op has its torch nodes, and none computes anything else."""
    errors = _localized(maker, build(kind, flow), kind)

    assert [row.name for row in errors.rows if not row.matched] == []
    assert _blamed(errors) == {}
    # Each is held against torch by itself but for a padding, which is its convolution's.
    assert {row.op for row in errors.rows if row.excess_lsb is None} <= {"PAD", "REVERSE_V2"}


def test_what_the_file_computes_from_constants_alone(maker: Edgeq, build: Build) -> None:
    """Is held against torch's constant where it is taken, up to what its steps round."""
    quantized = build(Placed, STATIC)
    sound = _localized(maker, quantized, Placed)
    assert [row.name for row in sound.rows if not row.matched] == []
    assert _blamed(sound) == {}

    def one_code(file: FlatFile) -> int:
        (resize,) = _ops(file, "RESIZE_BILINEAR")
        table = _operand(file, resize)
        codes = file.constant(table)
        assert codes is not None
        codes.flat[0] += np.int8(20 if codes.flat[0] < 0 else -20)
        file.store(table, codes)
        return _ops(file, "ADD")[0]

    content = FlatFile(quantized.tflite)
    add = one_code(content)
    spoilt = maker.load(content.content(), reference=seeded(Placed))
    assert add in _blamed(_localized(maker, spoilt, Placed))


def _with(
    quantized: QuantizedModel, change: Callable[[FlatFile], int]
) -> tuple[QuantizedModel, int]:
    file = FlatFile(quantized.tflite)
    op = change(file)
    return quantized.with_tflite(file.content()), op


def _ops(file: FlatFile, name: str) -> list[int]:
    return [i for i in range(len(file.operators)) if file.name(i) == name]


def _operand(file: FlatFile, op: int) -> int:
    """The constant that an op takes, by its tensor."""
    return next(int(i) for i in file.operators[op].inputs if file.constant(i) is not None)


def _first_weight(factor: float) -> Callable[[FlatFile], int]:
    def change(file: FlatFile) -> int:
        op = _ops(file, "CONV_2D")[0]
        tensor = int(file.operators[op].inputs[1])
        scales = np.array(file.scales(tensor), np.float32) * np.float32(factor)
        file.tensor(tensor).quantization.scale = scales
        return op

    return change


def _resized_scale(factor: float) -> Callable[[FlatFile], int]:
    """The scale of what a resize takes, which the converter carries up from behind."""

    def change(file: FlatFile) -> int:
        (resize,) = _ops(file, "RESIZE_BILINEAR")
        tensor = int(file.operators[resize].inputs[0])
        scales = np.array(file.scales(tensor), np.float32) * np.float32(factor)
        file.tensor(tensor).quantization.scale = scales
        op = file.producer(tensor)
        assert op is not None
        return op

    return change


def _constant(name: str, change: Callable[[Any], Any], which: int = 0) -> Callable[[FlatFile], int]:
    """A constant operand of the first op of a name, or of another one."""

    def apply(file: FlatFile) -> int:
        op = _ops(file, name)[which]
        tensor = _operand(file, op)
        values = file.constant(tensor)
        assert values is not None
        file.store(tensor, change(values).astype(values.dtype))
        return op

    return apply


def _quarter_repeated(file: FlatFile) -> int:
    op = _ops(file, "CONCATENATION")[0]
    first, _, *others = file.operators[op].inputs
    file.operators[op].inputs = [first, first, *others]
    return op


def _step_repeated(file: FlatFile) -> int:
    """A step of the sequence that reads the place of the one in front."""
    first, second = _ops(file, "SLICE")[:2]
    file.operators[second].inputs = file.operators[first].inputs
    return second


def _bias_lost(file: FlatFile) -> int:
    """The linear layer behind two in a row, whose bias holds theirs."""
    op = next(i for i in _ops(file, "FULLY_CONNECTED") if file.operators[i].inputs[2] >= 0)
    tensor = int(file.operators[op].inputs[2])
    values = file.constant(tensor)
    assert values is not None
    file.store(tensor, np.zeros_like(values))
    return op


DEFECTS: dict[str, tuple[type[SmallModel], str | None, Callable[[FlatFile], int]]] = {
    "a weight in front of a batch norm that stands alone": (Scaled, STATIC, _first_weight(1.05)),
    "the inverse of what torch divides by": (Scaled, STATIC, _constant("MUL", lambda v: v - 20)),
    "the mean of a batch norm that stands alone": (
        *(Patched, STATIC, _constant("SUB", lambda v: v // 2)),
    ),
    "a scale narrower than the one behind": (Patched, PT2E, _resized_scale(0.5)),
    "a scale wider than the one behind": (Patched, PT2E, _resized_scale(2.0)),
    "a quarter taken twice": (Patched, STATIC, _quarter_repeated),
    "the 1 of an ELU": (Curved, None, _constant("SUB", lambda v: v * 0.9)),
    "a step taken twice": (BothWays, None, _step_repeated),
    "a bias that holds another layer's": (Projected, None, _bias_lost),
    "a bias in the constant behind": (Projected, None, _constant("ADD", lambda v: v * 0.8, -1)),
}


@pytest.mark.parametrize("what", DEFECTS)
def test_a_defect_of_the_same_place_is_found(maker: Edgeq, build: Build, what: str) -> None:
    """What a sound file is allowed hides none that is not."""
    kind, flow, change = DEFECTS[what]
    changed, op = _with(build(kind, flow), change)

    errors = _localized(maker, changed, kind)

    assert op in _blamed(errors), errors
