"""What the converter makes of sound models in its own way, and defects of the same places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fixtures.models import LstmNet, SmallModel, integers, normal, samples, seeded
from pytest_edgeq import Edgeq, QuantizedModel
from tests.detection.flatfile import FlatFile
from tests.localize.builds import PT2E, STATIC, Build, blamed, localized

pytestmark = pytest.mark.slow


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


class Smooth(SmallModel):
    """An error function, of which the converter makes two polynomials, and a threshold."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 4)
        self.threshold = nn.Threshold(0.1, 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give scores."""
        x = self.first(x)
        scores: torch.Tensor = self.last(self.threshold(x * (1 + torch.erf(x / 2**0.5))))
        return scores

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Six features of four things."""
        return (2 * normal(4, 6, seed=seed),)


class Soft(SmallModel):
    """A softplus: beyond 20, which nothing is, it is what it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Softplus(), nn.Linear(6, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give scores."""
        scores: torch.Tensor = self.layers(x)
        return scores

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Six features of eight things."""
        return (2 * normal(8, 6, seed=seed),)


class Alone(SmallModel):
    """An attention of one token, whose softmax the converter takes apart: 1 is left of it."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.value, self.head = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give six numbers for each of four."""
        shares = (self.query(x) @ x.transpose(1, 2)).softmax(-1)
        numbers: torch.Tensor = self.head(shares @ self.value(x))
        return numbers

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """One token of each of four."""
        return (normal(4, 1, 6, seed=seed),)


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


class Fused(SmallModel):
    """Branches weighed by parameters that are normalised at each run."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 1)
        self.shares = nn.Parameter(torch.tensor([0.9, 1.0]))
        self.last = nn.Conv2d(4, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give an image of the same size."""
        shares = torch.relu(self.shares)
        shares = shares / (shares.sum() + 1e-4)
        image: torch.Tensor = self.last(shares[0] * self.first(x) + shares[1] * self.second(x))
        return image

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """An image."""
        return (normal(1, 3, 6, 6, seed=seed),)


class Uneven(Fused):
    """One branch weighs far more: the converter (litert-torch 0.10.0) cuts its share to 0.25."""

    def __init__(self) -> None:
        super().__init__()
        self.shares.data = torch.tensor([0.9, 0.3])


class Standardised(SmallModel):
    """Convolutions whose weights are normalised in the graph, as BiT's and NFNet's are."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv2d(3, 3, 3, padding=1) for _ in range(2)]
        self.weights = nn.ParameterList(layer.weight for layer in layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give an image of the same size."""
        for weight in self.weights:
            apart = weight - weight.mean((1, 2, 3), keepdim=True)
            spread = weight.var((1, 2, 3), keepdim=True, unbiased=False)
            weight = 0.2 * apart / torch.sqrt(spread + 1e-5)
            x = torch.relu(functional.conv2d(x, weight, padding=1))
        return x

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """An image."""
        return (normal(1, 3, 8, 8, seed=seed),)


class Shared(SmallModel):
    """An input that goes to a convolution and to a pool, whose range is somewhat narrower."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 1)
        self.first.bias = nn.Parameter(torch.tensor([0.1, -0.1, 0.1, 0.1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give scores."""
        parts = (torch.relu(self.first(x)), torch.relu(self.second(functional.avg_pool2d(x, 2))))
        return torch.cat([each.mean((2, 3)) for each in parts], 1)

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """An image of one colour, more or less."""
        return (normal(1, 3, 1, 1, seed=seed) + 0.05 * normal(1, 3, 8, 8, seed=seed + 99),)


class Bytes(SmallModel):
    """Pixels as they come, brought to their range by a number in the code."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give an image."""
        image: torch.Tensor = self.first(x * (1 / 127.5))
        return image

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """An image of 0 to 255."""
        return (integers(1, 3, 6, 6, below=256, seed=seed).float(),)


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


@pytest.mark.parametrize(
    ("kind", "flow"),
    [
        *((Patched, flow) for flow in (STATIC, PT2E)),
        *((Curved, flow) for flow in (STATIC, None)),
        *((Smooth, flow) for flow in (STATIC, PT2E, None)),
        *((Projected, flow) for flow in (STATIC, None)),
        *((Turned, flow) for flow in (STATIC, None)),
        *((Scaled, flow) for flow in (STATIC, PT2E)),
        *((Standardised, flow) for flow in (STATIC, PT2E)),
        (Shared, PT2E),
        *((Fused, flow) for flow in (STATIC, PT2E)),
        (BothWays, None),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_the_converter_may_do_is_matched_and_not_blamed(
    maker: Edgeq, build: Build, kind: type[SmallModel], flow: str | None
) -> None:
    """Every op is measured, and none computes anything else."""
    errors = localized(maker, build(kind, flow), kind)

    assert [row.name for row in errors.rows if not row.matched] == []
    assert blamed(errors) == {}
    # Each is held against torch by itself but for a padding, which is its convolution's.
    # Of codes that are compared near ties may go either way.
    unbound = {"PAD", "REVERSE_V2", "LESS_EQUAL"}
    assert {row.op for row in errors.rows if row.excess_lsb is None} <= unbound


def test_what_a_branch_loses_that_is_not_taken_blames_nothing(maker: Edgeq, build: Build) -> None:
    """The range of both branches is that of the one which is taken: the other's is cut off."""
    errors = localized(maker, build(Soft, STATIC), Soft)

    (select,) = (row for row in errors.rows if row.op.startswith("SELECT"))
    cut_off = [
        row
        for row in errors.rows[: select.index]
        if row.local_sqnr_db is not None and row.local_sqnr_db < 10
    ]
    assert cut_off, "nothing is cut off: the model says nothing"
    assert {row.verdict for row in cut_off} == {"sound"}, errors
    assert errors.culprit not in cut_off


def test_a_softmax_of_one_value_is_not_blamed(maker: Edgeq, build: Build) -> None:
    """Though it divides a value by itself, which torch does nowhere."""
    errors = localized(maker, build(Alone, None), Alone)

    assert [row.name for row in errors.rows if not row.matched] == []
    assert any(row.op == "DIV" for row in errors.rows), "the model says nothing"
    assert blamed(errors) == {}


def test_a_graph_that_holds_for_any_batch_is_taken_at_the_samples_size(maker: Edgeq) -> None:
    """That of training: a recurrent layer starts from as many zeros as it is given sequences."""

    def train(prepared: Any) -> None:
        for each in samples(LstmNet, 16):
            prepared(*each)

    quantized = maker.quantize(
        seeded(LstmNet), LstmNet.sample_inputs(), quantizer="pt2e_qat_int8", train=train
    )
    errors = localized(maker, quantized, LstmNet)

    assert [row.name for row in errors.rows if not row.matched] == []
    assert blamed(errors) == {}


def test_what_the_file_computes_from_constants_alone(maker: Edgeq, build: Build) -> None:
    """Is held against torch's constant where it is taken, up to what its steps round."""
    quantized = build(Placed, STATIC)
    sound = localized(maker, quantized, Placed)
    assert [row.name for row in sound.rows if not row.matched] == []
    assert blamed(sound) == {}

    def one_code(file: FlatFile) -> int:
        (resize,) = _ops(file, "RESIZE_BILINEAR")
        table = _operand(file, resize)
        codes = file.constant(table)
        assert codes is not None
        codes.flat[0] += np.int8(20 if codes.flat[0] < 0 else -20)
        file.store(table, codes)
        return resize

    content = FlatFile(quantized.tflite)
    resize = one_code(content)
    spoilt = maker.load(content.content(), reference=seeded(Placed))
    assert resize in blamed(localized(maker, spoilt, Placed))


def test_a_number_that_the_file_rounds_is_a_part_of_the_bound(maker: Edgeq, build: Build) -> None:
    """Of a file that was given no simulated graph tells that it is 32 steps of 2⁻¹²."""
    given = maker.load(build(Bytes, PT2E).tflite, reference=seeded(Bytes))
    errors = localized(maker, given, Bytes)

    assert blamed(errors) == {}, errors

    def another(file: FlatFile) -> int:
        op = _ops(file, "MUL")[0]
        tensor = _operand(file, op)
        codes = file.constant(tensor)
        assert codes is not None
        file.store(tensor, codes + np.int8(1))
        return op

    content = FlatFile(given.tflite)
    op = another(content)
    spoilt = maker.load(content.content(), reference=seeded(Bytes))
    assert op in blamed(localized(maker, spoilt, Bytes))


def test_a_range_that_is_a_parts_alone_is_blamed_where_it_cuts(maker: Edgeq, build: Build) -> None:
    """The converter gives shares that torch quantizes one by one the scale of the last."""
    errors = localized(maker, build(Uneven, PT2E), Uneven)

    assert [row.name for row in errors.rows if not row.matched] == []
    assert errors.culprit is not None
    assert errors.culprit.op == "DIV"
    assert "its range [0, 0.25] is too narrow" in errors.cause


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


def _channel_scale(factor: float) -> Callable[[FlatFile], int]:
    """One channel's scale of a weight that the file quantizes at each run."""

    def change(file: FlatFile) -> int:
        op = _ops(file, "QUANTIZE")[0]
        tensor = int(file.operators[op].outputs[0])
        scales = np.array(file.scales(tensor), np.float32)
        scales[1] *= np.float32(factor)
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
    "a weight's scale that is narrower": (Standardised, PT2E, _channel_scale(0.9)),
    "a weight's scale that is wider": (Standardised, PT2E, _channel_scale(1.1)),
    "a quarter taken twice": (Patched, STATIC, _quarter_repeated),
    "the 1 of an ELU": (Curved, None, _constant("SUB", lambda v: v * 0.9)),
    "a factor of an error function": (Smooth, None, _constant("ADD", lambda v: v * 1.5, 3)),
    "a step taken twice": (BothWays, None, _step_repeated),
    "a bias that holds another layer's": (Projected, None, _bias_lost),
    "a bias in the constant behind": (Projected, None, _constant("ADD", lambda v: v * 0.8, -1)),
}


@pytest.mark.parametrize("what", DEFECTS)
def test_a_defect_of_the_same_place_is_found(maker: Edgeq, build: Build, what: str) -> None:
    """What a sound file is allowed hides none that is not."""
    kind, flow, change = DEFECTS[what]
    changed, op = _with(build(kind, flow), change)

    errors = localized(maker, changed, kind)

    # Scales of channels belong to the op that gives the codes, and to the one that moves them.
    ops = {op, op + 1} if "weight's scale" in what else {op}
    assert ops & blamed(errors).keys(), errors
