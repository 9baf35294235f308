"""One lock for each key: processes and threads wait for each other, and never for themselves."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import signal
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest

from pytest_edgeq.quantize.cache.directory import Store
from tests.waiting import SECONDS

KEY, PARTS = "a" * 64, {"tflite": b"content"}


def _hold(directory: Path, pipe: Any, *, dies: bool) -> None:
    store = Store(directory, print)
    with store.lock("convert", KEY):
        pipe.send("held")
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        pipe.recv()
        store.write("convert", KEY, PARTS)


@pytest.mark.parametrize("dies", [False, True])
def test_one_process_works_and_the_other_waits(store: Store, *, dies: bool) -> None:
    """It reads what the first wrote, or works itself where the first was killed."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_hold, args=(store.directory, theirs), kwargs={"dies": dies})
    process.start()
    theirs.close()  # so that its death is the end of the pipe
    assert ours.poll(SECONDS)
    assert ours.recv() == "held"
    if not dies:
        ours.send("go on")
    with store.lock("convert", KEY):
        assert store.read("convert", KEY) == (None if dies else PARTS)
    process.join(SECONDS)
    assert process.exitcode == (-signal.SIGKILL if dies else 0)


def test_a_thread_that_holds_a_lock_goes_on_and_another_waits(
    store: Store, said: list[str]
) -> None:
    """The end of the inner block does not release what the outer one holds."""
    has_it = threading.Event()

    def take() -> None:
        with Store(store.directory, said.append).lock("convert", KEY):
            has_it.set()

    thread = threading.Thread(target=take, daemon=True)
    with store.lock("convert", KEY):
        with Store(store.directory, said.append).lock("convert", KEY):
            store.write("convert", KEY, PARTS)
        thread.start()
        assert not has_it.wait(0.2)
    assert has_it.wait(SECONDS)
    thread.join(SECONDS)
    with store.lock("convert", KEY):
        assert store.read("convert", KEY) == PARTS
    assert said == []


@pytest.mark.parametrize(("code", "action"), [(errno.ENOSYS, "error"), (errno.ENOLCK, "always")])
def test_a_file_system_without_locks_costs_a_warning(
    store: Store, said: list[str], monkeypatch: pytest.MonkeyPatch, code: int, action: Any
) -> None:
    """The warning is reported by the cache, and no soft lock file is left behind."""

    def refuse(file: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(action)
        for _ in range(2):
            with store.lock("convert", KEY):
                store.write("convert", KEY, PARTS)
    assert caught == []
    assert len(said) == 1
    assert "cannot be locked" in said[0]
    assert os.strerror(code) in said[0]
