"""A comparison by an executor: the same figures, errors and texts as in this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fixtures.models import ResidualNet, net, seeded
from pytest_edgeq import Comparison, Edgeq, QuantizedModel
from pytest_edgeq.compare.comparer import compare
from pytest_edgeq.compare.executors import stream
from pytest_edgeq.compare.executors.sample_executor import SampleExecutor
from pytest_edgeq.progress import Progress, Step
from pytest_edgeq.report.journal import Journal
from tests.executors.conftest import AtOnce, Near, Threads, figures


def _with_points(model: QuantizedModel, inputs: Any, executor: Executor | None) -> Comparison:
    session = Edgeq(journal=Journal(details=True))
    return session.compare(model, inputs, executor=executor)


@pytest.mark.parametrize(
    ("flow", "seconds", "workers"), [("quantized", 0.0, 5), ("recipe", 0.02, 2)]
)
def test_figures_do_not_depend_on_workers_or_chunks(
    flow: str,
    seconds: float,
    workers: int,
    given: list[Any],
    threads: Threads,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All fields of a comparison: chunks of one sample and of several."""
    model = request.getfixturevalue(flow)
    alone = Near(figures(_with_points(model, given, None)))
    monkeypatch.setattr(stream, "_SECONDS", seconds)
    assert figures(_with_points(model, iter(given), threads(workers))) == alone


def test_the_first_sample_that_fails_is_reported(
    quantized: QuantizedModel, given: list[Any], threads: Threads
) -> None:
    """A sample of another shape, read by the client, and one that the factory gives."""
    wrong = [*given[:5], torch.zeros(1, 3, 8, 8), *given[5:9], torch.zeros(2)]
    with pytest.raises(ValueError, match="evaluation sample 5") as alone:
        Edgeq().compare(quantized, wrong)
    for inputs in (wrong, Edgeq.samples(lambda indices: (wrong[i] for i in indices), len(wrong))):
        with pytest.raises(ValueError, match="evaluation sample 5") as elsewhere:
            Edgeq().compare(quantized, inputs, executor=threads(2))
        assert str(elsewhere.value) == str(alone.value)
    nothing: list[Any] = [[], Edgeq.samples(lambda indices: indices, 0)]
    for empty in nothing:
        with pytest.raises(ValueError, match="there is no sample"):
            Edgeq().compare(quantized, empty, executor=threads(1))


def test_samples_are_read_where_they_are_used(
    quantized: QuantizedModel, tmp_path: Path, given: list[Any], threads: Threads
) -> None:
    """The same figures by files as by the list, but for the fingerprint, which has a mark."""
    for index, sample in enumerate(given):
        np.save(tmp_path / f"{index}.npy", sample[0].numpy())

    def factory(indices: range) -> Iterator[torch.Tensor]:
        with (tmp_path / "readers").open("a") as log:
            log.write(f"{threading.current_thread() is threading.main_thread()}\n")
        for index in indices:
            yield torch.from_numpy(np.load(tmp_path / f"{index}.npy"))

    source = Edgeq.samples(factory, len(given))
    alone = Edgeq().compare(quantized, source)
    assert set((tmp_path / "readers").read_text().split()) == {"True"}
    (tmp_path / "readers").unlink()
    elsewhere = Edgeq().compare(quantized, source, executor=threads(3))
    readers = (tmp_path / "readers").read_text().split()
    assert readers.count("True") == 1  # to see whether the reference changes
    assert figures(elsewhere) == Near(figures(alone))
    listed = figures(Edgeq().compare(quantized, given))
    assert elsewhere.fingerprint.startswith("by sample ")
    assert [each for each in figures(elsewhere) if each != elsewhere.fingerprint] == Near(
        [each for each in listed if not isinstance(each, str)]
    )


def test_what_makes_no_source_is_refused() -> None:
    """Fewer samples or more than indices, a list in place of a factory, numbers that are none."""
    for count in (2, 4):
        with pytest.raises(ValueError, match=r"expected 3 samples of the factory for range\(0, 3"):
            list(Edgeq.samples(lambda indices, count=count: [0] * count, 3))  # type: ignore[misc]
    with pytest.raises(TypeError, match="expected a factory"):
        Edgeq.samples([1, 2], 2)  # type: ignore[arg-type] # wrong on purpose
    with pytest.raises(TypeError, match="number of samples"):
        Edgeq.samples(list, 2.0)  # type: ignore[arg-type] # wrong on purpose
    with pytest.raises(ValueError, match="0 samples or more"):
        Edgeq.samples(list, -1)


def test_samples_that_depend_on_each_other_are_measured_in_order(
    quantized: QuantizedModel, given: list[Any]
) -> None:
    """In this process, which a warning tells."""
    parts = {"net": seeded(ResidualNet), "seen": nn.Buffer(torch.zeros(1))}
    counting = net(lambda self, x: self.net(x) + self.seen.add_(1), **parts).eval()
    loaded = Edgeq().load(quantized.tflite, reference=counting)
    alone = Near(figures(Edgeq().compare(loaded, given)))
    executor = AtOnce(2)
    with pytest.warns(UserWarning, match=r"in this process, in order: the reference changes"):
        found = Edgeq().compare(loaded, given, executor=executor)
    assert not executor.count
    assert figures(found) == alone


class _Watching(Progress):
    """Keeps the step."""

    def begin(self, step: Step) -> None:
        """Keep the step."""
        self.step_seen = step


def test_chunks_in_flight_are_bounded_and_counted(
    quantized: QuantizedModel, given: list[Any], threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two a worker; the samples are read no further ahead."""
    monkeypatch.setattr(stream, "_SECONDS", 0.0)
    progress, ahead = _Watching(), list[int]()

    def generator() -> Iterator[Any]:
        for number, sample in enumerate(given, 1):
            ahead.append(number - progress.step_seen.done)
            yield sample

    engine = SampleExecutor(threads(3))
    compare(quantized, generator(), runtime="xnnpack", progress=progress, engine=engine)
    assert progress.step_seen.done == len(given)
    assert progress.step_seen.in_flight == 0
    assert max(ahead) == 2 * 3


def test_a_chunk_takes_half_a_second() -> None:
    """Of unknown cost one sample; towards the end a share of what is left."""
    size = stream.chunk_size
    assert [size(seconds, None, 4) for seconds in (None, 0.05, 3.0, 0.0)] == [1, 10, 1, 512]
    assert [size(0.05, left, 4) for left in (8, 1)] == [1, 1]
    assert size(0.05, 8, 1) == 4
