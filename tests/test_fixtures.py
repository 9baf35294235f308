"""The models and data that the tests run on are what they say they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fixtures import crepe, digits, efficientnet, photographs
from fixtures.models import (
    ALL,
    CondBranch,
    DynamicBatch,
    DynamicImage,
    NeverExported,
    NonContiguous,
    NonStrictOnly,
    TiedWeights,
    seeded,
)
from fixtures.models.base import SmallModel


@pytest.mark.parametrize("model", ALL, ids=lambda model: model.__name__)
def test_a_small_model_runs_and_depends_on_its_seed_alone(model: type[SmallModel]) -> None:
    """Two builds of one seed agree bit for bit, and the global random state is untouched."""
    before = torch.random.get_rng_state()
    first, again, other = (leaves(run(seeded(model, seed))) for seed in (0, 0, 1))
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(a.isfinite().all() for a in first)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert not seeded(model).training


def test_only_non_strict_export_takes_the_graph_break() -> None:
    """The fall-back of `strict_export=True` has a model to fall back on."""
    model = seeded(NonStrictOnly)
    with pytest.raises(Exception, match="graph_break"):
        torch.export.export(model, model.sample_inputs(), strict=True)
    torch.export.export(model, model.sample_inputs(), strict=False)


@pytest.mark.parametrize("strict", [True, False])
def test_data_dependent_control_flow_is_never_exported(strict: bool) -> None:
    """Neither mode takes it, so there is a converter's message to be kept."""
    model = seeded(NeverExported)
    with pytest.raises(Exception, match=r"[Dd]ata-dependent"):
        torch.export.export(model, model.sample_inputs(), strict=strict)


def test_cond_is_exported_and_takes_both_branches() -> None:
    """It is the converter that has no lowering; and a dark image gives another result."""
    model = seeded(CondBranch)
    [image] = model.sample_inputs()
    bright, dark = image - image.mean() + 1, image - image.mean() - 1
    torch.export.export(model, (image,), strict=True)
    with torch.no_grad():
        assert torch.equal(model(bright), model.conv(bright))
        assert torch.equal(model(dark), model.conv(dark) / 2)


def test_constants_lie_as_they_say() -> None:
    """What a converter that ignores strides would permute, and one parameter in two layers."""
    model = seeded(NonContiguous)
    constants = (model.conv.weight, model.transposed, model.strided, model.expanded)
    assert not any(constant.is_contiguous() for constant in constants)
    tied = seeded(TiedWeights)
    assert tied.head.weight is tied.embed.weight


@pytest.mark.parametrize("model", [DynamicBatch, DynamicImage])
def test_open_dimensions_are_exported_open(model: type[SmallModel]) -> None:
    """The shapes that the model says are what export accepts; none became a constant."""
    exported = torch.export.export(
        seeded(model), model.sample_inputs(), dynamic_shapes=model.dynamic_shapes(), strict=True
    )
    assert len(exported.range_constraints) == (1 if model is DynamicBatch else 2)


def test_no_pixel_is_in_calibration_and_evaluation() -> None:
    """Many more windows of either part than any test takes: none overlaps one of the other."""
    calibration = list(photographs.windows("calibration", 400))
    evaluation = list(photographs.windows("evaluation", 400))
    assert {window.photograph for window in calibration} == set(photographs.NAMES)
    assert {window.photograph for window in evaluation} == set(photographs.NAMES)
    assert len(set(calibration)) == len(set(evaluation)) == 400
    assert not [(a, b) for a in calibration for b in evaluation if a.overlaps(b)]


def test_efficientnet_in_float_names_the_photographs(capsys: pytest.CaptureFixture[str]) -> None:
    """Egyptian cat, espresso, missile; and the package's chatter is kept from the output."""
    model = efficientnet.efficientnet_lite0()
    assert capsys.readouterr() == ("", "")
    assert not model.training
    with torch.no_grad():
        told = [(int(model(image).argmax()), label) for image, label in photographs.labelled()]
    assert told == [(285, 285), (967, 967), (657, 657)]


def test_digits_are_learnt() -> None:
    """97 % of the held-out digits at least; measured 99.0 to 99.4 % over six seeds."""
    held_out = digits.held_out()
    model = digits.trained()
    with torch.no_grad():
        right = model(held_out.images).argmax(1) == held_out.labels
    assert not model.training
    assert right.double().mean() >= 0.97


def test_held_out_digits_are_in_neither_training_nor_calibration() -> None:
    """1,797 digits in all, no image of the one part in the other."""
    training, held_out = digits.training(), digits.held_out()
    assert (len(training), len(held_out)) == (1297, 500)
    assert len(set(held_out.labels.tolist())) == 10
    seen = {image.numpy().tobytes() for image in training.samples()}
    assert not seen & {image.numpy().tobytes() for image in held_out.samples()}
    assert {image.numpy().tobytes() for image in digits.calibration()} <= seen


@pytest.mark.parametrize("frequency_hz", [110.0, 220.0, 440.0, 880.0])
def test_crepe_in_float_tells_the_pitch(frequency_hz: float) -> None:
    """Within half a bin, 10 cents, whatever the phase; measured 7.9 at worst (220 Hz)."""
    model = crepe.crepe_tiny()
    assert not model.training
    for frame in crepe.sine_frames(frequency_hz, 8):
        assert frame.shape == (1, 1024)
        assert abs(float(frame.mean())) < 1e-6
        assert float(frame.std()) == pytest.approx(1.0, abs=1e-6)
        with torch.no_grad():
            pitch = crepe.pitch_hz(model(frame).numpy())
        assert abs(crepe.cents_between(pitch, frequency_hz)) <= 10.0


def run(model: SmallModel) -> object:
    """Call a model with its own sample."""
    with torch.no_grad():
        outputs: object = model(*model.sample_inputs(), **model.sample_kwargs())
    return outputs


def leaves(outputs: object) -> list[Tensor]:
    """Give the tensors of an output, however nested."""
    if isinstance(outputs, Tensor):
        return [outputs]
    if isinstance(outputs, dict):
        outputs = list(outputs.values())
    assert isinstance(outputs, list | tuple)
    return [leaf for output in outputs for leaf in leaves(output)]
