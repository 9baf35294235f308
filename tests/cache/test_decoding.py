"""Entries that are whole and hold other parts than their step's: made anew, and replaced."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pytest_edgeq import litert
from pytest_edgeq.compare.samples import Sample
from pytest_edgeq.quantize.cache.conversions import ConversionCache
from pytest_edgeq.quantize.cache.directory import Store
from pytest_edgeq.quantize.cache.parts import Simulation

Step = Callable[[ConversionCache, list[str]], Any]
"""Takes the cache and a list of what ran; returns a result that can be compared."""


class Net(torch.nn.Module):
    """A model of one op."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Do it."""
        return torch.relu(x)


@functools.cache
def _program() -> torch.export.ExportedProgram:
    with litert.quiet():
        return torch.export.export(Net(), (torch.zeros(2),))


def _samples() -> Iterator[Sample]:
    for number in range(2):
        yield Sample((torch.full((2,), float(number)),), {})


def _quantize(cache: ConversionCache, ran: list[str]) -> Any:
    def make() -> bytes:
        ran.append("quantize")
        return b"\0\0\0\0TFL3 and more"

    return cache.quantize_recipe("net", b"float", [], None, make)


def _calibrate(
    cache: ConversionCache, ran: list[str], samples: Callable[[], Iterator[Sample]] = _samples
) -> Any:
    def make(given: Mapping[str, Iterator[Sample]]) -> Any:
        ran.append("calibrate")
        return {"x": {"max": np.array([sum(each.args[0].sum().item() for each in given["main"])])}}

    return cache.calibrate_recipe("net", b"float", [], {"main": samples()}, make, threads=1)


def _simulate(cache: ConversionCache, ran: list[str]) -> Any:
    def make(samples: Iterator[Sample]) -> tuple[Simulation, bool]:
        ran.append("simulate")
        list(samples)
        graph: Any = _program().module()
        litert.drop_guards(graph)  # as of every quantized graph
        return Simulation(lambda: graph, True, False, frozenset()), True

    made = cache.simulate("key", "net", _samples(), make, lambda: "key")
    return made.static, made.annotated, made.digest, str(made.graph().graph)


def _export(cache: ConversionCache, ran: list[str]) -> Any:
    def make() -> str:
        ran.append("export")
        return "ab" * 32

    return cache.prepared_key("net", make, "key")


JUNK = {"junk": b"x"}
PLACE = {"start": -4096, "shape": [4], "stride": [1]}
BEFORE = {
    "names": [["x", ["max"]]],
    "tensors": [{"name": "0 0", "dtype": "float32", "requires_grad": False, **PLACE}],
}
"""A range that lies before the stored memory."""
DEEP = b"[" * 50_000


@pytest.mark.parametrize(
    ("step", "kind", "parts"),
    [
        (_quantize, "quantize", JUNK),
        (_quantize, "quantize", {"tflite": b"something else"}),
        (_calibrate, "ranges", JUNK),
        (_calibrate, "ranges", {"ranges": json.dumps(BEFORE).encode(), "tensors": bytes(64)}),
        (_calibrate, "ranges", {"ranges": DEEP, "tensors": b""}),
        (_simulate, "calibrate", JUNK),
        (_simulate, "calibrate", {"graph": b"{}", "tensors": b"", "facts": b"{}"}),
        (_simulate, "calibrate", {"tensors": b"others"}),
        (_export, "export", {"key": b"../../else"}),
    ],
)
def test_other_parts_are_damage(
    tmp_path: Path, step: Step, kind: str, parts: Mapping[str, bytes]
) -> None:
    """The step runs again and gives the same; the entry is as it was before."""
    said: list[str] = []
    ran: list[str] = []
    store = Store(tmp_path, said.append)

    def run() -> Any:
        return step(ConversionCache(store, pytest.fail), ran)

    made = run()
    (key,) = store.keys(kind, "")
    whole = store.read(kind, key)
    assert whole is not None
    assert run() == made
    assert len(ran) == 1
    store.write(kind, key, {**whole, **parts} if kind == "calibrate" and parts != JUNK else parts)
    assert run() == made
    assert len(ran) == 2
    assert len(said) == 1
    assert f"{kind}/{key}.entry is damaged (" in said[0]
    assert said[0].endswith("); the step runs again and replaces it")
    assert store.read(kind, key) == whole
    assert run() == made
    assert len(ran) == 2


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
