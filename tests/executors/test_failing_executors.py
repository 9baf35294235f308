"""Executors that refuse, break, or have workers of another release."""

from __future__ import annotations

import dataclasses
import errno
import os
import types
from concurrent.futures import CancelledError, Future
from concurrent.futures.process import BrokenProcessPool
from typing import Any
from unittest.mock import MagicMock

import pytest

from pytest_edgeq import Edgeq, QuantizedModel
from pytest_edgeq.compare.comparer import compare
from pytest_edgeq.compare.executors import sample_executor
from pytest_edgeq.compare.executors.local_pool import WorkerDiedError
from tests.executors.conftest import AtOnce, Near, figures


def test_what_is_no_executor_is_refused(quantized: QuantizedModel, given: list[Any]) -> None:
    """Names are for sessions."""
    with pytest.raises(TypeError, match=r"Edgeq\(executor='processes:2'\)"):
        Edgeq().compare(quantized, given, executor="processes:2")  # type: ignore[arg-type] # wrong on purpose
    for wrong in ("processes", "processes:0", "dask:", "threads:2"):
        with pytest.raises(ValueError, match="expected processes:N"):
            Edgeq(executor=wrong)


def test_a_worker_of_another_release_is_refused(
    quantized: QuantizedModel, given: list[Any]
) -> None:
    """Says which it has."""

    def older(task: Any, *shared: Any) -> tuple[Any, ...]:
        return dataclasses.replace(task, version="pytest-edgeq 0.0"), *shared

    with pytest.raises(RuntimeError, match=r"expected pytest-edgeq 0.0 as on the client"):
        Edgeq().compare(quantized, given, executor=AtOnce(1, older))


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (RuntimeError("cannot schedule new futures after shutdown"), "pass one that has not been"),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), "use fewer processes"),
    ],
)
def test_an_executor_that_takes_no_task_is_reported(
    error: Exception,
    fix: str,
    quantized: QuantizedModel,
    given: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In place of the bare error that it raises: it was shut down, or cannot start a process."""
    executor = AtOnce(1)
    monkeypatch.setattr(executor, "submit", MagicMock(side_effect=error))
    with pytest.raises(RuntimeError, match=rf"executor: sample 0: .*\nfix: {fix}"):
        Edgeq().compare(quantized, given, executor=executor)


def _dying(*errors: Exception) -> AtOnce:
    """Return an executor whose first tasks end with these errors, as of workers that died."""
    left = list(errors)

    def change(*arguments: Any) -> Any:
        if left:
            raise left.pop(0)
        return arguments

    return AtOnce(1, change)


def test_a_pool_that_breaks_is_reported(
    quantized: QuantizedModel, given: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the samples and the way out."""
    executor = _dying(*[BrokenProcessPool("a child process terminated abruptly")] * 2)
    submit = executor.submit

    def refusing(*arguments: Any) -> Future[Any]:
        if executor.count == 2:
            raise BrokenProcessPool("A child process terminated abruptly")
        return submit(*arguments)

    monkeypatch.setattr(executor, "submit", refusing)
    with pytest.raises(RuntimeError, match=r"executor: sample 0: .* the pool broke") as error:
        Edgeq().compare(quantized, given, executor=executor)
    assert "--edgeq-executor=processes:N" in str(error.value)


def test_a_worker_that_lacks_a_package_is_reported(
    quantized: QuantizedModel, given: list[Any]
) -> None:
    """Not as one that died: loky says that its pool broke, with the worker's traceback."""
    broken = BrokenProcessPool("A task has failed to un-serialize.")
    said = "ModuleNotFoundError: No module named 'pytest_edgeq'"
    broken.__cause__ = Exception(f'"""\nTraceback (most recent call last):\n{said}\n"""')
    for error in (broken, ModuleNotFoundError("No module named 'pytest_edgeq'")):
        with pytest.raises(RuntimeError, match=rf"reads its task, got {said}\nfix: install there"):
            Edgeq().compare(quantized, given, executor=_dying(error))


@pytest.mark.parametrize("kind", [CancelledError, WorkerDiedError])
def test_a_chunk_whose_worker_died_is_sent_once_more(
    kind: type[Exception], quantized: QuantizedModel, given: list[Any]
) -> None:
    """As dask cancels tasks whose data died."""
    alone = Near(figures(Edgeq().compare(quantized, given)))

    def died() -> Exception:
        return CancelledError() if kind is CancelledError else WorkerDiedError(5, -9)

    some = _dying(died(), died())  # of the two chunks in flight
    assert figures(Edgeq().compare(quantized, given, executor=some)) == alone
    worker = r" \(the last one: process 5, exit code -9\)" if kind is WorkerDiedError else ""
    with pytest.raises(RuntimeError, match=f"sample 0: .* each worker that ran them died{worker}:"):
        Edgeq().compare(quantized, given, executor=_dying(*(died() for _ in range(9))))


class _Cluster:
    """A client of dask whose scheduler has no worker, or is gone."""

    def __init__(self, error: Exception | None) -> None:
        self.scheduler = types.SimpleNamespace(address="tcp://10.0.0.1:8786")
        self.error = error

    def nthreads(self) -> dict[str, int]:
        """Return no worker."""
        if self.error is not None:
            raise self.error
        return {}


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (None, r"expected workers of tcp://10.0.0.1:8786, got none for 0 s\ncause: no worker"),
        (OSError("closed"), r"expected an answer of the scheduler .*, got OSError: closed\n"),
    ],
)
def test_a_cluster_without_workers_or_scheduler_is_reported(
    error: Exception | None,
    text: str,
    quantized: QuantizedModel,
    given: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a minute, or at once."""
    monkeypatch.setattr(sample_executor, "_NOBODY_SECONDS", 0)
    executor: Any = AtOnce(1)
    executor._client = _Cluster(error)
    engine = sample_executor.DaskSampleExecutor(executor)
    with pytest.raises(RuntimeError, match=text):
        compare(quantized, given, runtime="xnnpack", engine=engine)
