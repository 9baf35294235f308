"""Executors that refuse, break, are slow, or have workers of another release."""

from __future__ import annotations

import dataclasses
import errno
import multiprocessing.context
import os
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import pytest

from pytest_edgeq import Edgeq, QuantizedModel
from pytest_edgeq.executors import stream, worker
from pytest_edgeq.executors.carriers import Engine
from pytest_edgeq.executors.processes import SpawnedPool
from tests.executors.conftest import AtOnce, told
from tests.waiting import SECONDS

Threads = Callable[[int], Executor]


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

    class Old(AtOnce):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            return super().submit(fn, dataclasses.replace(args[0], version="pytest-edgeq 0.0"))

    with pytest.raises(RuntimeError, match=r"expected pytest-edgeq 0.0 as on the client"):
        Edgeq().compare(quantized, given, executor=Old(1))


def test_an_executor_that_is_shut_down_is_told(
    quantized: QuantizedModel, given: list[Any], threads: Threads
) -> None:
    """In place of the bare error that it raises."""
    executor = threads(1)
    executor.shutdown()
    with pytest.raises(RuntimeError, match=r"executor: sample 0: .*\nfix: pass one that has not"):
        Edgeq().compare(quantized, given, executor=executor)


def test_processes_that_cannot_be_started_are_told(
    quantized: QuantizedModel, given: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool itself may be sound."""

    def refuse(process: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(multiprocessing.context.SpawnProcess, "start", refuse)
    pool = SpawnedPool(2)
    with pytest.raises(RuntimeError, match=r"got OSError: .*memory\nfix: use fewer processes"):
        Edgeq().compare(quantized, given, executor=pool)
    monkeypatch.undo()
    assert pool.submit(len, "four").result(60) == 4
    pool.shutdown()


class _Dying(AtOnce):
    """Raises what an engine raises whose worker died, the first few times that it is asked."""

    def __init__(self, errors: list[BaseException]) -> None:
        super().__init__(1)
        self.errors = errors

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Fail, or run a task now."""
        if not self.errors:
            return super().submit(fn, *args, **kwargs)
        future: Future[Any] = Future()
        future.set_exception(self.errors.pop(0))
        return future


def test_a_pool_that_breaks_is_told(quantized: QuantizedModel, given: list[Any]) -> None:
    """One of the standard library does not go on: the error names the samples and the way out."""
    executor = _Dying([BrokenProcessPool("a child process terminated abruptly")])
    with pytest.raises(RuntimeError, match=r"executor: sample 0: .* the pool broke") as error:
        Edgeq().compare(quantized, given, executor=executor)
    assert "--edgeq-executor=processes:N" in str(error.value)


def test_a_worker_that_lacks_a_package_is_told(quantized: QuantizedModel, given: list[Any]) -> None:
    """Not as one that died: loky says that its pool broke, with the worker's traceback."""
    broken = BrokenProcessPool("A task has failed to un-serialize.")
    said = "ModuleNotFoundError: No module named 'pytest_edgeq'"
    broken.__cause__ = Exception(f'"""\nTraceback (most recent call last):\n{said}\n"""')
    for error in (broken, ModuleNotFoundError("No module named 'pytest_edgeq'")):
        with pytest.raises(RuntimeError, match=rf"reads its task, got {said}\nfix: install there"):
            Edgeq().compare(quantized, given, executor=_Dying([error]))


def test_what_was_lost_with_other_workers_is_sent_again(
    quantized: QuantizedModel, given: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As dask cancels tasks whose data died; it is no fault of the chunk, but not for ever."""
    monkeypatch.setattr(Engine, "renew", lambda engine: True)  # as dask's
    alone = told(Edgeq().compare(quantized, given))
    some = _Dying([CancelledError() for _ in range(5)])
    assert told(Edgeq().compare(quantized, given, executor=some)) == alone
    with pytest.raises(RuntimeError, match="each worker that ran them died"):
        Edgeq().compare(quantized, given, executor=_Dying([CancelledError() for _ in range(99)]))
    worker.forget()


@pytest.mark.parametrize("answered", [0, 3])
def test_where_all_that_was_sent_is_lost_it_is_sent_again(
    quantized: QuantizedModel, given: list[Any], monkeypatch: pytest.MonkeyPatch, answered: int
) -> None:
    """As with workers that hang, and hold everything that may be under way; also from the start."""
    monkeypatch.setattr(stream, "_LATE_SECONDS", 0.05)
    monkeypatch.setattr(stream, "_FIRST_SECONDS", 0.2)
    lost = list[int]()

    class Losing(AtOnce):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            if self.count >= answered and len(lost) < 4:  # two chunks for each worker
                lost.append(args[0].start)
                return Future()
            return super().submit(fn, *args, **kwargs)

    alone = told(Edgeq().compare(quantized, given))
    assert told(Edgeq().compare(quantized, given, executor=Losing(2))) == alone
    assert len(lost) == 4
    worker.forget()


def test_a_slow_worker_does_not_hold_the_others_up(
    quantized: QuantizedModel, given: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    What it has not answered in time is run by another one, and its own answer counts no more.

    The engine may give the slow one the second run, too.
    """
    monkeypatch.setattr(stream, "_LATE_SECONDS", 0.05)
    alone = told(Edgeq().compare(quantized, given))
    stuck, over = list[int](), threading.Event()

    class Slow(ThreadPoolExecutor):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            is_stuck = args[0].start == 1 and len(stuck) < 2
            if is_stuck:
                stuck.append(args[0].start)

            def run() -> Any:
                if is_stuck:
                    assert over.wait(SECONDS), "its answer was waited for"
                return fn(*args, **kwargs)

            return super().submit(run)

    with Slow(4) as executor:
        assert told(Edgeq().compare(quantized, given, executor=executor)) == alone
        assert not over.is_set()
        over.set()
    assert stuck == [1, 1]
    worker.forget()
