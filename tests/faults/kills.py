"""Kill processes at random moments, and look at what they leave."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

import psutil

from pytest_edgeq.quantize.cache.directory import Store
from tests.faults.sessions import SCHEMES, Project, environment, moments
from tests.processes import left_after
from tests.waiting import line_of, output_of, running

_ENDS_WITHIN = 2.0
"""Seconds in which no process of a killed session is left."""

_MOST_SECONDS = 2.0
"""Seconds after the first write within which a session is killed; it ends in half a second."""

WRITER = """
import sys
from pathlib import Path
from pytest_edgeq.quantize.cache.directory import Store

store = Store(Path(sys.argv[1]), print)
for number in range(10**6):
    with store.lock("convert", "key"):
        parts = {"file": bytes([number % 256]) * 300_000, "n": b"%d" % number}
        store.write("convert", "key", parts)
        print(number, flush=True)
"""


def kill_updates(folder: Path, seed: int, count: int) -> None:
    """Kill sessions that rewrite baselines: each is whole, and the next session is right."""
    _kill(Project(folder), seed, count, _killed)


def kill_controllers(folder: Path, seed: int, count: int) -> None:
    """Kill sessions under `-n 2`; their workers end, too."""
    _kill(Project(folder), seed, count, _killed, "-n", "2")


def kill_workers(folder: Path, seed: int, count: int) -> None:
    """
    Kill one of two workers of a session, which ends by itself.

    One that has begun with its tests: pytest-xdist 3.8 ends in an INTERNALERROR when a worker is
    killed before.
    """
    _kill(Project(folder), seed, count, _without_a_worker, "-n", "2", "--max-worker-restart=0")


def _killed(process: subprocess.Popen[str], moment: float) -> None:
    family = psutil.Process(process.pid).children(recursive=True)
    time.sleep(moment)
    process.send_signal(signal.SIGKILL)
    output_of(process)
    left = left_after(family, _ENDS_WITHIN)
    assert not left, f"{left} are left after {_ENDS_WITHIN} s"


def _without_a_worker(process: subprocess.Popen[str], moment: float) -> None:
    workers = sorted(psutil.Process(process.pid).children(), key=lambda each: each.pid)
    time.sleep(moment)
    with contextlib.suppress(psutil.NoSuchProcess):  # the session has ended
        workers[int(moment * 1e6) % 2].kill()
    text = output_of(process)
    assert process.returncode in (0, 1), text
    assert "INTERNALERROR" not in text


def _kill(
    project: Project,
    seed: int,
    count: int,
    kill: Callable[[subprocess.Popen[str], float], None],
    *options: str,
) -> None:
    options = (*options, "--edgeq-update")
    # The shorter of two: one session once took 36 s, and its kills a quarter of an hour.
    longest = min(_seconds_of_writing(project, scheme, *options) for scheme in SCHEMES)
    scheme, met = SCHEMES[1], 0
    for number, moment in moments(seed, count, min(longest, _MOST_SECONDS)):
        scheme = SCHEMES[number % 2]
        process = project.start(scheme, *options)
        project.wait_until_it_writes(process)
        kill(process, moment)
        found = project.schemes()
        assert len(found) == project.count
        met += len(set(found.values())) == 2
        if number % 10 == 9:
            _next_run_is_right(project, scheme, *options)
    print(f"{met} of {count} kills met a session that had written a part")
    assert met >= max(1, count // 10)
    _next_run_is_right(project, scheme, *options)


def _seconds_of_writing(project: Project, scheme: str, *options: str) -> float:
    process = project.start(scheme, *options)
    project.wait_until_it_writes(process)
    began = time.perf_counter()
    text = output_of(process, 120)
    assert process.returncode == 0, text
    return time.perf_counter() - began


def _next_run_is_right(project: Project, scheme: str, *options: str) -> None:
    code, text = project.run(scheme, *options)
    assert code == 0, text
    assert set(project.schemes().values()) == {scheme}
    # What a killed write has left goes an hour later.
    left = [name for name in project.other_files() if not fnmatch(name, ".edgeq-*.tmp")]
    assert left == []
    code, text = project.run(scheme)
    assert code == 0, text


def kill_cache_writers(folder: Path, seed: int, count: int) -> None:
    """Kill processes that write one entry of the cache: it is whole, and not locked."""
    met, count = 0, 4 * count  # a kill takes a tenth of that of a session
    for number, moment in moments(seed, count, 0.05):
        with running(
            [sys.executable, "-c", WRITER, str(folder)],
            env=environment(),
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            line_of(process)
            time.sleep(moment)
            process.kill()
        told: list[str] = []
        store = Store(folder, told.append)
        with store.lock("convert", "key"):
            parts = store.read("convert", "key")
        assert parts is not None
        assert parts["file"] == bytes([int(parts["n"]) % 256]) * 300_000, f"moment {number}"
        assert told == []
        met += len(list((folder / "convert").iterdir())) > 1
    print(f"{met} of {count} kills met a write")


ALL: dict[str, Callable[[Path, int, int], None]] = {
    "updates": kill_updates,
    "controllers": kill_controllers,
    "workers": kill_workers,
    "cache": kill_cache_writers,
}
