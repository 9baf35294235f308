"""Samples on several cores: the same figures, texts and errors as on one."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ai_edge_litert.interpreter import Interpreter
from torch import nn

from fixtures.models import ConcatSkip, ResidualNet, SmallModel, net, normal, samples, seeded
from pytest_edgeq import Comparison, Edgeq, assert_accuracy_drop
from pytest_edgeq.compare.parallel import in_order
from pytest_edgeq.runtimes.runner import Runner
from tests.bench.detection.edits import edited, ops_of
from tests.bench.detection.flatfile import FlatFile
from tests.quantize import making

PT2E, STATIC = "pt2e_static_int8", "recipe_static_wi8_ai8"


_quantized = functools.cache(making.quantize)


def _figures(comparison: Comparison) -> list[Any]:
    stages = {name: stage.to_dict() for name, stage in comparison.stages.items()}
    kept = [(each.index, each.sqnr_db, each.inputs.tensors) for each in comparison.worst_samples]
    each = comparison.total.outputs.values()
    return [comparison.to_dict(), stages, comparison.fingerprint, repr(kept), repr(list(each))]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "flow"), [(ResidualNet, PT2E), (ConcatSkip, STATIC)])
def test_figures_do_not_depend_on_the_number_of_cores(kind: type[SmallModel], flow: str) -> None:
    """Equal to the last bit, of every output and every sample."""
    quantized = _quantized(flow, kind)
    given = list(samples(kind, 23, seed=2))
    found = [_figures(Edgeq(threads=threads).compare(quantized, given)) for threads in (1, 2, 7)]
    assert all(each == found[0] for each in found[1:])


@pytest.mark.parametrize(("flow", "factor"), [(PT2E, 1.5), (STATIC, 1.0)])
def test_the_layer_to_blame_does_not_depend_on_the_number_of_cores(
    flow: str, factor: float
) -> None:
    """Every figure of every row equal to the last bit; also where a later sample is the bad one."""
    quantized = _quantized(flow)
    file = FlatFile(quantized.tflite)
    op = ops_of(file, "CONV_2D")[1]

    def scaled(values: np.ndarray) -> None:
        values[1] = values[1] * factor

    edited(file, op, 1, scaled)
    changed = quantized.with_tflite(file.content())
    given = list(samples(ResidualNet, 11, seed=2))
    given[7] = tuple(4 * each for each in given[7])
    found = [Edgeq(threads=threads).localize(changed, given) for threads in (1, 3)]
    assert repr(found[0]) == repr(found[1])
    culprit = found[0].culprit
    assert (culprit is not None and culprit.index == op) == (factor != 1)


def _counts_by_buffer(self: Any, x: torch.Tensor) -> Any:
    return torch.relu(x) + self.seen.add_(1)


def _counts_by_attribute(self: Any, x: torch.Tensor) -> Any:
    self.count = getattr(self, "count", 0) + 1
    return torch.relu(x) + self.count


@pytest.mark.parametrize("forward", [_counts_by_buffer, _counts_by_attribute])
def test_a_reference_with_a_state_is_measured_in_order(forward: Any) -> None:
    """On any number of cores: its outputs depend on how often it was called."""
    plain = Edgeq().quantize(nn.ReLU().eval(), (normal(1, 8, seed=0),), quantizer=None)
    given = [normal(1, 8, seed=seed) for seed in range(9)]
    found = []
    for threads in (1, 4):
        edgeq = Edgeq(threads=threads)
        model = net(forward, seen=nn.Buffer(torch.zeros(1))).eval()
        loaded = edgeq.load(plain.tflite, reference=model)
        found.append(_figures(edgeq.compare(loaded, given)))
    assert found[0] == found[1]


def test_accuracy_is_scored_in_order_on_any_number_of_cores() -> None:
    """The metric sees the same outputs in the same order; labels may share a buffer."""
    seen: list[list[Any]] = []
    for threads in (1, 2, 5):
        quantized = _quantized(PT2E).clone()
        quantized.threads = threads
        label, scored = torch.zeros(1), list[Any]()

        def pairs(label: torch.Tensor = label) -> Iterator[Any]:
            for number, sample in enumerate(samples(ResidualNet, 400, seed=2)):
                label.fill_(number)
                yield sample, label

        def metric(outputs: Any, label: Any, scored: list[Any] = scored) -> bool:
            scored.append((float(label), outputs.double().sum().item()))
            return bool(outputs.sum() * 0 == 0)

        assert_accuracy_drop(quantized, pairs(), metric, max_drop=0.05)
        seen.append(scored)
    assert seen[0] == seen[1] == seen[2]
    assert [number for number, _ in seen[0][::2]] == list(map(float, range(400)))


def test_the_first_sample_that_fails_is_reported() -> None:
    """Whichever core is done first: the text is that of one core."""
    model = nn.Linear(4, 4).eval()
    made = Edgeq().quantize(model, (normal(1, 4, seed=0),), quantizer=None)

    def refusing(self: Any, x: torch.Tensor) -> Any:
        if float(x.sum()) > 1e3:
            raise RuntimeError(f"sum is {float(x.sum()):.0f}")
        return model(x)

    given = [torch.full((1, 4), 1e4 * (seed > 5) * seed) for seed in range(20)]
    texts = []
    for threads in (1, 2, 5):
        edgeq = Edgeq(threads=threads)
        with pytest.raises(RuntimeError, match="evaluation sample 6") as caught:
            edgeq.compare(edgeq.load(made.tflite, reference=net(refusing).eval()), given)
        texts.append(str(caught.value))
    assert texts[0] == texts[1] == texts[2]


def test_samples_may_share_a_buffer_and_few_are_held() -> None:
    """A loader may write the next one over the last; memory does not grow with their number."""
    quantized = _quantized(PT2E)
    shape = ResidualNet.sample_inputs()[0].shape
    buffer, most = torch.zeros(shape), 0
    alive: list[weakref.ref[torch.Tensor]] = []

    def shared() -> Iterator[torch.Tensor]:
        for seed in range(30):
            buffer.copy_(normal(*shape, seed=seed))
            yield buffer

    def fresh() -> Iterator[torch.Tensor]:
        nonlocal most
        for seed in range(30):
            made = normal(*shape, seed=seed)
            alive.append(weakref.ref(made))
            yield made
            del made
            gc.collect(0)
            most = max(most, sum(each() is not None for each in alive))

    found = [_figures(Edgeq(threads=3).compare(quantized, each)) for each in (shared(), fresh())]
    assert found[0] == found[1]
    assert most <= 3 + 2


@pytest.fixture
def three_threads() -> Iterator[None]:
    """Let torch run on three threads, which is what no machine and no worker has by default."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_the_threads_of_torch_are_as_before() -> None:
    """After a comparison, and after one that failed."""
    quantized = _quantized(PT2E)
    Edgeq(threads=2).compare(quantized, samples(ResidualNet, 4))
    assert torch.get_num_threads() == 3
    with pytest.raises(ValueError, match="expected shape"):
        Edgeq(threads=2).compare(quantized, [*samples(ResidualNet, 2), (torch.zeros(1),)])
    assert torch.get_num_threads() == 3


