"""A file written in float, held against the torch graph that rounds as its constants do."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from ai_edge_litert import schema_py_generated as schema

from fixtures.models import (
    ConcatSkip,
    LayerNormGelu,
    LstmNet,
    NonContiguous,
    ResidualNet,
    SelfAttention,
    SmallModel,
    samples,
    seeded,
)
from pytest_edgeq import Edgeq, QuantizedModel
from pytest_edgeq.litert import without_activation_rounding
from pytest_edgeq.tflite.edge import EdgeFile
from pytest_edgeq.tflite.float_form import CASTS, write_in_float
from tests.detection.flatfile import FlatFile

APART_DB = 70.0
"""
Between what two roundings leave.

What is rounded on one side alone are biases, to steps of input × weight: 16 bits and more of what
they are added to, 80 dB. Activations of 8 bits leave less than 50 dB.
"""


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
    """Hold a float file against the graph, in dB of the first output, the worst of two samples."""
    simulated = quantized.simulated
    assert isinstance(simulated, torch.fx.GraphModule)
    graph, edge = without_activation_rounding(simulated), EdgeFile(content)
    found = []
    for sample in samples(kind, 2, seed=1):
        made = edge.run(quantized.input_names, [each.numpy() for each in sample], "builtin")[0]
        with torch.no_grad():
            wanted = graph(*sample).double().numpy()
        noise = np.square(wanted - made.reshape(wanted.shape)).sum()
        found.append(10 * math.log10(np.square(wanted).sum() / noise))
    return min(found)


@pytest.mark.parametrize("flow", ["pt2e_static_int8", "pt2e_dynamic_int8"])
@pytest.mark.parametrize("kind", [ResidualNet, ConcatSkip, LayerNormGelu, SelfAttention])
def test_it_computes_what_torch_does_with_rounded_weights(
    maker: Edgeq, kind: type[SmallModel], flow: str
) -> None:
    """No activation is rounded on either side."""
    quantized = built(maker, kind, flow)
    form = write_in_float(quantized.graph)
    edge = EdgeFile(form.content)
    assert not any(tensor.is_quantized for tensor in edge.graph.subgraphs[0].tensors)
    assert sqnr_db(quantized, form.content, kind) > APART_DB


def test_a_broken_file_is_as_broken_in_float(maker: Edgeq) -> None:
    """One channel of one weight is enough to tell."""
    quantized = built(maker, ResidualNet, "pt2e_static_int8")
    file = FlatFile(quantized.tflite)
    weight = file.weights()[0].tensor
    values = file.constant(weight)
    assert values is not None
    values[1] = 0
    file.store(weight, values)
    broken = quantized.with_tflite(file.content())
    assert sqnr_db(quantized, write_in_float(broken.graph).content, ResidualNet) < APART_DB


@pytest.mark.parametrize("flow", ["recipe_static_wi8_ai16", "recipe_weight_only_wi8_afp32"])
def test_other_codes_are_read_as_well(maker: Edgeq, flow: str) -> None:
    """Biases of int64 beside int16, and weights behind a DEQUANTIZE: 8 bits are left of weights."""
    quantized = built(maker, ResidualNet, flow)
    edge = EdgeFile(write_in_float(quantized.graph).content)
    assert quantized.float_edge is not None
    for sample in samples(ResidualNet, 2, seed=1):
        arrays = [each.numpy() for each in sample]
        (made,), (wanted,) = (
            each.run(quantized.input_names, arrays, "builtin")
            for each in (edge, quantized.float_edge)
        )
        assert np.abs(made - wanted).max() < np.abs(wanted).max() / 32


def test_ops_and_tensors_are_told_by_the_numbers_of_the_file(maker: Edgeq) -> None:
    """Each op is the one that its number says, and a tensor behind a cast is the one in front."""
    quantized = built(maker, LstmNet, "pt2e_static_int8")
    form = write_in_float(quantized.graph)
    theirs, ours = quantized.graph.subgraphs[0], EdgeFile(form.content).graph.subgraphs[0]
    for op, number in zip(ours.ops, form.ops[0], strict=True):
        assert number is not None
        held = [form.held[0].get(index, index) for index in theirs.ops[number].inputs]
        assert (op.name, list(op.inputs)) == (theirs.ops[number].name, held)
    casts = {op.outputs[0]: op.inputs[0] for op in theirs.ops if op.name in CASTS}
    assert set(form.held[0]) <= set(casts)


def test_a_constant_that_is_quantized_at_run_time_keeps_its_rounding(maker: Edgeq) -> None:
    """Its QUANTIZE stays, with a DEQUANTIZE behind it: as of codes that were stored."""
    quantized = built(maker, NonContiguous, "pt2e_static_int8")
    file = FlatFile(quantized.tflite)
    place, tensor = next(
        (i, int(t))
        for i, op in enumerate(file.operators)
        for t in op.inputs
        if file.name(i) in ("ADD", "MUL") and file.is_quantized(int(t))
        if file.constant(int(t)) is not None
    )
    codes = file.constant(tensor)
    assert codes is not None
    (scale,), (point,) = file.scales(tensor), file.tensor(tensor).quantization.zeroPoint
    # A third of a step off, which rounding takes away.
    floats = ((codes.astype(np.float32) - point + np.float32(1 / 3)) * scale).astype(np.float32)
    real = file.add_tensor(
        tensor,
        "real",
        type=schema.TensorType.FLOAT32,
        quantization=None,
        buffer=file.add_buffer(floats),
    )
    made = file.add_tensor(tensor, "made")
    file.reread(tensor, made, [place])
    file.insert(place, "QUANTIZE", real, made, place)
    edited = quantized.with_tflite(file.content())
    names = [op.name for op in EdgeFile(write_in_float(edited.graph).content).graph.ops]
    assert [name for name in names if name in CASTS] == ["QUANTIZE", "DEQUANTIZE"]
    for sample in samples(NonContiguous, 2, seed=1):
        arrays = [each.numpy() for each in sample]
        stored, at_run_time = (
            EdgeFile(write_in_float(each.graph).content).run(
                quantized.input_names, arrays, "builtin"
            )[0]
            for each in (quantized, edited)
        )
        # The kernel multiplies in float32; a third of a step would show.
        assert np.abs(stored - at_run_time).max() < scale / 100
