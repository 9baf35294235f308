"""Ops that torch has nothing like, on real files: named, and told what torch does instead."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from ai_edge_litert import schema_py_generated as schema
from torch import nn

from fixtures.models import ResidualNet, SmallModel, SqueezeExcite, normal, samples, seeded
from pytest_edgeq import Edgeq
from pytest_edgeq.localize.rows import LOWERING, LayerErrors
from tests.detection.flatfile import FlatFile
from tests.detection.nets import DsCnn

pytestmark = pytest.mark.slow

FLOWS = ("pt2e_static_int8", "recipe_static_wi8_ai8")


class Gated(SmallModel):
    """A gate as recurrent cells have it, an ELU, and rows in another order."""

    order: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.new = nn.Linear(8, 8), nn.Linear(8, 8)
        self.last = nn.Linear(8, 4)
        self.register_buffer("order", torch.tensor([2, 0, 3, 1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give scores a row."""
        x = torch.sigmoid(self.gate(x)) * x + torch.tanh(self.new(x))
        x = nn.functional.elu(2 * x)
        scores: torch.Tensor = self.last(x.index_select(1, self.order) - x)
        return scores

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Four rows."""
        return (normal(1, 4, 8, seed=seed),)


Spoil = Callable[[FlatFile], int]
Localize = Callable[[type[SmallModel], str, Spoil], tuple[LayerErrors, int]]


@pytest.fixture(scope="module")
def localize(tmp_path_factory: pytest.TempPathFactory) -> Localize:
    """Localize a spoilt file beside its torch module alone; also gives the op that was spoilt."""
    maker = Edgeq(directory=tmp_path_factory.mktemp("foreign"))
    known: dict[tuple[type[SmallModel], str], bytes] = {}

    def run(kind: type[SmallModel], flow: str, spoil: Spoil) -> tuple[LayerErrors, int]:
        if (kind, flow) not in known:
            known[kind, flow] = maker.quantize(
                seeded(kind),
                kind.sample_inputs(),
                quantizer=flow,
                calibration=samples(kind, 32, seed=1),
            ).tflite
        file = FlatFile(known[kind, flow])
        op = spoil(file)
        loaded = maker.load(file.content(), reference=seeded(kind))
        return maker.localize(loaded, samples(kind, 3, seed=2)), op

    return run


def _first(file: FlatFile, name: str, place: int = 0) -> int:
    return [i for i in range(len(file.operators)) if file.name(i) == name][place]


def _code(file: FlatFile, name: str) -> int:
    code = schema.OperatorCodeT()
    code.builtinCode = getattr(schema.BuiltinOperator, name)
    code.deprecatedBuiltinCode = code.builtinCode
    file.model.operatorCodes.append(code)
    return len(file.model.operatorCodes) - 1


def _become(was: str, name: str) -> Spoil:
    """Exchange an op's code."""

    def spoil(file: FlatFile) -> int:
        op = _first(file, was)
        file.operators[op].opcodeIndex = _code(file, name)
        return op

    return spoil


def _insert(behind: str, name: str) -> Spoil:
    """Put an op between another and what reads it."""

    def spoil(file: FlatFile) -> int:
        op = _first(file, behind, -1)
        made = int(file.operators[op].outputs[0])
        file.graph.tensors.append(copy.copy(file.tensor(made)))
        file.tensor(made).name, new = b"before", len(file.graph.tensors) - 1
        for reader in file.readers(made):
            inputs = file.operators[reader].inputs
            file.operators[reader].inputs = [new if i == made else i for i in inputs]
        file.graph.outputs = [new if i == made else i for i in file.graph.outputs]
        for signature in file.model.signatureDefs or ():
            for border in signature.outputs:
                border.tensorIndex = new if border.tensorIndex == made else border.tensorIndex
        inserted = schema.OperatorT()
        inserted.opcodeIndex, inserted.inputs, inserted.outputs = _code(file, name), [made], [new]
        file.graph.operators.insert(op + 1, inserted)
        return op + 1

    return spoil


