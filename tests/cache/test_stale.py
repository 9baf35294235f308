"""Attempts to be given yesterday's answer: each hit equals a build without the cache."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fixtures.models import NonStrictOnly, normal, samples, seeded
from pytest_edgeq import Edgeq, QuantizedModel
from tests.quantize.quantizers import converters, per_channel

pytestmark = pytest.mark.slow

SAMPLE = normal(1, 4, seed=0)


class _Net(nn.Module):
    """A linear layer, a tensor that is no parameter, and a sum."""

    def __init__(self, *, registers: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        if registers:
            self.register_buffer("gain", torch.full((4,), 2.0), persistent=False)
        else:
            self.gain = torch.full((4,), 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scaled layer's outputs, added to the inputs."""
        made: torch.Tensor = self.linear(x) * self.gain + x
        return made


def _data(seed: int) -> list[torch.Tensor]:
    return [normal(1, 4, seed=seed), normal(1, 4, seed=seed + 100)]


def _built(maker: Edgeq, model: nn.Module, calibration: Any, **options: Any) -> QuantizedModel:
    return maker.quantize(model.eval(), (SAMPLE,), calibration=calibration, **options)


def _noted(folder: Path) -> tuple[Edgeq, list[str]]:
    """Return a session, and the reasons that it gives for what it does not keep."""
    maker, notes = Edgeq(cache_dir=folder), list[str]()
    maker._session.cache._note = notes.append
    return maker, notes


@pytest.mark.parametrize("registers", [True, False], ids=["buffer", "attribute"])
def test_a_constant_that_is_replaced_is_seen(tmp_path: Path, *, registers: bool) -> None:
    """The program exported earlier holds the old tensor, which is then overwritten."""
    maker, model = Edgeq(cache_dir=tmp_path), _Net(registers=registers)
    _built(maker, model, _data(1))
    old, model.gain = model.gain, torch.full((4,), 2.0)
    old.fill_(50.0)
    made = _built(maker, model, _data(2))
    assert made.tflite == _built(Edgeq(), model, _data(2)).tflite


def test_a_model_that_changes_while_its_samples_are_read_is_not_kept(tmp_path: Path) -> None:
    """The key of its graph is known, so that it is exported after the samples are read."""
    model = _Net()
    _built(Edgeq(cache_dir=tmp_path), model, _data(1))

    def changing() -> Iterator[torch.Tensor]:
        for sample in _data(7):
            with torch.no_grad():
                model.linear.weight.mul_(3)
            yield sample

    maker, notes = _noted(tmp_path)
    _built(maker, model, changing())
    assert notes == [
        "_Net: not kept in the conversion cache: its graph changed since its key was made"
    ]
    made = _built(Edgeq(cache_dir=tmp_path), _Net(), _data(8))
    assert made.tflite == _built(Edgeq(), _Net(), _data(8)).tflite


class _Drawing(_Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.linear(x) * random.random() + x
        return made


class _Counting(_Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global _COUNT
        _COUNT += 1
        made: torch.Tensor = self.linear(x) * float(_COUNT) + x
        return made


_COUNT = 0


@pytest.mark.parametrize("kind", [_Drawing, _Counting])
def test_a_key_takes_no_number_from_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[_Net]
) -> None:
    """A number that is drawn or counted during the export is the one that a build has."""

    def build(folder: Path | None) -> bytes:
        monkeypatch.setattr(f"{__name__}._COUNT", 0)
        data, maker = _data(1), Edgeq(cache_dir=folder)
        return _built(maker, kind(), data, strict_export=False).tflite

    plain = build(None)
    assert build(tmp_path) == plain
    assert build(tmp_path) == plain


def test_a_failure_of_the_machine_is_no_refusal_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is raised, not answered by a non-strict export, and the next session succeeds."""
    export = torch.export.export

    def failing(*args: Any, **options: Any) -> Any:
        if options.get("strict"):
            raise OSError(28, "No space left on device")
        return export(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch.export, "export", failing)
        with pytest.raises(RuntimeError, match="OSError"):
            _built(Edgeq(cache_dir=tmp_path), _Net(), _data(1))
    made = _built(Edgeq(cache_dir=tmp_path), _Net(), _data(1))
    assert made.exported_strictly
    assert made.tflite == _built(Edgeq(), _Net(), _data(1)).tflite


def test_a_hook_of_an_observer_makes_the_key_unknown(tmp_path: Path) -> None:
    """A quantizer of one's own may hang code on each observer."""

    def build(folder: Path | None, gain: float) -> tuple[bytes, list[str]]:
        quantizer = converters().set_global(per_channel())

        def hooked(_: Any, model: Any, observers: Any) -> None:
            for observer in filter(None, observers.values()):
                observer.register_forward_pre_hook(lambda _, args: (args[0] * gain,))

        quantizer.prepare_obs_or_fq_callback = hooked.__get__(quantizer)
        maker, notes = Edgeq(), list[str]()
        if folder is not None:
            maker, notes = _noted(folder)
        return _built(maker, _Net(), _data(1), quantizer=quantizer).tflite, notes

    for gain in (1.0, 10.0):
        made, notes = build(tmp_path, gain)
        assert made == build(None, gain)[0]
        assert "because of a hook of a" in notes[0]


def _warned(build: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build()
    return sorted(str(each.message) for each in caught if "strict" in str(each.message))


def test_warnings_of_strict_export_are_those_of_the_call(tmp_path: Path) -> None:
    """Not of a call with another name, or of one that asked for another export."""

    def told(folder: Path | None, **options: Any) -> list[str]:
        return _warned(
            lambda: Edgeq(cache_dir=folder).quantize(
                seeded(NonStrictOnly),
                NonStrictOnly.sample_inputs(),
                calibration=samples(NonStrictOnly, 2),
                **options,
            )
        )

    calls: list[dict[str, Any]] = [{"name": "first"}, {"name": "second"}, {"strict_export": False}]
    for options in calls:
        assert told(tmp_path, **options) == told(None, **options), options
