"""A file beside the one that the flow made: which constant of which op, and how it differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fixtures.models import ResidualNet, samples
from pytest_edgeq import Edgeq, QuantizedModel
from pytest_edgeq.localize.origin import origin_findings
from pytest_edgeq.runtimes.edge import EdgeFile
from tests.bench.detection.defects_file import defect
from tests.bench.detection.flatfile import FlatFile
from tests.localize.builds import STATIC, Build
from tests.localize.rows import culprit


@pytest.fixture
def built(build: Build) -> QuantizedModel:
    """Convolutions and a linear layer, in integers."""
    return build(ResidualNet, STATIC)


@pytest.mark.parametrize(
    ("name", "place", "change", "text"),
    [
        (
            *("CONV_2D", 1, lambda v: np.roll(v, 1, axis=0)),
            "its weight is not the one that the flow wrote: ",
        ),
        (
            *("FULLY_CONNECTED", 2, lambda v: v + 16),
            "its bias is not the one that the flow wrote: ",
        ),
        (
            *("TRANSPOSE", 1, lambda v: v[[0, 2, 1, 3]]),
            "its constant operand 1 is not the one that the flow wrote: ",
        ),
    ],
    ids=["weight", "bias", "axes"],
)
def test_a_constant_is_told_by_its_role_and_by_what_became_of_it(
    built: QuantizedModel, name: str, place: int, change: Callable[[Any], Any], text: str
) -> None:
    """Not by a number of bytes."""
    file = FlatFile(built.tflite)
    op = next(i for i in range(len(file.operators)) if file.name(i) == name)
    tensor = int(file.operators[op].inputs[place])
    values = file.constant(tensor)
    assert values is not None
    file.store(tensor, change(values).astype(values.dtype))

    found = origin_findings(EdgeFile(file.content()), built.edge)

    # One constant may stand in several ops.
    assert op in found
    (told,) = found[op]
    assert told.message.startswith(text), told
    assert "bytes" not in told.message
    assert "reference" not in told.message
    assert origin_findings(EdgeFile(built.tflite), built.edge) == {}


def test_a_kernel_of_another_shape_is_told(built: QuantizedModel) -> None:
    """Its values cannot be compared one by one."""
    file = FlatFile(built.tflite)
    op = next(i for i in range(len(file.operators)) if file.name(i) == "CONV_2D")
    weight = int(file.operators[op].inputs[1])
    values = file.constant(weight)
    assert values is not None
    before, cut = values.shape, np.ascontiguousarray(values[:, :2, :2])
    file.tensor(weight).shape = list(cut.shape)
    file.model.buffers[file.tensor(weight).buffer].data = cut.view(np.uint8).ravel()

    (told,) = origin_findings(EdgeFile(file.content()), built.edge)[op]

    shapes = f"expected shape {list(before)}, got {list(cut.shape)}"
    assert told.message == f"its weight is not the one that the flow wrote: {shapes}"


@pytest.mark.parametrize(("place", "role"), [(1, "weight"), (2, "bias")])
def test_a_constants_scale_is_held_against_the_flows(
    built: QuantizedModel, place: int, role: str
) -> None:
    """With the very codes that the flow wrote."""
    file = FlatFile(built.tflite)
    op = next(i for i in range(len(file.operators)) if file.name(i) == "FULLY_CONNECTED")
    quantization = file.tensor(int(file.operators[op].inputs[place])).quantization
    scales = np.asarray(quantization.scale, np.float32)
    quantization.scale = scales * np.float32(1.1)

    found = origin_findings(EdgeFile(file.content()), built.edge)

    assert {index: [each.message for each in wrong] for index, wrong in found.items()} == {
        op: [f"its {role}: expected the scale {scales[0]:.6g}, got {scales[0] * 1.1:.6g}"]
    }


@pytest.mark.parametrize("name", ["ADD", "CONV_2D"])
def test_an_op_that_was_left_in_float_is_told(
    built: QuantizedModel, maker: Edgeq, name: str
) -> None:
    """Though a range elsewhere, which the flow wrote as well, costs more."""
    seed, made = 0, None
    while made is None or name not in made.place:
        made = defect(built.tflite, "op made float", seed)
        seed += 1

    errors = maker.localize(built.with_tflite(made.tflite), samples(ResidualNet, 3, seed=2))

    assert made.origins[culprit(errors).index] in made.ops
    assert culprit(errors).findings == (
        "its output is float32, and int8 in the flow's own file: left in float",
    )


def test_the_op_whose_scale_was_changed_is_blamed(built: QuantizedModel, maker: Edgeq) -> None:
    """And not the TRANSPOSE behind it, whose own output still has the scale of the flow's file."""
    file = FlatFile(built.tflite)
    transpose = next(i for i in range(len(file.operators)) if file.name(i) == "TRANSPOSE" and i)
    operand = int(file.operators[transpose].inputs[0])
    quantization = file.tensor(operand).quantization
    quantization.scale = np.asarray(quantization.scale, np.float32) * np.float32(1.02)
    evaluation = list(samples(ResidualNet, 3, seed=2))

    errors = maker.localize(built.with_tflite(file.content()), evaluation)

    assert operand in file.operators[culprit(errors).index].outputs
    # Without the flow's file nothing tells which of the two scales was changed.
    loaded = maker.load(file.content(), reference=built.float_model)
    assert culprit(maker.localize(loaded, evaluation)).index == transpose
