"""`localize` and `check` by an executor: the same rows, findings and texts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

import numpy as np
import pytest
import torch

from fixtures.models import ResidualNet, seeded
from fixtures.tflite.layered import dense, run, write
from pytest_edgeq import Edgeq, QuantizedModel
from pytest_edgeq.check.gate import CheckResult, check
from pytest_edgeq.compare.executors import stream
from pytest_edgeq.progress import Progress
from tests.bench.detection.edits import edited, ops_of
from tests.bench.detection.flatfile import FlatFile
from tests.executors.conftest import AtOnce, Near, Threads, figures


def _damaged(quantized: QuantizedModel) -> QuantizedModel:
    """Return a file one of whose convolutions has a channel of other weights."""
    file = FlatFile(quantized.tflite)

    def scaled(values: np.ndarray) -> None:
        values[1] = values[1] * 1.5

    edited(file, ops_of(file, "CONV_2D")[1], 1, scaled)
    return quantized.with_tflite(file.content())


def _late(given: list[Any]) -> list[Any]:
    """Return samples of which a later one is the worst."""
    loud = list(given)
    loud[9] = tuple(4 * each for each in loud[9])
    return loud


def _other(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a reference that changes its outputs for the sample that is the worst."""
    net = seeded(ResidualNet)

    def reference(x: Any) -> Any:
        made = net(torch.as_tensor(x)).detach().numpy()
        return change(made) if abs(x).max() > 8 else made

    return reference


def _checked(model: QuantizedModel, inputs: Any, executor: Executor | None) -> list[Any]:
    """Return everything that a check measures and finds."""
    results: list[CheckResult] = []
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        try:
            check(
                model,
                inputs,
                runtime="xnnpack",
                threads=1,
                claims=lambda comparison: (),
                writes=False,
                progress=Progress(),
                on_result=results.append,
                keeps_points=True,
                engine=Edgeq(executor=executor)._session.executor.engine(),
            )
            text = ""
        except AssertionError as error:
            text = str(error)
    (result,) = results
    comparison = None if result.comparison is None else figures(result.comparison)
    return [text, result.findings, repr(result.layers), comparison, [str(n.message) for n in notes]]


@pytest.mark.slow
@pytest.mark.parametrize(("flow", "is_damaged"), [("quantized", True), ("recipe", False)])
def test_a_check_does_not_depend_on_workers_or_chunks(
    flow: str,
    is_damaged: bool,
    given: list[Any],
    threads: Threads,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Text, findings, rows, errors and notes, of a sound file and of one that is not."""
    model = request.getfixturevalue(flow)
    model = _damaged(model) if is_damaged else model
    inputs = _late(given)
    alone = _checked(model, inputs, None)
    assert "clipping causes most of the loss" in alone[0] or is_damaged
    assert ("verdict='lowering'" in alone[2]) == is_damaged
    assert _checked(model, iter(inputs), threads(3)) == Near(alone)
    rows = repr(Edgeq().localize(model, inputs))
    monkeypatch.setattr(stream, "_SECONDS", 0.0)
    source = Edgeq.samples(lambda indices: (inputs[index] for index in indices), len(inputs))
    assert repr(Edgeq().localize(model, source, executor=threads(5))) == rows


def test_a_sample_that_is_none_is_an_error(
    quantized: QuantizedModel, given: list[Any], threads: Threads
) -> None:
    """Not a finding, read here or where it is used."""
    wrong = [*given[:7], "no sample", *given[8:]]
    source = Edgeq.samples(lambda indices: (wrong[index] for index in indices), len(wrong))
    errors = []
    for inputs, executor in ((wrong, None), (wrong, threads(2)), (source, threads(2))):
        with pytest.raises(TypeError, match="evaluation sample 7") as error:
            Edgeq().check(quantized, inputs, executor=executor)
        errors.append(str(error.value))
    assert len(set(errors)) == 1


def test_a_file_that_does_not_fit_is_a_finding(
    quantized: QuantizedModel, given: list[Any], threads: Threads
) -> None:
    """Of a reference with outputs of another shape for a later sample."""
    loaded = Edgeq().load(quantized.tflite, reference=_other(lambda made: made[:, :3]))
    alone = _checked(loaded, _late(given), None)
    assert "the reference returns shape [1, 3]" in alone[0]
    assert _checked(loaded, _late(given), threads(2)) == alone


@pytest.mark.parametrize(("kind", "factor"), [("int8", 1.0), ("float32", 1.2)])
def test_few_outputs_of_a_callable_are_judged_together(
    kind: str, factor: float, threads: Threads
) -> None:
    """Over all samples, wherever these are measured; one has a probability near 0."""
    layers = dense(3, (12, 24, 1), "LOGISTIC")
    draw = np.random.default_rng(0)
    calibration = 3 * draw.normal(size=(64, 12)).astype(np.float32)
    file = write(layers, kind, calibration)

    def reference(x: Any) -> Any:
        return run(layers, x * factor)

    loaded = Edgeq().load(file, reference=reference)
    inputs = [each[None] for each in calibration[:12]]
    alone = Edgeq().localize(loaded, inputs)
    assert (alone.culprit is not None) == (factor != 1)
    assert repr(Edgeq().localize(loaded, inputs, executor=threads(3))) == repr(alone)


def test_the_float_form_that_leaves_torch_is_reported(
    quantized: QuantizedModel, given: list[Any], threads: Threads
) -> None:
    """On a later sample alone: the client looks at it, and at none behind it."""
    loaded = Edgeq().load(quantized.tflite, reference=_other(lambda made: 2 * made))
    inputs = _late(given)
    alone = Edgeq().localize(loaded, inputs)
    assert "the file in float does not compute what the reference does" in repr(alone)
    assert repr(Edgeq().localize(loaded, inputs, executor=threads(3))) == repr(alone)


def test_models_whose_samples_depend_on_each_other(
    quantized: QuantizedModel, given: list[Any]
) -> None:
    """Are measured here, in order."""
    reference: Any = seeded(ResidualNet)
    reference.register_forward_hook(lambda module, inputs, output: None)
    loaded = Edgeq().load(quantized.tflite, reference=reference)
    executor = AtOnce(1)
    with pytest.warns(UserWarning, match="in this process, in order: the reference has hooks"):
        Edgeq().localize(loaded, given[:3], executor=executor)
    assert not executor.count
