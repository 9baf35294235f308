"""Samples that are measured together, as each would be by itself."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch

from fixtures.models import DynamicBatch, SelfAttention, normal, samples, seeded
from pytest_edgeq import Edgeq
from pytest_edgeq.compare.samples import read_samples
from pytest_edgeq.localize.localizer import Localizer
from pytest_edgeq.localize.rows import LayerErrors
from pytest_edgeq.localize.single_ops import OpGroup
from tests.localize.builds import DYNAMIC, PT2E, STATIC, Build
from tests.localize.rows import culprit

pytestmark = pytest.mark.figures


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


@pytest.mark.slow
@pytest.mark.parametrize("flow", [STATIC, DYNAMIC])
def test_rows_pool_samples_of_all_shapes(maker: Edgeq, flow: str) -> None:
    """The same images, batched in two other ways, in another order, give the same rows."""
    quantized = maker.quantize(
        seeded(DynamicBatch),
        DynamicBatch.sample_inputs(),
        quantizer=flow,
        calibration=samples(DynamicBatch, 8),
        dynamic_shapes=DynamicBatch.dynamic_shapes(),
    )
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


def test_files_of_isolated_ops_are_open_for_one_size_at_a_time(maker: Edgeq) -> None:
    """Memory does not grow with the number of sizes."""
    quantized = maker.quantize(
        seeded(DynamicBatch),
        DynamicBatch.sample_inputs(),
        quantizer=DYNAMIC,
        dynamic_shapes=DynamicBatch.dynamic_shapes(),
    )
    inputs = [DynamicBatch.sample_inputs(batch=n) for n in (1, 2, 3)]
    gc.collect()
    with Localizer(quantized) as localizer:
        n_files = []
        for sample in read_samples(inputs, quantized.spec, "evaluation"):
            localizer.update(sample)
            n_files.append(sum(type(each) is OpGroup for each in gc.get_objects()))

    assert n_files == [n_files[0]] * 3


@pytest.mark.parametrize(("flow", "place"), [(PT2E, 0), (DYNAMIC, 5)])
def test_one_bad_sample_among_sound_ones_is_told(
    build: Build, monkeypatch: pytest.MonkeyPatch, flow: str, place: int
) -> None:
    """The first, one between, the last."""
    quantized = build(SelfAttention, flow)
    (index,) = {op.outputs[0] for op in quantized.graph.subgraphs[0].ops if op.name == "SOFTMAX"}
    given = list(samples(SelfAttention, 6, seed=2))
    with Localizer(quantized) as localizer:
        kept, runs = localizer._runner, 0
        run, read = kept.run, kept.tensor

        def counted(inputs: Any) -> Any:
            nonlocal runs
            runs += 1
            return run(inputs)

        def spoilt(asked: int) -> Any:
            value = read(asked)
            if asked == index and runs == place + 1:
                value.flat[3] += value.flat[3] + 0.5 if value.dtype == np.float32 else 9
            return value

        monkeypatch.setattr(kept, "run", counted)
        monkeypatch.setattr(kept, "tensor", spoilt)
        for sample in read_samples(given, quantized.spec, "evaluation"):
            localizer.update(sample)
        errors = localizer.result()

    assert culprit(errors).op == "SOFTMAX"
    assert culprit(errors).verdict == "lowering"
