"""Whole sessions: what a crash leaves standing, and that no process outlives its session."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.processes import left_after, let_sigint_through
from tests.projects import environment
from tests.waiting import output_of, wait_until

ROOT = Path(__file__).parents[3]

pytestmark = [
    # Several sessions of pytest, waited for 60 s each on a busy machine.
    pytest.mark.timeout(300),
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="sends signals of POSIX"),
]

CRASHES = """
import os

import numpy as np
import pytest

from tests.runtimes.isolate import runners

SAMPLE = np.ones((1, 4), np.float32)


def test_before(edgeq):
    assert (edgeq.load(runners.negation()).run(SAMPLE)["y"] == -1).all()


def test_kernel(edgeq):
    edgeq.load(runners.segfault_at_run()).run(np.ones((1, 4, 4, 4), np.float32))


def test_own(edgeq):
    edgeq.load(runners.negation()).run(SAMPLE, runtime="aborting")


def test_after(edgeq):
    model = edgeq.load(runners.negation())
    for runtime in ("xnnpack", "builtin", "reference"):
        assert (model.run(SAMPLE, runtime=runtime)["y"] == -1).all()
"""

HANGS = """
import numpy as np
from tests.runtimes.isolate import runners


def test_hangs(edgeq):
    edgeq.load(runners.negation()).run(np.ones((1, 4), np.float32), runtime="hanging")


def test_after(edgeq):
    edgeq.load(runners.negation()).run(np.ones((1, 4), np.float32))
"""

CONFTEST = """
import ctypes
import os
from pathlib import Path

from tests.runtimes.isolate.runners import Ending

STARTED = Path(__file__).with_name("started")


def hang(path, signature):
    def run(inputs):
        # Whole once it is there.
        written = STARTED.with_suffix(".new")
        written.write_text(str(os.getpid()))
        written.rename(STARTED)
        ctypes.PyDLL(None).pause()  # with the interpreter's lock held
    return run


def pytest_edgeq_runtimes(config):
    return {"hanging": hang, "aborting": Ending("abort")}
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder of tests that use the runtimes of `CONFTEST`."""
    (tmp_path / "conftest.py").write_text(CONFTEST, "utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\n", "utf-8")
    return tmp_path


def _start(project: Path, tests: str, *options: str) -> subprocess.Popen[str]:
    (project / "test_it.py").write_text(tests, "utf-8")
    # Other people's plugins take a quarter of the time of a session.
    variables = {"LITERT_TORCH_SHOW_PROGRESS": "n", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    let_sigint_through()
    plugins = ["-pedgeq", "-pxdist", "-pno:unraisableexception"]
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", *plugins, f"-opythonpath={ROOT}", *options],
        cwd=project,
        env=environment() | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.fixture
def hanging(project: Path, request: pytest.FixtureRequest) -> Iterator[Hanging]:
    """A session whose child process hangs in native code."""
    options = request.param if hasattr(request, "param") else ()
    session = _start(project, HANGS, *options)
    started = project / "started"
    wait_until(started.exists, session)
    found = Hanging(session, psutil.Process(int(started.read_text())))
    yield found
    for each in (*found.processes, psutil.Process()):
        if each.pid != os.getpid() and each.is_running():
            each.kill()
    output_of(session)


class Hanging:
    """A session that waits for its child, with all processes that it has started."""

    def __init__(self, session: subprocess.Popen[str], child: psutil.Process) -> None:
        self.session, self.child = session, child
        self.processes = psutil.Process(session.pid).children(recursive=True)
        assert child in self.processes


@pytest.mark.parametrize("options", [(), ("-n2",)], ids=["alone", "n2"])
def test_a_crash_fails_its_test_and_no_other(project: Path, options: tuple[str, ...]) -> None:
    """The text names what died, and no worker of pytest-xdist is lost."""
    told = output_of(_start(project, CRASHES, *options))
    assert re.search(r"2 failed, 2 passed", told), told
    assert "the xnnpack runtime crashed in the step run: expected outputs, got SIGSEGV" in told
    assert "op: LOCAL_RESPONSE_NORMALIZATION #1" in told
    assert "the aborting runtime crashed in the step run: expected outputs, got SIGABRT" in told
    failures = told.partition("FAILURES")[2].replace(str(ROOT), "")
    assert "worker" not in failures.replace("[gw", "")


def test_without_isolation_the_session_ends(project: Path) -> None:
    """So it is the child that keeps it alive."""
    session = _start(project, CRASHES, "--edgeq-isolate=off")
    output_of(session)
    assert session.returncode == -signal.SIGSEGV


def test_a_file_that_survived_is_not_tried_in_the_next_session(project: Path) -> None:
    """The cache directory remembers it: its interpreter was built, and it ran on three runtimes."""
    entries = project / ".pytest_cache" / "d" / "edgeq" / "isolate"
    for _ in range(2):
        assert "2 passed" in output_of(_start(project, CRASHES, "-k", "after or before"))
        assert len(list(entries.iterdir())) == 4


@pytest.mark.parametrize("hanging", [(), ("-n2",)], ids=["alone", "n2"], indirect=True)
def test_a_killed_session_leaves_no_process(hanging: Hanging) -> None:
    """Also while the child hangs in native code that holds the interpreter's lock."""
    hanging.session.kill()
    assert left_after(hanging.processes) == []


@pytest.mark.parametrize("hanging", [("-n2",)], ids=["n2"], indirect=True)
def test_a_killed_worker_leaves_no_process(hanging: Hanging) -> None:
    """The session starts another worker, and tells of the one that is lost."""
    worker = hanging.child.parent()
    assert worker is not None
    assert worker.pid != hanging.session.pid
    worker.kill()
    hanging.child.wait(20)
    told = output_of(hanging.session)
    assert "crashed while running 'test_it.py::test_hangs'" in told


@pytest.mark.parametrize("send", [os.killpg, os.kill], ids=["terminal", "program"])
def test_an_interrupt_ends_the_child(hanging: Hanging, send: Callable[[int, int], None]) -> None:
    """As a terminal sends it, to every process of the group, and as a program does."""
    send(hanging.session.pid, signal.SIGINT)
    output_of(hanging.session)
    assert hanging.session.returncode == pytest.ExitCode.INTERRUPTED
    assert left_after(hanging.processes) == []


def test_a_child_that_is_killed_from_outside_is_told_as_that(hanging: Hanging) -> None:
    """With the memory that it held; the next test runs in another one."""
    hanging.child.kill()
    told = output_of(hanging.session)
    assert "the hanging runtime was ended in the step run: expected outputs, got SIGKILL" in told
    assert re.search(r"memory held: [\d.]+ MiB in RAM", told)
    assert "the OOM killer" in told
    assert "1 failed, 1 passed" in told
