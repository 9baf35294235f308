"""Ops that torch has nothing like, in files that are loaded with their torch module alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from ai_edge_litert import schema_py_generated as schema
from torch import nn

from fixtures.models import ResidualNet, SmallModel, SqueezeExcite, seeded, small_model
from fixtures.models.idioms import IDIOMS
from pytest_edgeq import Edgeq
from pytest_edgeq.localize.rows import LOWERING
from tests.bench.detection.edits import Change, edited, ops_of
from tests.bench.detection.flatfile import FlatFile
from tests.bench.detection.nets import DsCnn
from tests.localize.builds import PT2E, STATIC, Build, blamed, localized
from tests.localize.rows import culprit

pytestmark = pytest.mark.slow

GATED, MODULATED, SHUFFLED = (IDIOMS[name] for name in ("gated", "modulated", "shuffled"))


def _become(was: str, name: str) -> Change:
    """Exchange an op's code."""

    def spoil(file: FlatFile) -> int:
        op = ops_of(file, was)[0]
        code = schema.OperatorCodeT()
        code.builtinCode = code.deprecatedBuiltinCode = getattr(schema.BuiltinOperator, name)
        file.model.operatorCodes.append(code)
        file.operators[op].opcodeIndex = len(file.model.operatorCodes) - 1
        return op

    return spoil


def _insert(behind: str, name: str) -> Change:
    """Put an op between another and what reads it."""

    def spoil(file: FlatFile) -> int:
        op = ops_of(file, behind)[-1]
        made = int(file.operators[op].outputs[0])
        new = file.add_tensor(made, "inserted")
        file.reread(made, new, file.readers(made))
        file.rename_output(made, new)
        file.insert(op + 1, name, made, new, op)
        return op + 1

    return spoil


def _reads(reader: str, place: int, given: Callable[[FlatFile], int], which: int = 0) -> Change:
    """Let an op of a name read another tensor."""

    def spoil(file: FlatFile) -> int:
        op = ops_of(file, reader)[which]
        inputs = [int(i) for i in file.operators[op].inputs]
        inputs[place] = given(file)
        file.operators[op].inputs = inputs
        return op

    return spoil


def _given_by(name: str) -> Callable[[FlatFile], int]:
    return lambda file: int(file.operators[ops_of(file, name)[0]].outputs[0])


def _taken_by(name: str, which: int) -> Callable[[FlatFile], int]:
    return lambda file: int(file.operators[ops_of(file, name)[which]].inputs[0])


def _chosen_by_another(file: FlatFile) -> int:
    """Let the QUANTIZE of what a SELECT chooses read what the EXP gives."""
    (select,) = ops_of(file, "SELECT_V2") or ops_of(file, "SELECT")
    makers = [file.producer(int(i)) for i in file.operators[select].inputs]
    op = next(i for i in makers if i is not None and file.name(i) == "QUANTIZE")
    file.operators[op].inputs = [_given_by("EXP")(file)]
    return op


def _constant(name: str, operand: int, change: Callable[[np.ndarray], None]) -> Change:
    """Change a constant that the first op of a name reads."""

    def spoil(file: FlatFile) -> int:
        op = ops_of(file, name)[0]
        edited(file, op, operand, change)
        return op

    return spoil


def _all_at_the_top(amounts: np.ndarray) -> None:
    amounts[1] = (amounts[1].sum(), 0)


def _rolled(indices: np.ndarray) -> None:
    indices[:] = np.roll(indices, 1, axis=0)


def _earlier(begin: np.ndarray) -> None:
    begin -= begin > 0


def _rows_for_columns(axes: np.ndarray) -> None:
    axes[:] = (0, 3, 2, 1)


def _other_zero_point(file: FlatFile) -> int:
    op = ops_of(file, "LOGISTIC")[0]
    file.tensor(int(file.operators[op].outputs[0])).quantization.zeroPoint = [-125]
    return op


