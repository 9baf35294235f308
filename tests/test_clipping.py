"""Ranges between the ops that clip what the calibration did not have."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from fixtures.models import net, seeded
from fixtures.tflite.writer import chain, constant
from pytest_edgeq import Edgeq, QuantizedModel
from pytest_edgeq.compare.samples import read_samples
from pytest_edgeq.localize.localizer import Localizer
from pytest_edgeq.localize.mistakes import BIT_DB, FAR
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.tflite.writing import write_clamped
from tests.bench.detection.sound import NETS, sound
from tests.checked import checked

Array = npt.NDArray[Any]


def _text(model: QuantizedModel, samples: Any) -> str:
    return checked(model, samples)[0]


def _tokens() -> nn.Module:
    """The second half of the tokens has larger vectors than the first."""

    def forward(self: Any, ids: torch.Tensor) -> Any:
        x = self.embedding(ids) * (1 + 2 * (ids >= 32)).unsqueeze(-1)
        return torch.tanh(self.head(x + torch.relu(self.hidden(x))))

    layers = {"hidden": nn.Linear(16, 16), "head": nn.Linear(16, 8)}
    return net(forward, embedding=nn.Embedding(64, 16), **layers)


def _ids(n: int, seed: int, low: int, high: int) -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return [torch.randint(low, high, (1, 12), generator=drawn) for _ in range(n)]


@pytest.fixture(scope="module")
def tokens() -> QuantizedModel:
    """Calibrated on the first half of the tokens."""
    calibration = _ids(32, 1, 0, 32)
    return Edgeq().quantize(
        seeded(_tokens), _ids(1, 0, 0, 32)[0], calibration=calibration, name="tokens"
    )


def test_tokens_that_the_calibration_never_had_are_found(tokens: QuantizedModel) -> None:
    """Named are the op, how much lies beyond, the samples, and how the calibration's fare."""
    known = _ids(8, 2, 0, 32)
    assert _text(tokens, known) == ""
    first, *others = _text(tokens, known[:7] + _ids(1, 3, 32, 64)).splitlines()
    assert ": expected values within the range of its codes, [" in first
    assert "% outside, as far as [" in first
    assert "(sample 7)" in first
    assert others[0].startswith("cause: clipping causes most of the loss of output 'output_0'")
    assert others[1].startswith("cause: on calibration samples the file has ")
    assert others[2] == "fix: calibrate with samples like those evaluated, preprocessed alike"
    # Of a few such tokens, chance explains how many values lie beyond, but not how far.
    known[7][0, 3:6] = torch.tensor([60, 50, 33])
    first = _text(tokens, known).splitlines()[0]
    assert ": expected values within the range of its codes, [" in first
    assert "(sample 7)" in first


@pytest.mark.slow
def test_samples_that_are_rare_in_the_calibrations_distribution_pass() -> None:
    """Of 128 samples some exceed the largest of 32, and these few make most of the loss."""
    mlp = NETS["Mlp"]
    maker = Edgeq()
    made = sound(maker, mlp, "pt2e_static_int8")
    outputs = [
        maker.compare(made.quantized, samples).total.outputs["output_0"].sqnr_db
        for samples in (made.evaluation, mlp.calibration())
    ]
    assert outputs[0] < outputs[1] - 2 * BIT_DB
    assert _text(made.quantized, made.evaluation) == ""


@pytest.mark.slow
def test_a_loaded_file_is_judged_by_how_far_its_ranges_are_left(tokens: QuantizedModel) -> None:
    """Its calibration samples are not known."""
    model = Edgeq().load(tokens.tflite, reference=tokens.float_model, name="tokens")
    assert _text(model, _ids(8, 2, 0, 32)) == ""
    first, *others = _text(model, _ids(8, 3, 32, 64)).splitlines()
    assert ": expected values within the range of its codes, [" in first
    assert not any("calibration samples" in line for line in others)


def test_clipped_values_that_a_selection_discards_are_no_loss() -> None:
    """The exponential of a SELU is far beyond its range where the SELU returns another value."""
    drawn = torch.Generator().manual_seed(0)
    given = [torch.randn(4, 10, generator=drawn) for _ in range(72)]
    model = seeded(lambda: nn.Sequential(nn.Linear(10, 32), nn.SELU(), nn.Linear(32, 4)))
    made = Edgeq().quantize(model, given[0], calibration=given[:64])
    with Localizer(made) as localizer:
        for sample in read_samples(given[64:], made.spec, "evaluation"):
            localizer.update(sample)
        assert all(each.overshoot < FAR for each in localizer.clipped_ranges())


_STEP = 1 / 32
"""Scale of the weights; every weight is a multiple of it."""


_LAYERS = [
    np.round(np.linalg.qr(drawn.normal(size=(16, 16)))[0] / _STEP).astype(np.int8)
    for drawn in map(np.random.default_rng, range(6))
]
"""Rotations."""


def _reference(x: Any) -> Array:
    value = np.asarray(x)
    for codes in _LAYERS:
        value = np.maximum(value @ (codes.T * np.float32(_STEP)), 0)
    return np.asarray(value, np.float32)


def _vectors(n: int, seed: int) -> list[Array]:
    return list(np.random.default_rng(seed).uniform(-1, 1, (n, 8, 16)).astype(np.float32))


def _content() -> bytes:
    """Write the layers in int8, each RELU as an op of its own, with the ranges of some samples."""
    value = np.concatenate(_vectors(64, 5))
    x = {"dtype": "int8", "shape": (8, 16), "scales": [1 / 127]}
    last, ops, tensors = "x", list[Any](), {"x": x}
    for number, codes in enumerate(_LAYERS):
        value = np.maximum(value @ (codes.T * np.float32(_STEP)), 0)
        peak = (8 if number == len(_LAYERS) - 1 else 1.1) * float(np.abs(value).max())
        stored, made, clamped = (f"{name}{number}" for name in ("stored", "made", "clamped"))
        tensors[stored] = constant(codes, "int8", scales=[_STEP])
        tensors[made] = tensors[clamped] = x | {"scales": [peak / 255], "zero_points": [-128]}
        ops.append(("FULLY_CONNECTED", f"{last} {stored} -", made, "FullyConnectedOptions"))
        ops.append(("RELU", made, last := clamped))
    return chain(*ops, inputs="x", outputs=last, **tensors)


def test_codes_of_a_relus_zeros_are_not_clipped() -> None:
    """Half of what a layer gives lies below its range, and is what a RELU behind it leaves out."""
    model = Edgeq().load(_content(), reference=_reference, name="layers")
    assert _text(model, _vectors(8, 6)) == ""


def test_tensors_are_clamped() -> None:
    """Also one that is an output, and one that two ops take."""
    ops = ("NEG", "x", "y", "NegOptions"), ("ADD", "y y", "z", "AddOptions")
    whole = EdgeFile(chain(*ops, inputs="x", outputs="y z"))
    content = write_clamped(whole.graph, 0, {1: (-1.0, 2.0), 2: (-1.5, 3.0)})
    values = np.array([[-3.0, -1.0, 0.5, 3.0]], np.float32)
    first, second = EdgeFile(content).run(["x"], [values], "builtin")
    np.testing.assert_array_equal(first, [[2.0, 1.0, -0.5, -1.0]])
    np.testing.assert_array_equal(second, [[3.0, 2.0, -1.0, -1.5]])