def _read_twice(file: FlatFile) -> int:
    op = _first(file, "ADD")
    first = int(file.operators[op].inputs[0])
    file.operators[op].inputs = [first, first]
    return op


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize(
    ("kind", "spoil", "name"),
    [
        (SqueezeExcite, _become("MEAN", "SUM"), "SUM"),
        (SqueezeExcite, _become("LOGISTIC", "TANH"), "TANH"),
        (ResidualNet, _insert("FULLY_CONNECTED", "ABS"), "ABS"),
        (ResidualNet, _insert("FULLY_CONNECTED", "RELU6"), "RELU6"),
        (ResidualNet, _read_twice, "ADD"),
    ],
    ids=["SUM for MEAN", "TANH for LOGISTIC", "ABS at the end", "RELU6 at the end", "one twice"],
)
def test_an_op_that_torch_has_nothing_like_is_named(
    localize: Localize, flow: str, kind: type[SmallModel], spoil: Spoil, name: str
) -> None:
    """Itself, not the op behind."""
    errors, op = localize(kind, flow, spoil)

    assert errors.culprit is not None, f"not found:\n{errors}"
    assert (errors.culprit.index, errors.culprit.op) == (op, name), f"got:\n{errors}"
    assert errors.culprit.verdict == LOWERING


@pytest.mark.parametrize("flow", FLOWS)
def test_an_op_that_reads_the_wrong_tensor_is_named_itself(localize: Localize, flow: str) -> None:
    """Not what makes that tensor."""

    def spoil(file: FlatFile) -> int:
        last, before = (_first(file, "CONV_2D", place) for place in (-1, -2))
        inputs = file.operators[last].inputs
        file.operators[last].inputs = [file.operators[before].inputs[0], *inputs[1:]]
        return last

    errors, op = localize(ResidualNet, flow, spoil)

    assert errors.culprit is not None, f"not found:\n{errors}"
    assert errors.culprit.index == op, f"got:\n{errors}"
    assert errors.culprit.verdict == LOWERING


def test_padding_that_is_not_torch_s_is_named(localize: Localize) -> None:
    """The PAD in front, not the convolution that stands for both."""

    def spoil(file: FlatFile) -> int:
        op = _first(file, "PAD")
        amounts = file.constant(int(file.operators[op].inputs[1]))
        assert amounts is not None
        amounts[1] = (amounts[1].sum(), 0)
        file.store(int(file.operators[op].inputs[1]), amounts)
        return op

    errors, op = localize(DsCnn, "pt2e_static_int8", spoil)

    assert errors.culprit is not None, f"not found:\n{errors}"
    assert errors.culprit.index == op, f"got:\n{errors}"
    assert (
        "constant operand 1: expected [0, 0, 1, 1, 1, 1, …], got [0, 0, 2, 0, 1, 1" in errors.cause
    )


@pytest.mark.parametrize("flow", FLOWS)
def test_a_sigmoid_that_claims_another_zero_point_is_named(localize: Localize, flow: str) -> None:
    """Its kernel writes one scale and zero point, whatever the file says."""

    def spoil(file: FlatFile) -> int:
        op = _first(file, "LOGISTIC")
        quantization = file.tensor(int(file.operators[op].outputs[0])).quantization
        quantization.zeroPoint = [-125]
        return op

    errors, op = localize(SqueezeExcite, flow, spoil)

    assert errors.culprit is not None, f"not found:\n{errors}"
    assert errors.culprit.index == op, f"got:\n{errors}"
    assert "its output has zero point -125, where the kernel has -128 (+3)" in errors.cause


@pytest.mark.parametrize("flow", FLOWS)
def test_a_fused_clamp_that_torch_has_not_is_named(localize: Localize, flow: str) -> None:
    """Also where it is no more than a range that is cut off."""

    def spoil(file: FlatFile) -> int:
        none = schema.ActivationFunctionType.NONE
        op = next(
            i
            for i, each in enumerate(file.operators)
            if file.name(i) == "CONV_2D" and each.builtinOptions.fusedActivationFunction == none
        )
        file.operators[
            op
        ].builtinOptions.fusedActivationFunction = schema.ActivationFunctionType.RELU
        return op

    errors, op = localize(ResidualNet, flow, spoil)

    assert errors.culprit is not None, f"not found:\n{errors}"
    assert errors.culprit.index == op, f"got:\n{errors}"
    assert errors.culprit.verdict == LOWERING