def _clamped(file: FlatFile) -> int:
    kinds = schema.ActivationFunctionType
    op = next(
        i
        for i in ops_of(file, "CONV_2D")
        if file.operators[i].builtinOptions.fusedActivationFunction == kinds.NONE
    )
    file.operators[op].builtinOptions.fusedActivationFunction = kinds.RELU
    return op


def _other_factor(file: FlatFile) -> int:
    """Of both products: they share the number."""
    op = ops_of(file, "MUL")[0]
    (number,) = (i for i in map(int, file.operators[op].inputs) if file.constant(i) is not None)
    scales = np.array(file.scales(number), np.float32) * np.float32(1.1)
    file.tensor(number).quantization.scale = scales
    return op


#: What was changed: the model, the flows, the change, and what the cause says of it.
CHANGES: dict[str, tuple[type[SmallModel], tuple[str, ...], Change, str]] = {
    "SUM for MEAN": (SqueezeExcite, (PT2E, STATIC), _become("MEAN", "SUM"), ""),
    "ABS at the end": (ResidualNet, (PT2E, STATIC), _insert("FULLY_CONNECTED", "ABS"), ""),
    "one value twice": (ResidualNet, (PT2E, STATIC), _reads("ADD", 1, _taken_by("ADD", 0)), ""),
    "an earlier tensor": (
        *(ResidualNet, (PT2E, STATIC), _reads("CONV_2D", 0, _taken_by("CONV_2D", -2), -1), ""),
    ),
    "a clamp that torch has not": (ResidualNet, (PT2E, STATIC), _clamped, ""),
    "padding": (
        *(DsCnn, (PT2E,), _constant("PAD", 1, _all_at_the_top)),
        "constant operand 1: expected [0, 0, 1, 1, 1, 1, …], got [0, 0, 2, 0, 1, 1",
    ),
    "the zero point of a sigmoid": (
        *(SqueezeExcite, (PT2E, STATIC), _other_zero_point),
        "its output: expected the specification's zero point -128, got -125 (+3)",
    ),
    "a product passed by": (GATED, (STATIC,), _reads("ADD", 0, _given_by("LOGISTIC")), ""),
    "QUANTIZE": (GATED, (STATIC,), _chosen_by_another, ""),
    "indices": (GATED, (STATIC,), _constant("GATHER_ND", 1, _rolled), ""),
    "COS for SIN": (MODULATED, (PT2E, STATIC), _become("SIN", "COS"), ""),
    "REDUCE_MAX for MEAN": (MODULATED, (PT2E, STATIC), _become("MEAN", "REDUCE_MAX"), ""),
    "a slice begins earlier": (SHUFFLED, (PT2E, STATIC), _constant("SLICE", 1, _earlier), ""),
    "rows for columns": (
        SHUFFLED,
        (PT2E, STATIC),
        _constant("TRANSPOSE", 1, _rows_for_columns),
        "",
    ),
    "a shared factor": (IDIOMS["dotted"], (STATIC,), _other_factor, ""),
}


@pytest.mark.parametrize(
    ("what", "flow"),
    [
        pytest.param(what, flow, marks=pytest.mark.full if n else ())  # each in its first flow
        for what, (_, flows, *_) in CHANGES.items()
        for n, flow in enumerate(flows)
    ],
)
def test_the_op_that_was_changed_is_named(maker: Edgeq, build: Build, what: str, flow: str) -> None:
    """Itself, not the op behind it, also where it only moves values."""
    kind, _, change, told = CHANGES[what]
    file = FlatFile(build(kind, flow).tflite)
    op = change(file)

    errors = localized(maker, maker.load(file.content(), reference=seeded(kind)), kind)

    # What only holds a value in other codes is told where it is read.
    ops = {op, op + 1} if errors.rows[op].op == "QUANTIZE" else {op}
    assert culprit(errors).index in ops, f"got:\n{errors}"
    assert culprit(errors).verdict == LOWERING
    assert told in errors.cause


