"""Samples that are hashed come again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fixtures.models import normal
from pytest_edgeq.compare.samples import Sample
from pytest_edgeq.quantize.cache import sample_replay
from pytest_edgeq.quantize.cache.conversions import ConversionCache
from pytest_edgeq.quantize.cache.directory import Store
from pytest_edgeq.quantize.cache.sample_replay import Recording, Tagged, spooled

SIZE = 6


def _given() -> Iterator[Tagged]:
    """Samples in one buffer, as some loaders have."""
    buffer, other = torch.empty(2, 3).t(), np.empty((2, 2), np.int8)
    for number in range(SIZE):
        buffer.fill_(number)
        other.fill(-number)
        yield "main", Sample((buffer, torch.tensor(number)), {"other": other})


def _told(signature: str, sample: Sample) -> str:
    strides = [value.stride() for value in sample.args]
    return f"{signature} {sample} {strides} {sample.kwargs['other'].dtype}"


@pytest.mark.parametrize("limit", [1, 1 << 26])
def test_samples_come_again_in_order(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """From the file, or from memory."""
    monkeypatch.setattr(sample_replay, "_IN_MEMORY", limit)
    copies = [_told(*each) for each in spooled(Recording(_given()))]
    assert copies == [_told(*each) for each in _given()]


def test_arrays_of_negative_strides_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the file as arrays with the same values, such as images whose channels are reversed."""
    monkeypatch.setattr(sample_replay, "_IN_MEMORY", 1)
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    given = [array[::-1], array[:, ::-1]]
    samples = Recording(("main", Sample((each,), {})) for each in given)
    for (_, copy), each in zip(spooled(samples), given, strict=True):
        assert isinstance(copy.args[0], np.ndarray)
        np.testing.assert_array_equal(copy.args[0], each)


def _samples() -> Iterator[Sample]:
    for number in range(2):
        yield Sample((torch.full((2,), float(number)),), {})


def _calibrate(
    cache: ConversionCache, ran: list[str], samples: Callable[[], Iterator[Sample]] = _samples
) -> Any:
    def make(given: Mapping[str, Iterator[Sample]]) -> Any:
        ran.append("calibrate")
        return {"x": {"max": np.array([sum(each.args[0].sum().item() for each in given["main"])])}}

    return cache.calibrate_recipe("net", b"float", [], {"main": samples()}, make, threads=1)


def test_samples_may_come_from_a_conversion_of_the_same_model(tmp_path: Path) -> None:
    """With other samples, by a session of its own; both results are kept."""
    ran: list[str] = []

    def cache() -> ConversionCache:
        return ConversionCache(Store(tmp_path, pytest.fail), pytest.fail)

    def others() -> Iterator[Sample]:
        yield Sample((torch.tensor(_calibrate(cache(), ran)["x"]["max"]),), {})
        yield from _samples()

    made = _calibrate(cache(), ran, others)
    assert ran == ["calibrate", "calibrate"]
    assert _calibrate(cache(), ran, others) == made
    assert len(ran) == 2


def test_every_sample_counts_in_its_order(tmp_path: Path) -> None:
    """A changed, missing, further or moved sample is another run; equal ones are not run again."""
    cache, ran = ConversionCache(Store(tmp_path, pytest.fail), pytest.fail), list[str]()
    samples = [normal(1, 4, 8, 8, seed=seed) for seed in range(4)]

    def stream(given: list[torch.Tensor]) -> Iterator[Sample]:
        return (Sample((each,), {}) for each in given)

    others = (
        samples,
        [*samples[:3], normal(1, 4, 8, 8, seed=4)],
        samples[:3],
        samples[::-1],
        [*samples, samples[0]],
        [sample.contiguous(memory_format=torch.channels_last) for sample in samples],
    )
    for runs, given in enumerate((*others, samples), 1):
        for _ in range(2):
            _calibrate(cache, ran, functools.partial(stream, given))
            assert len(ran) == min(runs, len(others))