def test_values_that_are_nearly_alike_blame_no_op(tmp_path: Path) -> None:
    """Calibrated with an outlier, all codes are near to other nodes', which says nothing."""
    maker = Edgeq(directory=tmp_path)
    outlier = [(each * 1000,) for (each,) in samples(ResidualNet, 1, seed=1)]
    quantized = maker.quantize(
        seeded(ResidualNet),
        ResidualNet.sample_inputs(),
        quantizer="pt2e_static_int8",
        calibration=[*samples(ResidualNet, 31, seed=1), *outlier],
    )

    errors = maker.localize(quantized, samples(ResidualNet, 3, seed=2))

    assert [row.findings for row in errors.rows if row.findings] == []
    assert "too wide a range: either a calibration sample is an outlier" in errors.cause


def _reads(reader: str, place: int, other: str) -> Spoil:
    """Let an op read what the first op of another name gives."""

    def spoil(file: FlatFile) -> int:
        op = _first(file, reader)
        inputs = [int(i) for i in file.operators[op].inputs]
        inputs[place] = int(file.operators[_first(file, other)].outputs[0])
        file.operators[op].inputs = inputs
        return op

    return spoil


def _quantize_reads(other: str) -> Spoil:
    """Let the QUANTIZE of what a SELECT chooses read what the first op of another name gives."""

    def spoil(file: FlatFile) -> int:
        select = next(i for i in range(len(file.operators)) if file.name(i).startswith("SELECT"))
        makers = [file.producer(int(i)) for i in file.operators[select].inputs]
        op = next(i for i in makers if i is not None and file.name(i) == "QUANTIZE")
        file.operators[op].inputs = [int(file.operators[_first(file, other)].outputs[0])]
        return op

    return spoil


def _rolled_indices(file: FlatFile) -> int:
    op = _first(file, "GATHER_ND")
    tensor = int(file.operators[op].inputs[1])
    indices = file.constant(tensor)
    assert indices is not None
    file.store(tensor, np.roll(indices, 1, axis=0))
    return op


@pytest.mark.parametrize(
    "spoil",
    [
        _reads("ADD", 0, "LOGISTIC"),
        _reads("ADD", 0, "TANH"),
        _quantize_reads("EXP"),
        _rolled_indices,
    ],
    ids=["a product passed by", "one value twice", "QUANTIZE", "indices"],
)
def test_an_op_that_is_wired_or_indexed_otherwise_is_named(
    localize: Localize, spoil: Spoil
) -> None:
    """Also where nothing behind it is recognised any more, and where it only hands values on."""
    errors, op = localize(Gated, "recipe_static_wi8_ai8", spoil)

    assert errors.culprit is not None, f"not found:\n{errors}"
    # What only holds a value in other codes is told where it is read.
    ops = {op, op + 1} if errors.rows[op].op == "QUANTIZE" else {op}
    assert errors.culprit.index in ops, f"got:\n{errors}"
    assert errors.culprit.verdict == LOWERING


@pytest.mark.parametrize("flow", [*FLOWS, "recipe_dynamic_wi8_afp32"])
def test_a_gate_an_elu_and_rows_in_another_order_are_sound(localize: Localize, flow: str) -> None:
    """Every op is measured, and none is blamed."""
    errors, _ = localize(Gated, flow, lambda _: 0)

    assert [row.name for row in errors.rows if not row.matched] == []
    assert [row.name for row in errors.rows if row.verdict == LOWERING] == []


