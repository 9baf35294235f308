"""Models and samples that are measured elsewhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from fixtures.models import ResidualNet, samples
from pytest_edgeq import Comparison, QuantizedModel
from pytest_edgeq.compare.executors import pickled, worker
from tests.quantize import making

Threads = Callable[[int], Executor]


@pytest.fixture(scope="session")
def quantized() -> QuantizedModel:
    """A network with a quantized torch graph between torch and the file."""
    return making.quantize("pt2e_static_int8")


@pytest.fixture(scope="session")
def recipe() -> QuantizedModel:
    """The same one with a float file between torch and the file."""
    return making.quantize("recipe_static_wi8_ai8")


@pytest.fixture(scope="session")
def given() -> list[Any]:
    """Samples, two of which are alike, one with a calibration sample among them."""
    made = list(samples(ResidualNet, 21, seed=2))
    return [*made, made[3], next(iter(samples(ResidualNet, 1)))]


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """Close what chunks have opened in this process."""
    yield
    worker._JOBS.close()
    worker._MODELS.close()


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Threads]:
    """Make executors of threads."""
    # Of a class that it reads by value in the process that wrote it, cloudpickle replaces the
    # methods by copies without a source file, and later failures have no `source:` line.
    monkeypatch.setattr(pickled, "_is_users", lambda module: False)
    made: list[Executor] = []

    def make(count: int) -> Executor:
        made.append(ThreadPoolExecutor(count))
        return made[-1]

    yield make
    for each in made:
        each.shutdown()


class AtOnce(Executor):
    """Runs each task where it is submitted, with what a function makes of its arguments."""

    def __init__(self, workers: int, change: Callable[..., Any] = lambda *args: args) -> None:
        self.num_workers, self._change = workers, change
        self.count = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a task now."""
        future: Future[Any] = Future()
        self.count += 1
        try:
            future.set_result(fn(*self._change(*args), **kwargs))
        except Exception as error:  # as executors do
            future.set_exception(error)
        return future


def figures(comparison: Comparison) -> list[Any]:
    """Return every figure of a comparison, floats as they are."""
    outputs = {
        name: [dataclasses.asdict(each) for each in stage.outputs.values()]
        for name, stage in comparison.stages.items()
    }
    kept = [
        (each.index, each.sqnr_db, [_bits(tensor) for tensor in each.inputs.tensors])
        for each in comparison.worst_samples
    ]
    points = {
        output: {side: values.tolist() for side, values in sides.items()}
        for output, sides in comparison.points.items()
    }
    return [
        comparison.to_dict(),
        outputs,
        comparison.fingerprint,
        comparison.evaluated,
        [finding.to_dict() for finding in comparison.health],
        kept,
        points,
    ]


class Near:
    """Equal to figures that differ by no more than 1e-12, relative."""

    def __init__(self, expected: Any) -> None:
        self.expected = expected

    def __eq__(self, other: object) -> bool:
        """Compare, through containers."""
        return _near(other, self.expected)

    def __repr__(self) -> str:
        """Return the figures."""
        return repr(self.expected)


def _near(one: Any, two: Any) -> bool:
    if isinstance(two, float):
        return bool(one == pytest.approx(two, rel=1e-12, abs=0, nan_ok=True))
    if isinstance(two, dict):
        return one.keys() == two.keys() and all(_near(one[key], two[key]) for key in two)
    if isinstance(two, (list, tuple)):
        return len(one) == len(two) and all(map(_near, one, two))
    return bool(one == two)


def _bits(tensor: Any) -> tuple[Any, ...]:
    array = tensor.detach().numpy() if isinstance(tensor, torch.Tensor) else tensor
    return array.dtype.str, array.shape, array.tobytes()
