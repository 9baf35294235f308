"""References that quantize by themselves: graphs of PT2E, eager and FX mode, and int8 files."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fixtures.models import normal, seeded, small_model
from pytest_edgeq import Edgeq, QuantizedModel
from pytest_edgeq.litert.pt2e_graphs import pt2e_preset
from tests.bench.detection.edits import edited, ops_of
from tests.bench.detection.flatfile import FlatFile
from tests.localize.rows import culprit

pytestmark = pytest.mark.filterwarnings("ignore:edgeq.check. baselines were not checked")

NOTE = "quantizes by itself: its outputs were compared with the file's"


@small_model(
    (1, 3, 12, 12),
    layers=lambda: {"conv": nn.Conv2d(3, 8, 3), "norm": nn.BatchNorm2d(8), "head": nn.Linear(8, 4)},
)
def _small(m: Any, x: torch.Tensor) -> Any:
    """A convolution with its batch norm, and a classifier."""
    return m.head(torch.relu(m.norm(m.conv(x))).mean((2, 3)))


CALIBRATION = [normal(1, 3, 12, 12, seed=i) for i in range(16)]
SAMPLES = [normal(1, 3, 12, 12, seed=100 + i) for i in range(6)]


@pytest.fixture(scope="module")
def quantized(maker: Edgeq) -> QuantizedModel:
    """An int8 file."""
    return maker.quantize(seeded(_small), (CALIBRATION[0],), calibration=CALIBRATION)


def _graph(*, folded: bool) -> torch.nn.Module:
    """The graph that a user converts by PT2E himself."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        program = torch.export.export(seeded(_small), (CALIBRATION[0],), strict=True)
        prepared = prepare_pt2e(program.module(), pt2e_preset("pt2e_static_int8"))
        with torch.no_grad():
            for each in CALIBRATION:
                prepared(each)
        graph: torch.nn.Module = convert_pt2e(prepared, fold_quantize=folded)
    return graph


def _damaged(tflite: bytes) -> tuple[bytes, int]:
    """The file with the greatest weight of its convolution negated."""
    file = FlatFile(tflite)
    op = ops_of(file, "CONV_2D")[0]

    def change(values: np.ndarray[Any, Any]) -> None:
        peak = np.abs(values.astype(np.int64)).argmax()
        values.flat[peak] = -values.flat[peak]

    edited(file, op, 1, change)
    return file.content(), op


@pytest.mark.sweep(1)
@pytest.mark.parametrize("folded", [False, True])
def test_a_graph_of_pt2e_is_compared_op_by_op(
    maker: Edgeq, quantized: QuantizedModel, folded: bool
) -> None:
    """By the float graph in it: equal outputs say nothing of the file in float."""
    graph = _graph(folded=folded)
    sound = maker.load(quantized.tflite, reference=graph, name="net")
    assert maker.compare(sound, SAMPLES).total.sqnr_db > 40
    maker.check(sound, SAMPLES)

    file, op = _damaged(quantized.tflite)
    errors = maker.localize(maker.load(file, reference=graph, name="net"), SAMPLES)
    assert culprit(errors).index == op
    with pytest.raises(AssertionError, match="CONV_2D"):
        maker.check(maker.load(file, reference=graph, name="net"), SAMPLES)


def _by_fx() -> Any:
    from torch.ao.quantization import get_default_qconfig_mapping, quantize_fx

    mapping = get_default_qconfig_mapping("x86")
    prepared = quantize_fx.prepare_fx(seeded(_small), mapping, (CALIBRATION[0],))
    for each in CALIBRATION:
        prepared(each)
    return quantize_fx.convert_fx(prepared)


def _by_eager_mode() -> Any:
    quantization: Any = torch.ao.quantization
    model = quantization.QuantWrapper(seeded(_small))
    quantization.fuse_modules(model, [["module.conv", "module.norm"]], inplace=True)
    model.qconfig = quantization.get_default_qconfig("x86")
    prepared = quantization.prepare(model)
    for each in CALIBRATION:
        prepared(each)
    return quantization.convert(prepared)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("make", [_by_fx, _by_eager_mode])
def test_a_model_of_torch_ao_is_compared_at_the_outputs(
    maker: Edgeq, quantized: QuantizedModel, make: Any
) -> None:
    """And a note says so; its rounding is not the file's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference = make()
    loaded = maker.load(quantized.tflite, reference=reference, name="net")
    assert 20 < maker.compare(loaded, SAMPLES).total.sqnr_db < 60
    with pytest.warns(UserWarning, match=f"torch {NOTE}"):
        maker.check(loaded, SAMPLES)


@pytest.mark.slow
def test_a_quantized_file_is_compared_at_the_outputs(
    maker: Edgeq, quantized: QuantizedModel
) -> None:
    """Another build, as a `QuantizedModel` or as its bytes."""
    for reference in (quantized, quantized.tflite):
        loaded = maker.load(quantized.tflite, reference=reference, name="net")
        assert maker.compare(loaded, SAMPLES).total.max_abs_error == 0
        with pytest.warns(UserWarning, match=f"the reference file {NOTE}"):
            maker.check(loaded, SAMPLES)
    loaded = maker.load(
        quantized.tflite, reference=lambda x: list(quantized.run(x).values()), name="net"
    )
    known = NOTE.replace("quantizes by itself", "returns only values of the file's output codes")
    with pytest.warns(UserWarning, match=f"the reference {known}"):
        maker.check(loaded, SAMPLES)
    file, _ = _damaged(quantized.tflite)
    total = maker.compare(maker.load(file, reference=quantized, name="net"), SAMPLES).total
    assert total.max_abs_error > 0
