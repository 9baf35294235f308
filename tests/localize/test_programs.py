"""Samples that are measured together, as each would be by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fixtures.models import (
    BoundedActivations,
    DynamicBatch,
    EmbeddingMean,
    LstmNet,
    SelfAttention,
    SmallModel,
    SmoothActivations,
    normal,
    samples,
    seeded,
)
from pytest_edgeq import Edgeq, QuantizedModel
from pytest_edgeq.localize import results
from pytest_edgeq.localize.localizer import Localizer
from pytest_edgeq.localize.programs import Routine
from pytest_edgeq.localize.reference import ReferenceGraph, export
from pytest_edgeq.localize.rows import LayerErrors
from pytest_edgeq.samples import read_samples
from tests.localize.builds import Build

pytestmark = pytest.mark.figures

DYNAMIC, STATIC, PT2E = "recipe_dynamic_wi8_afp32", "recipe_static_wi8_ai8", "pt2e_static_int8"

Given = list[tuple[torch.Tensor, ...]]


def _localized(quantized: QuantizedModel, given: Given, together: int) -> LayerErrors:
    with pytest.MonkeyPatch.context() as patch, Localizer(quantized) as localizer:
        patch.setattr(results, "_SAMPLES", together)
        for sample in read_samples(iter(given), quantized.spec, "evaluation"):
            localizer.update(sample)
        errors = localizer.result()
        for plan in localizer._plans.values():
            assert plan.together == together
            routines = [made for step in plan.steps for made, _ in step.routines.values()]
            assert all(made._together for made in (*routines, plan.program.routine))
    return errors


def _assert_alike(one: LayerErrors, other: LayerErrors) -> None:
    """Every number of every row, up to what float32 rounds where it sums in another order."""
    assert one.cause == other.cause
    for first, second in zip(one.rows, other.rows, strict=True):
        ours, theirs = first.to_dict(), second.to_dict()
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            expected = theirs[name]
            if isinstance(value, float) and isinstance(expected, float):
                if name.endswith("_db") and min(value, expected) > 100:
                    continue  # both are float32's own noise
                if name == "excess_lsb" and max(value, expected) < -0.8:
                    continue  # a fifth of the bound, which is one on the largest of the values
                expected = pytest.approx(expected, rel=1e-4, abs=2e-4)
            assert value == expected, (name, ours, theirs)


@pytest.mark.parametrize(
    ("kind", "flow"),
    [
        (SelfAttention, PT2E),
        (SelfAttention, DYNAMIC),
        (LstmNet, DYNAMIC),
        (EmbeddingMean, PT2E),
        (BoundedActivations, PT2E),
        (SmoothActivations, STATIC),
        (SmoothActivations, None),
    ],
)
def test_samples_are_measured_together_as_each_by_itself(
    build: Build, kind: type[SmallModel], flow: str | None
) -> None:
    """Three and three, and one that is left."""
    quantized = build(kind, flow)
    given = list(samples(kind, 7, seed=2))

    _assert_alike(_localized(quantized, given, 3), _localized(quantized, given, 1))


def _of_any_batch(maker: Edgeq, flow: str) -> QuantizedModel:
    """Quantize a model whose batch size is open."""
    return maker.quantize(
        seeded(DynamicBatch),
        DynamicBatch.sample_inputs(),
        quantizer=flow,
        calibration=samples(DynamicBatch, 8),
        dynamic_shapes=DynamicBatch.dynamic_shapes(),
    )


@pytest.mark.parametrize("flow", [STATIC, DYNAMIC])
def test_only_samples_of_like_shapes_are_measured_together(maker: Edgeq, flow: str) -> None:
    """Images one by one and in pairs, in turn and twice in a row."""
    quantized = _of_any_batch(maker, flow)
    sizes = [2, 3, 3, 2, 2, 2, 3]
    given: Given = [(normal(size, 3, 8, 8, seed=seed),) for seed, size in enumerate(sizes)]

    _assert_alike(_localized(quantized, given, 2), _localized(quantized, given, 1))


@pytest.mark.parametrize("flow", [STATIC, DYNAMIC])
def test_rows_pool_samples_of_all_shapes(maker: Edgeq, flow: str) -> None:
    """The same images, batched in two other ways, in another order, give the same rows."""
    quantized = _of_any_batch(maker, flow)
    images = normal(12, 3, 8, 8, seed=0)

    def batched(*sizes: int) -> LayerErrors:
        return maker.localize(quantized, list(torch.split(images, list(sizes))))

    pooled = batched(2, 3, 2, 2, 3)
    _assert_alike(pooled, batched(3, 3, 3, 3))
    _assert_alike(
        pooled, maker.localize(quantized, list(torch.split(images, [3, 2, 2, 2, 3]))[::-1])
    )
    twos, threes = (maker.localize(quantized, list(torch.split(images[:6], n))) for n in (2, 3))
    _assert_alike(twos, threes)
    # Half of the images give other figures, so these tests can fail.
    with pytest.raises(AssertionError):
        _assert_alike(pooled, twos)


@pytest.mark.parametrize("flow", [PT2E, DYNAMIC])
@pytest.mark.parametrize("place", [0, 2, 4, 5])
def test_one_bad_sample_among_sound_ones_is_told(
    build: Build, monkeypatch: pytest.MonkeyPatch, flow: str, place: int
) -> None:
    """First and last of those that are measured together, and the one that is left at the end."""
    quantized = build(SelfAttention, flow)
    (index,) = {op.outputs[0] for op in quantized.graph.subgraphs[0].ops if op.name == "SOFTMAX"}
    given = list(samples(SelfAttention, 6, seed=2))
    monkeypatch.setattr(results, "_SAMPLES", 4)
    with Localizer(quantized) as localizer:
        kept, runs = localizer._runner, 0
        run, read = kept.run, kept.tensor

        def counted(inputs: Any) -> Any:
            nonlocal runs
            runs += 1
            return run(inputs)

        def spoilt(asked: int) -> Any:
            value = read(asked)
            if asked == index and runs == place + 2:
                value.flat[3] += value.flat[3] + 0.5 if value.dtype == np.float32 else 9
            return value

        monkeypatch.setattr(kept, "run", counted)
        monkeypatch.setattr(kept, "tensor", spoilt)
        first, *rest = read_samples([given[0], *given], quantized.spec, "evaluation")
        for sample in (first, *rest):
            localizer.update(sample)
        errors = localizer.result()

    assert errors.culprit is not None
    assert errors.culprit.op == "SOFTMAX"
    assert errors.culprit.verdict == "lowering"


def test_samples_may_be_written_over_when_they_are_given(build: Build) -> None:
    """As by a loader with one buffer for all."""
    quantized = build(BoundedActivations, PT2E)
    given = list(samples(BoundedActivations, 5, seed=2))
    buffer = given[0][0].clone()

    def one_buffer() -> Iterator[tuple[torch.Tensor, ...]]:
        for (image,) in given:
            buffer.copy_(image)
            yield (buffer,)

    with Localizer(quantized) as localizer:
        for sample in read_samples(one_buffer(), quantized.spec, "evaluation"):
            localizer.update(sample)
        errors = localizer.result()

    _assert_alike(errors, _localized(quantized, given, 1))


class _Attending(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What torch has no batching rule for, in front of what it has one for."""
        return torch.tanh(functional.scaled_dot_product_attention(x, x, x))