class Attention(SmallModel):
    """An attention whose mask is by far the most of what its softmax takes."""

    def __init__(self, *, turned: bool = False) -> None:
        super().__init__()
        self.keys, self.values = nn.Linear(6, 6), nn.Linear(6, 6)
        mask = torch.full((5, 5), -100.0).triu(1)
        self.register_buffer("mask", mask.T.contiguous() if turned else mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give as many tokens."""
        shares = torch.softmax(0.4 * (x @ self.keys(x).transpose(1, 2)) + self.mask, -1)
        mixed: torch.Tensor = shares @ self.values(x)
        return mixed

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Five tokens."""
        return (normal(2, 5, 6, seed=seed),)


def test_a_mask_that_lies_otherwise_blames_what_adds_it(localize: Localize) -> None:
    """Not the softmax, though nearly all that it takes is torch's, turned."""
    sound, _ = localize(Attention, "pt2e_static_int8", lambda _: 0)
    assert [row.name for row in sound.rows if row.verdict == LOWERING] == []

    class Turned(Attention):
        def __init__(self) -> None:
            super().__init__(turned=True)

    maker = Edgeq()
    content = maker.quantize(
        seeded(Attention),
        Attention.sample_inputs(),
        quantizer="pt2e_static_int8",
        calibration=samples(Attention, 8, seed=1),
    ).tflite
    loaded = maker.load(content, reference=seeded(Turned))
    errors = maker.localize(loaded, samples(Attention, 3, seed=2))

    assert errors.culprit is not None
    assert errors.culprit.op == "ADD", errors


class Modulated(SmallModel):
    """Waves of one value, a scale and a shift out of these, and two ways to pool."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.both, self.head = nn.Linear(4, 6), nn.Linear(12, 16), nn.Linear(16, 3)
        self.lift = nn.Linear(5, 8)

    def forward(self, x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        """Give scores."""
        phase = self.time(step)
        scale, shift = self.both(torch.cat([phase.sin(), phase.cos()], -1)).chunk(2, -1)
        y = torch.relu(self.lift(x) * (1 + scale) + shift)
        scores: torch.Tensor = self.head(torch.cat([y.mean(1), y.amax(1)], -1))
        return scores

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Six things, and a step."""
        return normal(1, 6, 5, seed=seed), normal(1, 1, 4, seed=seed + 50)


def _slices_exchanged(file: FlatFile) -> int:
    """The shift for the scale; gives what takes it first."""
    first, second = (file.operators[_first(file, "SLICE", place)] for place in (0, 1))
    first.inputs, second.inputs = second.inputs, first.inputs
    return next(
        i
        for i in range(len(file.operators))
        if file.name(i) == "ADD"
        and any(file.constant(int(t)) is not None for t in file.operators[i].inputs)
    )


@pytest.mark.parametrize(
    ("spoil", "flow"),
    [
        *((_become("SIN", "COS"), flow) for flow in FLOWS),
        (_become("COS", "SIN"), FLOWS[1]),
        *((_become("MEAN", "REDUCE_MAX"), flow) for flow in FLOWS),
        (_slices_exchanged, FLOWS[1]),
    ],
    ids=[
        *(f"COS for SIN {flow}" for flow in FLOWS),
        "SIN for COS",
        *(f"REDUCE_MAX for MEAN {flow}" for flow in FLOWS),
        "slices",
    ],
)
def test_what_is_done_twice_or_to_another_part_is_named(
    localize: Localize, spoil: Spoil, flow: str
) -> None:
    """Each op gives what some torch call gives, or takes what one takes, and is wrong here."""
    errors, op = localize(Modulated, flow, spoil)

    assert errors.culprit is not None, f"not found:\n{errors}"
    # Of two parts that are exchanged either is another.
    is_slice = spoil is _slices_exchanged and errors.culprit.op == "SLICE"
    assert is_slice or errors.culprit.index == op, f"got:\n{errors}"


@pytest.mark.parametrize("flow", [*FLOWS, "recipe_dynamic_wi8_afp32"])
def test_waves_scales_and_pools_are_sound(localize: Localize, flow: str) -> None:
    """Every op is measured, and none is blamed."""
    errors, _ = localize(Modulated, flow, lambda _: 0)

    assert [row.name for row in errors.rows if not row.matched] == []
    assert [row.name for row in errors.rows if row.verdict == LOWERING] == []


class Shuffled(SmallModel):
    """A part of the channels, shuffled, between convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 9, 3, padding=1), nn.Conv2d(6, 4, 3, padding=1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give rows."""
        x = torch.relu(self.first(x))[:, 2:8]
        x = x.reshape(1, 2, 3, 8, 8).transpose(1, 2).reshape(1, 6, 8, 8)
        rows: torch.Tensor = self.head(torch.relu(self.last(x)).transpose(2, 3))
        return rows

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """An image."""
        return (normal(1, 3, 8, 8, seed=seed),)


def _begins_earlier(file: FlatFile) -> int:
    op = _first(file, "SLICE")
    begin = int(file.operators[op].inputs[1])
    values = file.constant(begin)
    assert values is not None
    file.store(begin, np.where(values > 0, values - 1, values).astype(values.dtype))
    return op


def _rows_for_columns(file: FlatFile) -> int:
    """The image with its axes in another order, in front of the first convolution."""
    op = _first(file, "TRANSPOSE")
    axes = int(file.operators[op].inputs[1])
    file.store(axes, np.array([0, 3, 2, 1], np.int32))
    return op


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("spoil", [_begins_earlier, _rows_for_columns])
def test_an_op_that_moves_otherwise_is_named_itself(
    localize: Localize, flow: str, spoil: Spoil
) -> None:
    """Not the product behind, which computes rightly what it is given."""
    errors, op = localize(Shuffled, flow, spoil)

    assert errors.culprit is not None, f"not found:\n{errors}"
    assert errors.culprit.index == op, f"got:\n{errors}"
    assert errors.culprit.verdict == LOWERING


@pytest.mark.parametrize("flow", FLOWS)
def test_parts_and_turns_are_sound(localize: Localize, flow: str) -> None:
    """Every op is measured, and none is blamed."""
    errors, _ = localize(Shuffled, flow, lambda _: 0)

    assert [row.name for row in errors.rows if not row.matched] == []
    assert [row.name for row in errors.rows if row.verdict == LOWERING] == []


class Dotted(SmallModel):
    """An attention whose query and key are each multiplied by one number."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give as many tokens."""
        parts = self.parts(x).chunk(3, -1)
        query, key, value = (part.reshape(1, 5, 2, 4).transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        tokens: torch.Tensor = mixed.transpose(1, 2).reshape(1, 5, 8)
        return tokens

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Five tokens."""
        return (2 * normal(1, 5, 8, seed=seed),)


def _other_factor(file: FlatFile) -> int:
    """Of both products: they share the number."""
    op = _first(file, "MUL")
    (number,) = (i for i in map(int, file.operators[op].inputs) if file.constant(i) is not None)
    scales = np.array(file.scales(number), np.float32) * np.float32(1.1)
    file.tensor(number).quantization.scale = scales
    return op


def test_a_number_that_is_not_torch_s_is_named(localize: Localize) -> None:
    """Though what it makes stands for a torch call only with others that round in between."""
    flow = "recipe_static_wi8_ai8"
    sound, _ = localize(Dotted, flow, lambda _: 0)
    assert [row.name for row in sound.rows if row.verdict == LOWERING] == []

    errors, op = localize(Dotted, flow, _other_factor)

    assert errors.culprit is not None, f"not found:\n{errors}"
    assert errors.culprit.index == op, f"got:\n{errors}"
    assert errors.culprit.verdict == LOWERING


class Beside(SmallModel):
    """A layer whose result is taken before its ReLU and behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(6, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give features."""
        x = self.lift(x)
        return x - torch.relu(x)

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Four things."""
        return (normal(4, 6, seed=seed),)


@pytest.mark.parametrize("flow", FLOWS)
def test_a_layer_that_is_there_with_its_relu_and_without_is_sound(
    localize: Localize, flow: str
) -> None:
    """The converter writes one op for each."""
    errors, _ = localize(Beside, flow, lambda _: 0)

    assert [row.name for row in errors.rows if row.verdict == LOWERING] == [], errors
