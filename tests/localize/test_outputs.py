"""Outputs that are wired to another op than the one that computes what torch gives there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fixtures.models import SmallModel, seeded, small_model
from pytest_edgeq import Edgeq, QuantizedModel
from pytest_edgeq.localize.rows import LOWERING, LayerErrors
from tests.bench.detection.flatfile import FlatFile
from tests.localize.builds import DYNAMIC, PT2E, Build, localized
from tests.localize.rows import culprit


@small_model(
    (2, 8),
    layers=lambda: {
        "body": nn.Linear(8, 16),
        "scores": nn.Linear(16, 4),
        "offsets": nn.Linear(16, 4),
    },
)
def _heads(m: Any, x: torch.Tensor) -> Any:
    """Two outputs of one shape, one of them behind an activation that no op fuses."""
    x = m.body(x).relu()
    return {"scores": m.scores(x).sigmoid(), "offsets": m.offsets(x)}


@pytest.fixture(scope="module", params=[PT2E, DYNAMIC, None], ids=str)
def built(request: pytest.FixtureRequest, build: Build) -> QuantizedModel:
    """Integer codes, floats around integer weights, and floats alone."""
    return build(_heads, request.param)


def _localized(maker: Edgeq, content: bytes) -> LayerErrors:
    return localized(maker, maker.load(content, reference=seeded(_heads)), _heads)


def _rewired(
    built: QuantizedModel, to: Callable[[FlatFile, dict[str, int]], dict[int, int]]
) -> bytes:
    """The file with outputs that are other tensors."""
    file = FlatFile(built.tflite)
    (signature,) = file.model.signatureDefs
    names = {entry.name.decode(): int(entry.tensorIndex) for entry in signature.outputs}
    swap = to(file, names)
    file.graph.outputs = [swap.get(int(t), int(t)) for t in file.graph.outputs]
    for entry in signature.outputs:
        entry.tensorIndex = swap.get(int(entry.tensorIndex), int(entry.tensorIndex))
    return file.content()


@pytest.mark.sweep(0)
def test_sound_outputs_have_no_finding(maker: Edgeq, built: QuantizedModel) -> None:
    """Each is what torch gives by that name."""
    errors = _localized(maker, built.tflite)
    assert all(row.verdict != LOWERING for row in errors.rows), str(errors)


@pytest.mark.sweep(1)
def test_swapped_outputs_are_told(maker: Edgeq, built: QuantizedModel) -> None:
    """Every op computes what torch computes; the outputs bear each other's names."""

    def swapped(_: FlatFile, names: dict[str, int]) -> dict[int, int]:
        scores, offsets = names["scores"], names["offsets"]
        return {scores: offsets, offsets: scores}

    errors = _localized(maker, _rewired(built, swapped))
    found = [row for row in errors.rows if row.verdict == LOWERING]
    assert len(found) == 2
    assert errors.culprit is found[0]
    texts = {text for row in found for text in row.findings}
    assert texts == {
        "the file's output 'scores' is its result: expected the output of LOGISTIC #2; wire that "
        "output to the op that computes it",
        "the file's output 'offsets' is its result: expected the output of FULLY_CONNECTED #3; "
        "wire that output to the op that computes it",
    }


def test_an_output_before_its_activation_is_told(maker: Edgeq, built: QuantizedModel) -> None:
    """The op that is left out computes what torch does, and nothing reads it."""

    def early(file: FlatFile, names: dict[str, int]) -> dict[int, int]:
        (activation,) = (op for i, op in enumerate(file.operators) if file.name(i) == "LOGISTIC")
        return {names["scores"]: int(activation.inputs[0])}

    errors = _localized(maker, _rewired(built, early))
    assert culprit(errors).op == "FULLY_CONNECTED"
    assert culprit(errors).module == "scores"
    text = culprit(errors).findings[0]
    assert text.startswith(
        "the file's output 'scores' is its result: expected the output of LOGISTIC #2"
    )


def test_outputs_of_a_keras_model_are_matched_by_name(maker: Edgeq, built: QuantizedModel) -> None:
    """The converter orders those of a signature by name, and the model need not."""
    layer = type("Layer", (), {"__module__": "keras.src.layers.layer"})
    model = seeded(_heads)

    class Functional(layer):  # type: ignore[misc, valid-type] # stands in for Keras, by its name
        output_names = ("offsets", "scores")
        non_trainable_variables = ()

        def call(self, x: Any, **_: Any) -> Any:
            outputs = model(torch.from_numpy(x))
            return [outputs[name].detach().numpy() for name in self.output_names]

        __call__ = call

    errors = localized(maker, maker.load(built.tflite, reference=Functional()), _heads)
    assert all(row.verdict != LOWERING for row in errors.rows), str(errors)


def _cells(*axes: int) -> type[SmallModel]:
    """Return boxes of the cells of an image, row by row or column by column, as of a detector."""

    @small_model((1, 3, 6, 6), layers=lambda: {"boxes": nn.Conv2d(3, 8, 3, padding=1)})
    def cells(m: Any, x: torch.Tensor) -> Any:
        return m.boxes(x).permute(axes).reshape(1, -1, 4)

    return cells


@pytest.mark.slow
def test_an_output_whose_elements_lie_otherwise_is_told(maker: Edgeq, build: Build) -> None:
    """All values are right, and none is in its place."""
    cells, turned = _cells(0, 2, 3, 1), _cells(0, 3, 2, 1)
    content = build(cells, DYNAMIC).tflite

    right = localized(maker, maker.load(content, reference=seeded(cells)), cells)
    assert all(row.verdict != LOWERING for row in right.rows), str(right)

    wrong = localized(maker, maker.load(content, reference=seeded(turned)), cells)
    assert culprit(wrong).op == "RESHAPE"
    assert "the output has torch's values in another order" in wrong.cause