_MASK = torch.full((5, 5), -100.0).triu(1)


def _masked_by(mask: torch.Tensor) -> type[SmallModel]:
    """Return an attention whose mask is by far the most of what its softmax takes."""

    @small_model(
        (2, 5, 6), layers=lambda: {"keys": nn.Linear(6, 6), "values": nn.Linear(6, 6), "mask": mask}
    )
    def attention(m: Any, x: torch.Tensor) -> Any:
        shares = torch.softmax(0.4 * (x @ m.keys(x).transpose(1, 2)) + m.mask, -1)
        return shares @ m.values(x)

    return attention


def test_a_mask_that_lies_otherwise_blames_what_adds_it(maker: Edgeq, build: Build) -> None:
    """Not the softmax, though nearly all that it takes is torch's, turned."""
    attention = _masked_by(_MASK)
    quantized = build(attention, PT2E)
    sound = localized(maker, quantized, attention)
    assert [row.name for row in sound.rows if row.verdict == LOWERING] == []

    reference = seeded(_masked_by(_MASK.T.contiguous()))
    errors = localized(maker, maker.load(quantized.tflite, reference=reference), attention)

    assert culprit(errors).op == "ADD", errors


@small_model(
    (1, 4, 6, 6),
    layers=lambda: {
        "first": nn.Conv2d(4, 8, 3, padding=1),
        "last": nn.Conv2d(8, 4, 1),
        "order": torch.tensor([3, 1, 0, 2, 7, 5, 4, 6]),
    },
)
def _chosen(m: Any, x: torch.Tensor) -> Any:
    """Channels that an index puts in another order, between two convolutions."""
    return m.last(m.first(x).index_select(1, m.order))


def test_a_permutation_is_held_whatever_axes_of_length_1_it_counts(
    maker: Edgeq, build: Build
) -> None:
    """The float file puts the channels in front by one TRANSPOSE, and this one by a RESHAPE."""
    file = FlatFile(build(_chosen, PT2E).tflite)
    op = ops_of(file, "TRANSPOSE")[1]
    axes = file.constant(int(file.operators[op].inputs[1]))
    assert axes is not None
    assert axes.tolist() == [0, 3, 1, 2]
    sound = maker.load(file.content(), reference=seeded(_chosen))
    assert blamed(localized(maker, sound, _chosen)) == {}

    edited(file, op, 1, _rows_for_columns)
    errors = localized(maker, maker.load(file.content(), reference=seeded(_chosen)), _chosen)

    # The last one reads the same constant.
    readers = set(file.readers(int(file.operators[op].inputs[1])))
    assert blamed(errors).keys() == readers, errors
    assert op in readers


@small_model(
    (1, 3, 8, 8),
    layers=lambda: {
        "first": nn.Conv2d(3, 4, 1),
        **{name: nn.Conv2d(4, 4, 1) for name in ("both", "rows", "columns")},
    },
)
def _coordinates(m: Any, x: torch.Tensor) -> Any:
    """Gates of rows and of columns, of one layer that both go through side by side."""
    y = m.first(x)
    means = torch.cat([y.mean(3, keepdim=True), y.mean(2, keepdim=True).transpose(2, 3)], 2)
    rows, columns = m.both(means).split([8, 8], 2)
    gates = m.rows(rows).sigmoid() * m.columns(columns.transpose(2, 3)).sigmoid()
    return y * gates


def test_a_join_in_another_order_is_named_where_halves_have_each_others_values(
    maker: Edgeq, build: Build
) -> None:
    """What is split off again has torch's values, those of the other half."""
    file = FlatFile(build(_coordinates, PT2E).tflite)
    (op,) = ops_of(file, "CONCATENATION")
    file.operators[op].inputs = file.operators[op].inputs[::-1]

    loaded = maker.load(file.content(), reference=seeded(_coordinates))
    errors = localized(maker, loaded, _coordinates)

    assert culprit(errors).index == op, errors
