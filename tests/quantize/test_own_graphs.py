"""What a user has exported, prepared, calibrated or converted by himself."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

from fixtures.models import ConvBnRelu, ResidualNet, samples, seeded
from pytest_edgeq import Edgeq, QuantizedModel, assert_no_float_ops, litert
from pytest_edgeq.litert import pt2e_graphs
from tests.quantize import making

INPUTS = ResidualNet.sample_inputs()


def _exported(*, strict: bool = True) -> torch.export.ExportedProgram:
    with litert.quiet():
        return torch.export.export(seeded(ResidualNet), INPUTS, strict=strict)


def _graph() -> torch.fx.GraphModule:
    with litert.quiet():
        return _exported().module()


def _prepared(seed: int | None = 1) -> Any:
    """Return the graph as torchao prepares it, calibrated on samples of a seed."""
    with litert.quiet():
        from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e

        prepared = prepare_pt2e(_graph(), litert.pt2e_preset("pt2e_static_int8"))
    with torch.no_grad():
        for sample in [] if seed is None else samples(ResidualNet, 8, seed=seed):
            prepared(*sample)
    return prepared


@pytest.fixture
def plain() -> QuantizedModel:
    """Of the module itself."""
    return making.quantize("pt2e_static_int8")


def _check_same(quantized: QuantizedModel, plain: QuantizedModel) -> None:
    assert quantized.op_dtypes.to_dict() == plain.op_dtypes.to_dict()
    assert {entry.module for entry in quantized.op_dtypes} > {"stem", "layer1.0.conv_a", "fc"}
    assert quantized.name == plain.name == "ResidualNet"


@pytest.mark.parametrize("stored", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_exported_program(maker: Edgeq, plain: QuantizedModel, stored: bool) -> None:
    """It is not exported anew: annotators find the ADD, and ops have their modules."""
    program = _exported()
    if stored:
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        program = torch.export.load(file)

    calibration = samples(ResidualNet, 8)
    quantized = maker.quantize(program, INPUTS, calibration=calibration)

    _check_same(quantized, plain)
    assert quantized.op_dtypes.ops("ADD")[0].scheme == "int8"
    comparison = maker.compare(quantized, samples(ResidualNet, 3, seed=2))
    assert comparison.lowering is not None
    assert comparison.lowering.sqnr_db > 35


@pytest.mark.slow
def test_a_program_in_float_and_as_a_reference(maker: Edgeq) -> None:
    """Its ops have their modules as well."""
    program = _exported()
    quantized = maker.quantize(program, INPUTS, quantizer=None)
    assert [e.module for e in quantized.op_dtypes.ops("FULLY_CONNECTED")] == ["fc"]

    loaded = maker.load(quantized.tflite, reference=program)
    assert [e.module for e in loaded.op_dtypes.ops("FULLY_CONNECTED")] == ["fc"]
    total = maker.compare(loaded, samples(ResidualNet, 2, seed=2)).total
    assert total is not None
    assert total.sqnr_db > 100


@pytest.mark.slow
def test_a_prepared_graph_is_converted_as_it_is(maker: Edgeq, plain: QuantizedModel) -> None:
    """By its own ranges, without any calibration; the float side is the graph without observers."""
    prepared = _prepared()
    before = copy.deepcopy(prepared.state_dict())

    quantized = maker.quantize(prepared, INPUTS)

    _check_same(quantized, plain)
    assert quantized.flow == "pt2e"
    comparison = maker.compare(quantized, samples(ResidualNet, 3, seed=2))
    assert comparison.quantization is not None
    assert comparison.lowering is not None
    assert comparison.lowering.sqnr_db > 35
    (sample,) = samples(ResidualNet, 1, seed=2)
    assert quantized.float_model is not None
    torch.testing.assert_close(quantized.float_model(*sample), seeded(ResidualNet)(*sample))
    for name, value in prepared.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.slow
def test_a_converted_graph(maker: Edgeq) -> None:
    """Also with its weights folded to integers, as torchao does by default."""
    with litert.quiet():
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e

        folded, unfolded = (convert_pt2e(_prepared(), fold_quantize=each) for each in (True, False))
    one, two = (maker.quantize(each, INPUTS, quantizer=None) for each in (folded, unfolded))

    assert one.tflite == two.tflite == maker.quantize(_prepared(), INPUTS).tflite


@pytest.mark.slow
def test_a_graph_that_was_never_calibrated(maker: Edgeq, plain: QuantizedModel) -> None:
    """Nothing runs it, unless samples are given; it is no float model, nor part of one."""
    prepared = _prepared(seed=None)
    with pytest.raises(ValueError, match=r"activation\(s\) were never calibrated"):
        maker.quantize(prepared, INPUTS)
    calibrated = maker.quantize(prepared, INPUTS, calibration=samples(ResidualNet, 8))
    assert calibrated.op_dtypes.to_dict() == plain.op_dtypes.to_dict()
    with pytest.raises(ValueError, match="converted as it is: recipe_static_wi8_ai8 quantizes"):
        maker.quantize(prepared, INPUTS, quantizer="recipe_static_wi8_ai8")
    with pytest.raises(ValueError, match="holds a graph that PT2E has prepared or converted"):
        maker.quantize(nn.Sequential(prepared), INPUTS)


@pytest.mark.slow
def test_a_program_that_was_exported_non_strictly(maker: Edgeq) -> None:
    """Its ADD stays in float, and the cause names the user's own export."""
    calibration = samples(ResidualNet, 8)
    quantized = maker.quantize(_exported(strict=False), INPUTS, calibration=calibration)

    with pytest.raises(AssertionError, match=r"an exported program: export it with strict=True"):
        assert_no_float_ops(quantized, allow=("MEAN", "TRANSPOSE"))


@pytest.mark.slow
def test_a_checkpoint_of_a_graph_that_was_trained_elsewhere(maker: Edgeq) -> None:
    """Loaded by `train=` it gives the file that the graph itself gives."""
    model, x = seeded(ConvBnRelu), ConvBnRelu.sample_inputs()
    quantizer = litert.pt2e_preset("pt2e_qat_int8")
    # litert-torch hands torchao functions for its patterns, which torch.export refuses.
    with litert.quiet(), pt2e_graphs.pattern_modules(), pt2e_graphs.possible_patterns():
        from torchao.quantization.pt2e.quantize_pt2e import prepare_qat_pt2e

        graph = copy.deepcopy(torch.export.export(model, x, strict=True).module())
        theirs = prepare_qat_pt2e(graph, quantizer)
    with torch.no_grad():
        for sample in samples(ConvBnRelu, 4, seed=1):
            theirs(*sample)
    state = theirs.state_dict()

    by_state = maker.quantize(
        model, x, quantizer="pt2e_qat_int8", train=lambda p: p.load_state_dict(state) and None
    )
    by_graph = maker.quantize(theirs, x)

    assert by_state.op_dtypes.to_dict() == by_graph.op_dtypes.to_dict()
    for sample in samples(ConvBnRelu, 2, seed=2):
        (one,), (two,) = (each.run(*sample).values() for each in (by_state, by_graph))
        assert abs(one - two).max() < 1e-3
