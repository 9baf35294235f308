"""Files of a few layers that other tools could have made: sound ones pass, damaged ones do not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fixtures.tflite.layered import (
    DAMAGES,
    KINDS,
    Layer,
    Spoil,
    convolutional,
    dense,
    in_layer,
    moved_by,
    run,
    write,
)
from pytest_edgeq import Edgeq, QuantizedModel

pytestmark = pytest.mark.filterwarnings("ignore:edgeq.check. baselines were not checked")

Array = np.ndarray[Any, Any]

#: Layers and the shape of a sample, for a seed and a number of outputs.
NETS: dict[str, Callable[[int, int], tuple[list[Layer], tuple[int, ...]]]] = {
    "dense": lambda seed, n: (dense(seed, (12, 24, 24, n)), (12,)),
    "gate": lambda seed, n: (dense(seed, (12, 24, n), "LOGISTIC"), (12,)),
    "conv": lambda seed, n: (convolutional(seed, n), (8, 8, 3)),
    "classes": lambda seed, n: (convolutional(seed, n + 1, "SOFTMAX"), (8, 8, 3)),
}
COUNTS = (1, 2, 3, 10)
#: Each kind of file is of two nets, and each net has each number of outputs.
CASES = [
    (list(NETS)[place % len(NETS)], COUNTS[(place + number) % len(COUNTS)], kind)
    for number, kind in enumerate(KINDS)
    for place in (number, number + 1)
]

_VISIBLE = 0.15
"""Share of an output's rms, 16 dB, by which a damage must move it to be one that is to be seen."""


class Case:
    """One model with its samples."""

    def __init__(self, net: str, outputs: int, kind: str, seed: int = 0) -> None:
        self.layers, shape = NETS[net](500 + seed, outputs)
        draw = np.random.default_rng(1000 + seed)
        self.calibration = draw.normal(size=(128, *shape)).astype(np.float32)
        low, high = self.calibration.min(), self.calibration.max()
        new = draw.normal(size=(8, 1, *shape)).astype(np.float32)
        self.samples = [(each,) for each in np.clip(new, low, high)]
        self.kind, self.reference = kind, functools.partial(run, self.layers)

    def file(self, spoil: Spoil | None = None) -> bytes:
        """Write the file."""
        kept: Spoil = lambda place, stored: stored  # noqa: E731 # a name for one value
        return write(self.layers, self.kind, self.calibration, spoil or kept)

    def damages(self) -> list[tuple[str, bytes]]:
        """Every damage of every layer that can be seen at the outputs, with its file."""
        x = np.concatenate([each for (each,) in self.samples])
        weighted = [layer for layer in self.layers if layer.weight is not None]
        return [
            (f"{name} in layer {place}", self.file(in_layer(place, damage)))
            for name, damage in DAMAGES.items()
            for place in range(len(weighted))
            if moved_by(self.layers, self.kind, place, damage, x) > _VISIBLE
        ]


def alarm(maker: Edgeq, model: QuantizedModel, case: Case) -> str:
    """The text of a failed check; empty where it passes."""
    try:
        maker.check(model, case.samples)
    except AssertionError as error:
        return str(error)
    return ""


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("net", "outputs", "kind"), CASES)
def test_sound_files_pass(maker: Edgeq, net: str, outputs: int, kind: str) -> None:
    """Whatever they are quantized by, and however few their outputs are."""
    for seed in range(2):
        case = Case(net, outputs, kind, seed)
        loaded = maker.load(case.file(), reference=case.reference, name=f"net{seed}")
        assert alarm(maker, loaded, case) == ""


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("net", "outputs", "kind"), CASES[::2])
def test_damaged_files_are_told(maker: Edgeq, net: str, outputs: int, kind: str) -> None:
    """Each constant that changes an output by far more than rounding does."""
    case = Case(net, outputs, kind)
    for what, file in case.damages():
        told = alarm(maker, maker.load(file, reference=case.reference, name="net"), case)
        assert told, what
        assert "torch" not in told.splitlines()[0], told


@pytest.mark.parametrize("kind", ["int8", "dynamic"])
def test_a_float_file_is_a_reference(maker: Edgeq, tmp_path: Path, kind: str) -> None:
    """By path, as bytes or as a model; ops and constants are compared with its own."""
    case = Case("dense", 3, kind)
    content = Case("dense", 3, "float32").file()
    path = tmp_path / "float.tflite"
    path.write_bytes(content)
    for given in (
        {"reference": path},
        {"reference": str(path)},
        {"reference": content},
        {"reference": maker.load(content)},
        {"float_tflite": path},
    ):
        sound = maker.load(case.file(), name="net", **given)
        assert list(maker.compare(sound, case.samples).stages) == ["quantization", "total"]
    assert alarm(maker, sound, case) == ""
    for what, file in case.damages()[::4]:
        told = alarm(maker, maker.load(file, reference=path, name="net"), case)
        assert told, what


@pytest.mark.parametrize(("outputs", "first"), [(1, False), (3, True)])
def test_a_probability_near_0_is_as_exact_as_its_logit(
    maker: Edgeq, outputs: int, first: bool
) -> None:
    """On one sample or on all; a weight that is off by a thousandth is told all the same."""
    case = Case("gate", outputs, "float32")
    shift = case.layers[-2]
    assert shift.bias is not None
    shift.bias[:] -= 6 if first else 3
    for seed in range(3):
        draw = np.random.default_rng(seed)
        case.samples = [(draw.normal(size=(1, 12)).astype(np.float32) * 2,) for _ in range(8)]
        loaded = maker.load(case.file(), reference=case.reference, name="net")
        assert alarm(maker, loaded, case) == ""

    def off(stored: Any) -> Any:
        stored.weight[:] *= np.float32(1.001)
        return stored

    spoilt = Case("gate", outputs, "float32")
    spoilt.layers[-2].bias[:] -= 6 if first else 3  # type: ignore[index] # as above
    loaded = maker.load(spoilt.file(in_layer(0, off)), reference=case.reference, name="net")
    assert alarm(maker, loaded, case)
