"""A file written in float, held against the torch graph that rounds nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fixtures.models import (
    ConcatSkip,
    LayerNormGelu,
    ResidualNet,
    SelfAttention,
    SmallModel,
    samples,
    seeded,
)
from pytest_edgeq import Edgeq, QuantizedModel
from pytest_edgeq.litert import without_rounding
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.tflite.float_form import write_in_float
from tests.bench.detection.edits import ops_of, zeroed_channel
from tests.bench.detection.flatfile import FlatFile

APART_DB = 30.0
"""Weights of 8 bits, which are rounded on one side, leave more; a lost channel leaves less."""


@pytest.fixture(scope="module")
def maker() -> Edgeq:
    """Builds without a test's own fixture."""
    return Edgeq()


def built(maker: Edgeq, kind: type[SmallModel], flow: str) -> QuantizedModel:
    """Quantize a model with the weights of seed 0."""
    return maker.quantize(
        seeded(kind), kind.sample_inputs(), quantizer=flow, calibration=samples(kind, 8)
    )


def sqnr_db(quantized: QuantizedModel, content: bytes, kind: type[SmallModel]) -> float:
    """Return the SQNR in dB of a float file's first output to the graph's, worse of two."""
    simulated = quantized.simulated
    assert isinstance(simulated, torch.fx.GraphModule)
    graph, edge = without_rounding(simulated), EdgeFile(content)
    found = []
    for sample in samples(kind, 2, seed=1):
        made = edge.run(quantized.input_names, [each.numpy() for each in sample], "builtin")[0]
        with torch.no_grad():
            wanted = graph(*sample).double().numpy()
        noise = np.square(wanted - made.reshape(wanted.shape)).sum()
        found.append(10 * math.log10(np.square(wanted).sum() / noise))
    return min(found)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("flow", ["pt2e_static_int8", "pt2e_dynamic_int8"])
@pytest.mark.parametrize("kind", [ResidualNet, ConcatSkip, LayerNormGelu, SelfAttention])
def test_it_computes_what_torch_does(maker: Edgeq, kind: type[SmallModel], flow: str) -> None:
    """But for its weights, which are rounded."""
    quantized = built(maker, kind, flow)
    content = write_in_float(quantized.graph)
    edge = EdgeFile(content)
    assert not any(tensor.is_quantized for tensor in edge.graph.subgraphs[0].tensors)
    assert sqnr_db(quantized, content, kind) > APART_DB


def test_a_broken_file_is_as_broken_in_float(maker: Edgeq) -> None:
    """One channel of one weight is enough to tell."""
    quantized = built(maker, ResidualNet, "pt2e_static_int8")
    file = FlatFile(quantized.tflite)
    zeroed_channel(file, ops_of(file, "CONV_2D")[0], 1)
    broken = quantized.with_tflite(file.content())
    assert sqnr_db(quantized, write_in_float(broken.graph), ResidualNet) < APART_DB


@pytest.mark.parametrize("flow", ["recipe_static_wi8_ai16", "recipe_weight_only_wi8_afp32"])
def test_other_codes_are_read_as_well(maker: Edgeq, flow: str) -> None:
    """Biases of int64 beside int16, and weights behind a DEQUANTIZE: 8 bits are left of weights."""
    quantized = built(maker, ResidualNet, flow)
    edge = EdgeFile(write_in_float(quantized.graph))
    assert quantized.float_edge is not None
    for sample in samples(ResidualNet, 2, seed=1):
        arrays = [each.numpy() for each in sample]
        (made,), (wanted,) = (
            each.run(quantized.input_names, arrays, "builtin")
            for each in (edge, quantized.float_edge)
        )
        assert np.abs(made - wanted).max() < np.abs(wanted).max() / 32
