"""Wait for other threads and processes: for so many seconds, and no longer than they live."""

from __future__ import annotations

import contextlib
import itertools
import select
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil

SECONDS = 60.0
"""Of one wait, unless it says otherwise: below what pytest-timeout leaves a test."""


def rounds(seconds: float = SECONDS) -> Iterator[int]:
    """
    Yield the numbers of the rounds of a loop, which leaves it when it is done.

    Raises:
        AssertionError: It was not left in time.
    """
    end = time.monotonic() + seconds
    for number in itertools.count():
        if time.monotonic() > end:
            raise AssertionError(f"not done within {seconds:g} s and {number} rounds")
        yield number


def wait_until(
    is_so: Callable[[], object],
    partner: subprocess.Popen[Any] | threading.Thread | None,
    seconds: float = SECONDS,
) -> None:
    """
    Wait for something that a process or a thread does; None where there is no single one.

    Raises:
        AssertionError: The partner has ended, or the time is over.
    """
    for _ in rounds(seconds):
        has_ended = _has_ended(partner)
        if is_so():  # looked at last: it may be the last thing that the partner did
            return
        if has_ended:
            printed = output_of(partner) if isinstance(partner, subprocess.Popen) else ""
            raise AssertionError(f"{partner} ended before: {printed}")
        time.sleep(0.01)


def _has_ended(partner: subprocess.Popen[Any] | threading.Thread | None) -> bool:
    if isinstance(partner, threading.Thread):
        return not partner.is_alive()
    return partner is not None and partner.poll() is not None


def output_of(process: subprocess.Popen[Any], seconds: float = SECONDS) -> Any:
    """
    Return what a process prints to stdout until it ends.

    Raises:
        AssertionError: It has not ended in time; it and its children are killed.
    """
    try:
        return process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired as error:
        _kill(process)
        raise AssertionError(f"{process} runs after {seconds:g} s: {error.output!r}") from None


def line_of(process: subprocess.Popen[Any], seconds: float = SECONDS) -> Any:
    """
    Return the first line that a process prints, empty where it ends without one.

    Raises:
        AssertionError: It prints none in time.
    """
    assert process.stdout is not None
    assert readable(process.stdout, seconds), f"{process} prints nothing for {seconds:g} s"
    return process.stdout.readline()


def readable(file: Any, seconds: float = SECONDS) -> bool:
    """Whether there is something to read within so many seconds, the end of the file included."""
    return bool(select.select([file], [], [], seconds)[0])


@contextlib.contextmanager
def running(command: list[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Start a process, which is killed with its children in the end if it still runs."""
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            _kill(process)


def _kill(process: subprocess.Popen[Any]) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
        for each in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
    process.kill()
