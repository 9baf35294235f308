"""One lock for each key: processes wait for each other."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from pytest_edgeq.cache.directory import Store

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
    assert ours.recv() == "held"
    if not dies:
        ours.send("go on")
    with store.lock("convert", KEY):
        assert store.read("convert", KEY) == (None if dies else PARTS)
    process.join()
    assert process.exitcode == (-signal.SIGKILL if dies else 0)
