"""Which steps are reported, and how many samples of each."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fixtures.models import ConvBnRelu, samples, seeded
from pytest_edgeq import Edgeq
from pytest_edgeq.progress import Progress, Step


class Recorder(Progress):
    """Notes the steps that ended, and checks that each had begun."""

    def __init__(self) -> None:
        self.running: list[Step] = []
        self.told: list[tuple[str, int, int | None]] = []

    def begin(self, step: Step) -> None:
        """Note the step."""
        self.running.append(step)

    def end(self, step: Step) -> None:
        """Note what was done."""
        self.running.remove(step)
        self.told.append((step.what, step.done, step.total))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quantizer", "steps"),
    [
        ("pt2e_static_int8", [("export", 0, None), ("calibrate", 8, 8), ("convert", 0, None)]),
        (
            "recipe_static_wi8_ai8",
            [("convert", 0, None), ("calibrate", 8, 8), ("quantize", 0, None)],
        ),
    ],
)
def test_the_steps_of_a_model(quantizer: str, steps: list[Any]) -> None:
    """A generator has no total, a list has; what is nested ends first."""
    recorder = Recorder()
    edgeq = Edgeq(progress=recorder, cache="off")
    model = edgeq.quantize(
        seeded(ConvBnRelu),
        ConvBnRelu.sample_inputs(),
        quantizer=quantizer,
        calibration=list(samples(ConvBnRelu, 8)),
    )
    assert list(dict.fromkeys(recorder.told)) == steps

    recorder.told.clear()
    edgeq.compare(model, samples(ConvBnRelu, 3, seed=1))
    edgeq.localize(model, list(samples(ConvBnRelu, 2, seed=1)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nothing is remembered outside of a test
        edgeq.check(model, list(samples(ConvBnRelu, 2, seed=2)))
    assert [each for each in recorder.told if each[0] != "convert"] == [
        ("compare", 3, None),
        ("localize", 2, 2),
        ("check", 2, 2),
    ]
    assert recorder.running == []


def test_a_step_that_fails_ends() -> None:
    """The line of a terminal would stay otherwise."""
    recorder = Recorder()
    with pytest.raises(ValueError, match="refused"), recorder.step("convert", "Net"):
        raise ValueError("refused")
    assert recorder.told == [("convert", 0, None)]
    assert recorder.running == []


class Endless(torch.utils.data.IterableDataset[Any]):
    """A dataset whose loader has a length in vain."""

    def __iter__(self) -> Iterator[int]:
        """Give one sample."""
        return iter([1])


def test_the_number_of_samples_is_known_or_not() -> None:
    """The sum of several iterables; torch's DataLoader of a stream raises when asked."""
    recorder = Recorder()
    loader = torch.utils.data.DataLoader(Endless())
    for sources in ([[1, 2], (3,)], [[1, 2], iter([3])], [loader], [None], []):
        with recorder.step("calibrate", "Net", *sources):
            pass
    assert [total for _, _, total in recorder.told] == [3, None, None, None, None]
