"""Outputs that are wired to another op than the one that computes what torch gives there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fixtures.models import normal
from pytest_edgeq import Edgeq, QuantizedModel
from pytest_edgeq.localize.rows import LOWERING, LayerErrors
from tests.bench.detection.flatfile import FlatFile
from tests.localize.rows import culprit

SAMPLES = [(normal(2, 8, seed=100 + i),) for i in range(4)]


class Heads(nn.Module):
    """Two outputs of one shape, one of them behind an activation that no op fuses."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.scores = nn.Linear(16, 4)
        self.offsets = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Give both by name."""
        x = self.body(x).relu()
        return {"scores": self.scores(x).sigmoid(), "offsets": self.offsets(x)}


@pytest.fixture(scope="module")
def model() -> Heads:
    """With weights of a fixed seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Heads().eval()


@pytest.fixture(scope="module", params=["pt2e_static_int8", "recipe_dynamic_wi8_afp32", None])
def built(
    request: pytest.FixtureRequest, model: Heads, tmp_path_factory: pytest.TempPathFactory
) -> QuantizedModel:
    """Integer codes, floats around integer weights, and floats alone."""
    maker = Edgeq(directory=tmp_path_factory.mktemp("heads"))
    calibration = [(normal(2, 8, seed=i),) for i in range(16)]
    return maker.quantize(model, SAMPLES[0], quantizer=request.param, calibration=calibration)


def _localized(model: Heads, content: bytes) -> LayerErrors:
    maker = Edgeq()
    return maker.localize(maker.load(content, reference=model), SAMPLES)


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


@pytest.mark.sweep(1)
def test_sound_outputs_have_no_finding(model: Heads, built: QuantizedModel) -> None:
    """Each is what torch gives by that name."""
    errors = _localized(model, built.tflite)
    assert all(row.verdict != LOWERING for row in errors.rows), str(errors)


@pytest.mark.sweep(1)
def test_swapped_outputs_are_told(model: Heads, built: QuantizedModel) -> None:
    """Every op computes what torch computes; the outputs bear each other's names."""

    def swapped(_: FlatFile, names: dict[str, int]) -> dict[int, int]:
        scores, offsets = names["scores"], names["offsets"]
        return {scores: offsets, offsets: scores}

    errors = _localized(model, _rewired(built, swapped))
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


def test_an_output_before_its_activation_is_told(model: Heads, built: QuantizedModel) -> None:
    """The op that is left out computes what torch does, and nothing reads it."""

    def early(file: FlatFile, names: dict[str, int]) -> dict[int, int]:
        (activation,) = (op for i, op in enumerate(file.operators) if file.name(i) == "LOGISTIC")
        return {names["scores"]: int(activation.inputs[0])}

    errors = _localized(model, _rewired(built, early))
    assert culprit(errors).op == "FULLY_CONNECTED"
    assert culprit(errors).module == "scores"
    text = culprit(errors).findings[0]
    assert text.startswith(
        "the file's output 'scores' is its result: expected the output of LOGISTIC #2"
    )


class Cells(nn.Module):
    """Boxes of the cells of an image, as detectors give them."""

    def __init__(self, *, turned: bool = False) -> None:
        super().__init__()
        self.boxes = nn.Conv2d(3, 8, 3, padding=1)
        self.turned = turned

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give two boxes a cell, row by row, or column by column."""
        axes = (0, 3, 2, 1) if self.turned else (0, 2, 3, 1)
        boxes: torch.Tensor = self.boxes(x).permute(axes).reshape(1, -1, 4)
        return boxes


@pytest.mark.slow
def test_an_output_whose_elements_lie_otherwise_is_told(maker: Edgeq) -> None:
    """All values are right, and none is in its place."""
    images = [(normal(1, 3, 6, 6, seed=100 + i),) for i in range(4)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sound = Cells().eval()
    turned = Cells(turned=True).eval()
    turned.load_state_dict(sound.state_dict())
    content = maker.quantize(sound, images[0], quantizer="recipe_dynamic_wi8_afp32").tflite

    right = maker.localize(maker.load(content, reference=sound), images)
    assert all(row.verdict != LOWERING for row in right.rows), str(right)

    wrong = maker.localize(maker.load(content, reference=turned), images)
    assert culprit(wrong).op == "RESHAPE"
    assert "the output has torch's values in another order" in wrong.cause