class _Drawing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What is certain is drawn, too."""
        return x * torch.bernoulli(torch.ones_like(x))


@pytest.mark.parametrize("make", [_Attending, _Drawing])
def test_what_torch_cannot_run_together_runs_one_by_one(
    make: Callable[[], nn.Module], capfd: pytest.CaptureFixture[str]
) -> None:
    """To the same values, twice, and without a word."""
    model, rows = make(), normal(3, 1, 2, 4, 8, seed=0)
    graph = ReferenceGraph(export(model, (rows[0],), {}))
    (returned,) = (node for node in graph.nodes if node.op == "output")
    (last,) = returned.all_input_nodes
    program = graph.program({last: 1})
    for _ in range(2):
        made = program.run_together([rows])
        torch.testing.assert_close(made[last], torch.cat([model(each) for each in rows]))

    assert program.routine._together is None
    assert capfd.readouterr().err == ""
    assert torch._C._functorch._is_vmap_fallback_enabled()  # type: ignore[attr-defined]


def test_what_fails_by_itself_fails_together() -> None:
    """Not as something that cannot be run together."""
    graph = ReferenceGraph(export(nn.Linear(4, 2), (normal(1, 4, seed=0),), {}))
    (returned,) = (node for node in graph.nodes if node.op == "output")
    (last,) = returned.all_input_nodes
    routine: Routine = graph.program({last: 1}).routine

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        routine.run_together(normal(3, 1, 5, seed=0))


def test_numbers_without_an_axis_are_held_in_a_row() -> None:
    """One of each sample, of one sample, too."""

    class Summed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sum()

    rows = normal(3, 4, seed=0)
    graph = ReferenceGraph(export(Summed(), (rows[0],), {}))
    (returned,) = (node for node in graph.nodes if node.op == "output")
    (last,) = returned.all_input_nodes
    program = graph.program({last: 1})

    torch.testing.assert_close(program.run_together([rows])[last], rows.sum(1))
    torch.testing.assert_close(program.start([rows[0]]).take(last), rows[0].sum()[None])
