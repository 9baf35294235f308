"""Ops of a quantized file and of a float file of the same model, paired in order."""

from __future__ import annotations

from fixtures.models import ResidualNet, SqueezeExcite
from pytest_edgeq.localize.structure import paired
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.tflite.ops import HOLDING
from tests.bench.detection.flatfile import FlatFile
from tests.localize.builds import Build


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
