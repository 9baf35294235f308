"""Ops that nothing in torch matches: a note in a sound file, a failure where outputs are lost."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest
import torch
from ai_edge_litert import schema_py_generated as schema
from torch import nn

from fixtures.models import normal
from fixtures.tflite.writer import pack, unpack
from pytest_edgeq import Comparison, Edgeq, LayerErrors, QuantizedModel
from pytest_edgeq.localize.lost import Lost, lost_behind_unmatched
from pytest_edgeq.localize.rows import UNMATCHED


class _Boxes(nn.Module):
    """Corners of boxes from their middles and sizes, as detectors decode them."""

    def __init__(self) -> None:
        super().__init__()
        self.middle, self.size = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        middle, half = self.middle(x), torch.sigmoid(self.size(x)) * 1.5
        return torch.cat([middle - half, middle + half], -1)


def _samples(n: int, seed: int) -> list[torch.Tensor]:
    return [normal(1, 64, 8, seed=seed + i) for i in range(n)]


@pytest.fixture(scope="module")
def maker(tmp_path_factory: pytest.TempPathFactory) -> Edgeq:
    """Without a memory."""
    return Edgeq(directory=tmp_path_factory.mktemp("lost"))


@pytest.fixture(scope="module")
def boxes(maker: Edgeq) -> tuple[_Boxes, QuantizedModel]:
    """A sound model and its file."""
    torch.manual_seed(0)
    model = _Boxes().eval()
    quantized = maker.quantize(
        model,
        (_samples(1, 0)[0],),
        quantizer="recipe_static_wi8_ai8",
        calibration=_samples(64, 100),
    )
    return model, quantized


def _with_minus(tflite: bytes) -> bytes:
    """The ADD became the SUB that stands beside it."""
    model = unpack(tflite)
    graph = model.subgraphs[0]
    names = [each.builtinCode for each in model.operatorCodes]
    minus = names.index(schema.BuiltinOperator.SUB)
    [plus] = [op for op in graph.operators if names[op.opcodeIndex] == schema.BuiltinOperator.ADD]
    plus.opcodeIndex = minus
    plus.builtinOptionsType = schema.BuiltinOptions.SubOptions
    plus.builtinOptions = schema.SubOptionsT()
    return pack(model)


def _lost(quantized: QuantizedModel, layers: LayerErrors, total: Mapping[str, float]) -> list[Lost]:
    edge = quantized.edge
    return lost_behind_unmatched(edge.graph, edge.signature, layers.rows, total)


def _total(comparison: Comparison) -> dict[str, float]:
    return {name: each.sqnr_db for name, each in comparison.total.outputs.items()}


def test_an_output_lost_behind_an_op_that_torch_has_nothing_like_fails(
    maker: Edgeq, boxes: tuple[_Boxes, QuantizedModel]
) -> None:
    """What the CONCATENATION takes is sound, and torch joins no two such tensors."""
    model, quantized = boxes
    broken = maker.load(_with_minus(quantized.tflite), reference=model)
    layers = maker.localize(broken, _samples(6, 500))
    [lost] = _lost(broken, layers, _total(maker.compare(broken, _samples(6, 500))))
    assert lost.row.op == "CONCATENATION"
    assert lost.before_db > 25 > 20 > lost.after_db
    with pytest.raises(AssertionError) as caught:
        maker.check(broken, _samples(6, 500))
    assert str(caught.value).startswith(
        f"{lost.row.name}: no torch call gives what it gives of what it takes: output 'output_0' "
        f"has {lost.after_db:.3g} dB SQNR, and what goes in has {lost.before_db:.3g} dB; compare "
        "the op, its options and what it reads with torch"
    )


def test_a_sound_model_has_lost_nothing(maker: Edgeq, boxes: tuple[_Boxes, QuantizedModel]) -> None:
    """Not even where none of its ops without weights were followed."""
    _, quantized = boxes
    layers = maker.localize(quantized, _samples(6, 500))
    total = _total(maker.compare(quantized, _samples(6, 500)))
    assert all(row.matched for row in layers.rows)
    assert _lost(quantized, layers, total) == []
    unfollowed = [
        row
        if "weight" in row.dtypes
        else dataclasses.replace(row, matched=False, verdict=UNMATCHED, cumulative_sqnr_db=None)
        for row in layers.rows
    ]
    assert sum(not row.matched for row in unfollowed) > 4
    assert _lost(quantized, dataclasses.replace(layers, rows=tuple(unfollowed)), total) == []
    # The same rows tell of a defect, where the output has one.
    [lost] = _lost(
        quantized, dataclasses.replace(layers, rows=tuple(unfollowed)), dict.fromkeys(total, 9.0)
    )[:1]
    assert not lost.row.matched
