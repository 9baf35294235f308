"""A loaded file with the float file that was written beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures.models import ResidualNet, TwoInputs, samples, seeded
from pytest_edgeq import Edgeq, QuantizedModel
from tests.bench.detection.edits import ops_of, zeroed_channel
from tests.bench.detection.flatfile import FlatFile

DYNAMIC = "recipe_dynamic_wi8_afp32"


@pytest.fixture(scope="module")
def maker() -> Edgeq:
    """Builds without a test's own fixture."""
    return Edgeq()


@pytest.fixture(scope="module")
def made(maker: Edgeq) -> QuantizedModel:
    """A file that a recipe quantized, with its float file."""
    return maker.quantize(seeded(ResidualNet), ResidualNet.sample_inputs(), quantizer=DYNAMIC)


def _reference(image: Any) -> Any:
    """Compute what the model does, as something that nothing converts."""
    with torch.no_grad():
        return seeded(ResidualNet)(torch.as_tensor(image)).numpy()


def _loaded(maker: Edgeq, made: QuantizedModel, content: bytes | None = None) -> QuantizedModel:
    return maker.load(
        made.tflite if content is None else content,
        reference=_reference,
        float_tflite=made.float_tflite,
        name="shipped",
    )


def test_errors_are_told_by_stage(maker: Edgeq, made: QuantizedModel, tmp_path: Path) -> None:
    """The float file is between the reference and the quantized one."""
    assert made.float_tflite is not None
    path = tmp_path / "model.tflite"
    path.write_bytes(made.float_tflite)
    loaded = maker.load(made.tflite, reference=_reference, float_tflite=path)
    comparison = maker.compare(loaded, samples(ResidualNet, 3))
    assert comparison.conversion is not None
    assert comparison.quantization is not None
    conversion, quantization = (
        stage.outputs["output_0"].sqnr_db
        for stage in (comparison.conversion, comparison.quantization)
    )
    assert conversion > 100 > quantization


def test_ops_are_held_against_those_of_the_float_file(maker: Edgeq, made: QuantizedModel) -> None:
    """A channel that is wiped is found, and nothing in the sound file."""
    inputs = list(samples(ResidualNet, 3))
    assert maker.localize(_loaded(maker, made), inputs).culprit is None
    file = FlatFile(made.tflite)
    zeroed_channel(file, ops_of(file, "CONV_2D")[1], 2)
    errors = maker.localize(_loaded(maker, made, file.content()), inputs)
    assert "the weight's codes: output channel 2 is zero" in errors.cause


@pytest.mark.slow
def test_a_float_file_that_is_not_the_references_is_found(
    maker: Edgeq, made: QuantizedModel
) -> None:
    """It is held against the reference end to end."""
    other = maker.quantize(seeded(ResidualNet, seed=5), ResidualNet.sample_inputs(), quantizer=None)
    loaded = maker.load(other.tflite, reference=_reference, float_tflite=other.tflite)
    errors = maker.localize(loaded, list(samples(ResidualNet, 3)))
    assert "the file in float does not compute what the reference does" in errors.cause


def test_the_float_file_of_another_model_is_refused(maker: Edgeq, made: QuantizedModel) -> None:
    """Told by its inputs and outputs."""
    other = maker.quantize(seeded(TwoInputs), TwoInputs.sample_inputs(), quantizer=None)
    with pytest.raises(ValueError, match="shipped: float_tflite: expected the inputs and outputs"):
        maker.load(made.tflite, reference=_reference, float_tflite=other.tflite, name="shipped")
