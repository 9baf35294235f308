"""Ops of a quantized file and of a float file of the same model, paired in order."""

from __future__ import annotations

import pytest

from fixtures.models import (
    ConcatSkip,
    LayerNormGelu,
    LstmNet,
    ResidualNet,
    SelfAttention,
    SmallModel,
    SqueezeExcite,
)
from pytest_edgeq.localize.structure import Pairs, pair_ops
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.tflite.float_form import write_in_float
from pytest_edgeq.tflite.ops import HOLDING
from tests.bench.detection.flatfile import FlatFile
from tests.localize.builds import Build

MODELS = [
    ResidualNet,
    ConcatSkip,
    LayerNormGelu,
    SelfAttention,
    SqueezeExcite,
    LstmNet,
]
RECIPES = ["recipe_static_wi8_ai8", "recipe_static_wi8_ai16", "recipe_dynamic_wi8_afp32"]


def paired(file: EdgeFile, form: EdgeFile) -> Pairs:
    """Pair two files whose inputs stand in the same order."""
    one, two = (each.graph.subgraphs[0] for each in (file, form))
    inputs = ([border.tensor.index for border in each.signature.inputs] for each in (file, form))
    return pair_ops(one, two, dict(zip(*inputs, strict=True)))


@pytest.mark.sweep(5)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", MODELS)
def test_every_op_of_a_recipe_has_its_partner(
    build: Build, kind: type[SmallModel], recipe: str
) -> None:
    """The recipe quantizes the float file and changes none of its ops."""
    quantized = build(kind, recipe)
    assert quantized.float_edge is not None
    pairs = paired(quantized.edge, quantized.float_edge)
    assert not pairs.unpaired
    assert not pairs.unused
    for number, partner in pairs.ops.items():
        op = quantized.graph.subgraphs[0].ops[number]
        assert op.name == partner.name
        wanted = [pairs.float_source(index) for index in partner.inputs if index >= 0]
        found = [pairs.partner(index) for index in op.inputs if index >= 0]
        assert all(a in (None, b) for a, b in zip(found, wanted, strict=False)), op


@pytest.mark.sweep(2)
@pytest.mark.parametrize("kind", MODELS)
def test_a_file_and_what_was_written_of_it_in_float(build: Build, kind: type[SmallModel]) -> None:
    """All but the ops that hold their input, each with itself."""
    quantized = build(kind, "pt2e_static_int8")
    form = write_in_float(quantized.graph)
    pairs = paired(quantized.edge, EdgeFile(form))
    wanted = {op.index for op in quantized.graph.subgraphs[0].ops if op.name not in HOLDING}
    assert set(pairs.ops) == wanted
    assert all(
        (op.name, op.outputs) == (partner.name, partner.outputs)
        for op, partner in ((quantized.graph.subgraphs[0].ops[n], p) for n, p in pairs.ops.items())
    )


def test_ops_keep_their_partners_where_all_shapes_differ(build: Build) -> None:
    """As behind another stride."""
    quantized = build(ResidualNet, "recipe_static_wi8_ai8")
    file = FlatFile(quantized.tflite)
    for number in range(len(file.operators)):
        for index in file.operators[number].outputs:
            shape = file.tensor(index).shape
            if len(shape) == 4 and shape[1] > 1:
                file.tensor(index).shape = [shape[0], shape[1] // 2 or 1, shape[2] // 2, shape[3]]
    assert quantized.float_edge is not None
    pairs = paired(EdgeFile(file.content()), quantized.float_edge)
    assert not pairs.unpaired
    assert not pairs.unused


def test_what_one_side_alone_has_is_told(build: Build) -> None:
    """Another model's ops find no partners but where they are alike."""
    one, two = (build(kind, None).edge for kind in (ResidualNet, SqueezeExcite))
    pairs = paired(one, two)
    names = [op.name for op in one.graph.subgraphs[0].ops if op.name not in HOLDING]
    assert len(pairs.ops) + len(pairs.unpaired) == len(names)
    assert pairs.unpaired
    assert pairs.unused