def test_no_interpreter_runs_in_two_threads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where runtimes differ, their ops are compared while another thread localizes the errors."""
    runs: list[tuple[Runner, int]] = []
    run = Runner.run

    def watched(self: Runner, inputs: Any) -> Any:
        runs.append((self, threading.get_ident()))
        return run(self, inputs)

    def board(path: Path, signature: str | None) -> Any:
        call = Interpreter(str(path)).get_signature_runner(signature)
        return lambda inputs: {name: value + 1 for name, value in call(**inputs).items()}

    edgeq = Edgeq(threads=2, runtimes={"board": board})
    quantized = edgeq.quantize(seeded(ConcatSkip), ConcatSkip.sample_inputs(), quantizer=None)
    monkeypatch.setattr(Runner, "run", watched)

    with pytest.raises(AssertionError, match="runtimes 'board' and 'builtin'"):
        edgeq.check(quantized, samples(ConcatSkip, 8, seed=1))

    main = threading.get_ident()
    began = next(index for index, (_, thread) in enumerate(runs) if thread != main)
    threads = defaultdict(set)
    for runner, thread in runs[began:]:
        threads[runner].add(thread)
    assert all(len(each) == 1 for each in threads.values())


def test_the_error_of_an_earlier_sample_is_raised_before_one_of_reading() -> None:
    """A worker is still at the first sample when the second cannot be read."""
    unread = threading.Event()

    def items() -> Iterator[int]:
        yield 0
        unread.set()
        raise TypeError("the second sample is not one")

    def measure(worker: object, sample: int) -> None:
        assert unread.wait(60)
        raise ValueError("the first sample fails")

    with pytest.raises(ValueError, match="the first sample"):
        list(in_order(items(), object, measure, 2))
