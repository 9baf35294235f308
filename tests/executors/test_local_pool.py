"""The embedded pool: no task is lost, whatever ends its processes."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path

import psutil
import pytest

from pytest_edgeq.compare.executors.local_pool import LocalPool, WorkerDiedError
from pytest_edgeq.runtimes.workers.link import WorkerTracebackError
from tests.processes import left_after
from tests.waiting import SECONDS, line_of, rounds, running, wait_until

ROOT = Path(__file__).parents[2]


@pytest.fixture
def pool() -> Iterator[LocalPool]:
    """Two processes."""
    made = LocalPool(2)
    yield made
    made.shutdown()


def answered(number: int, sent: bytes, size: int) -> tuple[int, int, bytes]:
    """Return something of a size."""
    return number, len(sent), bytes(size)


def process_of(pool: LocalPool, number: int) -> psutil.Process:
    """Return one of the processes of a pool."""
    pid = pool._workers[number].pid
    assert pid is not None, "it has run a task"
    return psutil.Process(pid)


def hang() -> None:
    """Wait for ever."""
    signal.pause()


def no_process(*arguments: object, **options: object) -> None:
    """Fail as where the machine has no process to give."""
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


class OddError(Exception):
    """Cannot be made from what pickle keeps of it."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


def fails(kind: str) -> object:
    """Raise an error, or return what cannot be pickled."""
    if kind == "plain":
        raise KeyError("missing")
    if kind == "odd":
        raise OddError("this", "that")
    return threading.Lock()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_no_task_is_lost_with_processes_that_are_killed(pool: LocalPool) -> None:
    """
    At random moments, many of them in the middle of a message of more than a pipe holds.

    A pool whose processes share queues and locks waits for ever behind some of them.
    """
    seed = random.randrange(1000)
    print(f"seed {seed}")  # shown where it fails
    chance, kills, died = random.Random(seed), list[int](), list[int]()
    pool.submit(os.getpid).result(60)
    # Each round starts a process, which takes seconds on a busy machine.
    for number in rounds(300):
        if len(died) >= 4:
            break
        sent = [pool.submit(answered, each, bytes(200_000), 400_000) for each in range(8)]
        # While tasks run that come later: a moment of this work, however busy the machine is.
        wait([sent[chance.randrange(6)]], SECONDS)
        time.sleep(chance.uniform(0, 0.002))
        pid = pool._workers[chance.randrange(2)].pid
        if pid is not None:  # else one is being started
            kills.append(pid)
            with contextlib.suppress(ProcessLookupError):  # as it was killed before
                os.kill(pid, signal.SIGKILL)
        for each, future in enumerate(sent):
            try:
                assert future.result(60) == (each, 200_000, bytes(400_000))
            except WorkerDiedError as error:
                assert error.exitcode == -signal.SIGKILL  # noqa: PT017 # it need not be raised
                assert error.pid in kills  # noqa: PT017 # as above
                assert error.pid not in died, f"round {number}: two tasks of one process"  # noqa: PT017
                died.append(error.pid)


def test_a_process_that_cannot_be_started_fails_its_task_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For want of memory, for instance: the next task starts one, and the pool still ends."""
    pool = LocalPool(1)

    def without_processes() -> list[type[object]]:
        process = process_of(pool, 0)
        process.kill()
        assert not left_after([process])
        return [type(pool.submit(os.getpid).exception(60)) for _ in range(3)]

    for _ in range(2):
        assert pool.submit(len, "four").result(60) == 4
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", no_process)
            assert without_processes() == [BlockingIOError] * 3
    pool.shutdown()


def test_a_process_that_hangs_ends_with_the_pool(pool: LocalPool) -> None:
    """Its task fails, and one that waits is not run."""
    hanging = [pool.submit(hang) for _ in range(2)]
    waiting = pool.submit(os.getpid)
    wait_until(lambda: all(each.running() for each in hanging), None)
    started = [process_of(pool, number) for number in range(2)]

    pool.shutdown()

    for future in hanging:
        assert isinstance(future.exception(20), WorkerDiedError)
    assert waiting.cancelled()
    assert not any(each.is_running() for each in started)
    with pytest.raises(RuntimeError, match="the pool is shut down"):
        pool.submit(os.getpid)


def test_what_a_task_raises(pool: LocalPool) -> None:
    """It comes with the traceback of the process; what cannot be pickled becomes words."""
    with pytest.raises(KeyError, match="missing") as error:
        pool.submit(fails, "plain").result(60)
    assert isinstance(error.value.__cause__, WorkerTracebackError)
    assert 'raise KeyError("missing")' in str(error.value.__cause__)
    with pytest.raises(RuntimeError, match=r"^OddError: this and that$"):
        pool.submit(fails, "odd").result(60)
    with pytest.raises(TypeError, match="cannot pickle"):
        pool.submit(fails, "result").result(60)
    with pytest.raises(TypeError, match="cannot pickle"):
        pool.submit(len, threading.Lock()).result(60)
    assert pool.submit(len, "four").result(60) == 4


CLIENT = """
import time
from pytest_edgeq.compare.executors.local_pool import LocalPool
if __name__ == '__main__':
    pool = LocalPool(2)
    pool.submit(time.sleep, 0).result(), pool.submit(time.sleep, 600)
    print('ready', flush=True)
"""
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def test_processes_end_with_a_client_that_is_killed(tmp_path: Path) -> None:
    """No orphan is left; a client that ends by itself waits for none."""
    script = tmp_path / "client.py"
    script.write_text(CLIENT)
    subprocess.run([sys.executable, script], env=ENVIRONMENT, check=True, timeout=60)
    script.write_text(f"{CLIENT}    time.sleep(60)\n")
    command = [sys.executable, str(script)]
    with running(command, stdout=subprocess.PIPE, env=ENVIRONMENT) as client:
        assert line_of(client) == b"ready\n"
        children = psutil.Process(client.pid).children(recursive=True)
        assert children
        client.kill()
    assert not left_after(children)


def print_and_abort() -> None:
    """End the process after a line on stderr."""
    os.write(2, b"the end\n")
    os.abort()


def test_a_death_is_reported_where_stderr_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind `2>&1 | head`; the next task has a process."""
    with LocalPool(1) as pool, Path(os.devnull).open("w") as closed:
        closed.close()
        monkeypatch.setattr(sys, "stderr", closed)
        died = pool.submit(print_and_abort)
        assert isinstance(died.exception(SECONDS), WorkerDiedError)
        assert pool.submit(abs, -1).result(SECONDS) == 1


def leave_a_fork() -> str:
    """Fork, and let the child leave the function by an exception."""
    child = os.fork()
    if child == 0:
        sys.exit(0)
    _, status = os.waitpid(child, 0)
    return f"the fork ended by {os.waitstatus_to_exitcode(status)}"


def test_a_fork_that_leaves_the_task_is_no_second_process(pool: LocalPool) -> None:
    """The pipes are its parent's."""
    assert pool.submit(leave_a_fork).result(SECONDS) == "the fork ended by 1"


def test_files_of_the_working_directory_and_what_python_prints_as_it_starts(tmp_path: Path) -> None:
    """Files with names of the library are not imported, and lines on stdout are no frames."""
    for name in ("json", "platform", "calendar"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('of the project')\n")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("print('EDGE', 'started')\n")
    script = tmp_path / "site" / "script.py"
    script.write_text(
        "from pytest_edgeq.compare.executors.local_pool import LocalPool\n"
        "with LocalPool(1) as pool:\n"
        "    print(pool.submit(abs, -1).result(100))\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(script.parent), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.stdout.splitlines() == ["EDGE started", "1"], done.stderr
