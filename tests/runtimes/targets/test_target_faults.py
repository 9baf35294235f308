"""Targets that do not start, die, hang, or print what they must not; and what the test is told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fixtures.tflite import make, stacks
from fixtures.tflite.stateful import counter
from pytest_edgeq import Edgeq, QuantizedModel
from pytest_edgeq.errors import CrashedError, UnrunnableError
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.runtimes.registry import Runtimes
from pytest_edgeq.runtimes.workers.target import Target
from tests.processes import left_after, let_sigint_through, target_workers
from tests.runtimes.isolate.runners import segfault_at_run
from tests.runtimes.targets.conftest import drawn
from tests.waiting import SECONDS, line_of, running

pytestmark = pytest.mark.usefixtures("_no_process_is_left")

GOLDEN = Path(__file__).parent / "golden"
NESTED = make.CONVERTED / "nested.int8.tflite"

THEN_PYTHON = f'exec {sys.executable} "$@"'
"""Of a shell's command: what stands behind it becomes the arguments of a Python."""


def _shell(script: str) -> list[str]:
    return ["sh", "-c", script, "sh"]


def _golden(name: str, text: str) -> None:
    """Compare a text with the golden one, in which paths of this machine are words."""
    text = text.replace(sys.executable, "PYTHON")
    assert text + "\n" == (GOLDEN / f"{name}.txt").read_text()


def _start(command: list[str], seconds: float = 60) -> str:
    with pytest.raises(UnrunnableError) as error:
        Target("pi", command, seconds).start()
    return str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("no_program", ["no-such-program", "python3"]),
        ("ends", _shell("echo 'ssh: connect to host pi port 22: No route' >&2; exit 255")),
        ("garbage", _shell(f"echo Welcome to the board, friend; {THEN_PYTHON}")),
        ("silent", _shell("exec sleep 60")),
    ],
)
def test_a_command_that_does_not_start_a_python(name: str, command: list[str]) -> None:
    """The first line says what came, then what it printed last, the cause and the fix."""
    _golden(name, _start(command, seconds=1 if name == "silent" else 60))


def test_a_python_without_the_packages() -> None:
    """The one that cannot be imported is named."""
    told = _start([sys.executable, "-S", "-I"])
    assert told.splitlines()[0] == (
        "the pi runtime cannot run files: expected a Python with numpy and ai_edge_litert, got "
        f"Python {sys.version.split()[0]} that lacks a package "
        "(ModuleNotFoundError: No module named 'numpy')"
    )
    assert "pip install ai-edge-litert numpy" in told.splitlines()[-1]


@pytest.mark.parametrize(
    ("frame", "told"),
    [
        ("EDGQ" + "\\0" * 7 + "\\2" + "x" * 32 + "{}", "a frame whose hash is another"),
        ("EDGQ" + "\\177" * 8 + "x" * 32, f"a frame of {0x7F7F7F7F7F7F7F7F} bytes"),
    ],
    ids=["another hash", "too long"],
)
def test_garbage_that_begins_like_a_frame(frame: str, told: str) -> None:
    """A damaged frame is no answer, and no memory is taken for one of any length."""
    assert told in _start(_shell(f"printf '{frame}'; sleep 5"))


def test_a_command_that_did_not_start_is_not_tried_again(tmp_path: Path) -> None:
    """Each test would wait for it."""
    script = _shell(f"echo once >> {tmp_path}/starts; exit 3")
    target = Target("pi", script, 60)
    told = set()
    for _ in range(2):
        with pytest.raises(UnrunnableError) as error:
            target.start()
        told.add(str(error.value))
    assert len(told) == 1
    assert (tmp_path / "starts").read_text() == "once\n"


def test_a_command_that_prints_much_to_stderr() -> None:
    """More than a pipe holds, before and while it answers."""
    much = _shell(f"yes out of the way | head -c 3000000 >&2; {THEN_PYTHON}")
    edgeq = Edgeq(targets={"pi": much})
    quantized = edgeq.load(NESTED)
    quantized.run(*stacks.MODELS["nested"][1], runtime="pi")
    edgeq.close()


def _kill_worker(number: int = signal.SIGKILL) -> None:
    [each] = target_workers()
    each.send_signal(number)
    each.wait(SECONDS)


def _suspend_worker() -> None:
    [each] = target_workers()
    each.suspend()


def _at_sample(index: int, act: Callable[[], object], count: int = 6) -> Iterator[Any]:
    """Yield samples; do something before the one with this index."""
    for number, sample in enumerate(drawn("nested", count)):
        if number == index:
            act()
        yield sample


@pytest.fixture
def session() -> Iterator[Edgeq]:
    """One with a local target."""
    edgeq = Edgeq(targets={"pi": [sys.executable]}, threads=1, target_timeout=60)
    yield edgeq
    edgeq.close()


@pytest.fixture
def quantized(session: Edgeq) -> QuantizedModel:
    """A file and its reference."""
    return session.load(NESTED, reference=stacks.build("nested"))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_worker_that_is_killed_is_started_once_more(
    session: Edgeq, quantized: QuantizedModel, number: int
) -> None:
    """Between two samples: figures are those of a run without it."""
    expected = session.compare(quantized, _at_sample(-1, lambda: None))
    found = session.compare(quantized, _at_sample(3, lambda: _kill_worker(number)), runtime="pi")
    assert found.total == expected.total


@pytest.mark.slow
def test_a_worker_that_is_killed_in_the_middle_of_a_batch(
    session: Edgeq, quantized: QuantizedModel
) -> None:
    """At whatever moment, by another process: it is started once more."""
    expected = session.compare(quantized, drawn("nested", 40))
    for seed in range(3):
        moment = float(np.random.default_rng(seed).uniform(0.02, 0.3))
        print(f"seed {seed}: killed after {moment:.3f} s")  # shown where it fails
        session.compare(quantized, drawn("nested", 2), runtime="pi")
        [each] = target_workers()
        killer = threading.Timer(moment, each.kill)
        killer.start()
        found = session.compare(quantized, drawn("nested", 40), runtime="pi")
        killer.join(SECONDS)
        assert found.total == expected.total


def test_kernels_that_crash_the_worker() -> None:
    """The second death fails the test, with the signal, the op and what was printed."""
    command = _shell(f"echo 'board: booting' >&2; {THEN_PYTHON}")
    edgeq = Edgeq(targets={"pi": command}, threads=1)
    with pytest.raises(CrashedError) as error:
        edgeq.load(segfault_at_run()).run(np.ones((1, 4, 4, 4), np.float32), runtime="pi")
    edgeq.close()
    _golden("crash", str(error.value))


@pytest.mark.slow
def test_a_crash_is_told_of_its_own_file() -> None:
    """And not of those that wait for the same process: they are run in another one."""
    runtimes = Runtimes(targets={"pi": Target("pi", [sys.executable], 60)})

    def run(source: Path | bytes) -> None:
        edge = EdgeFile(source, runtimes=runtimes)
        shapes = {b.name: np.zeros(b.tensor.shape, b.tensor.dtype) for b in edge.signature.inputs}
        edge.runner("pi").run(shapes)

    with ThreadPoolExecutor(4) as pool:
        crashes = [pool.submit(run, segfault_at_run()) for _ in range(3)]
        while not all(each.done() for each in crashes):
            run(NESTED)
    for each in crashes:
        with pytest.raises(CrashedError, match="\nop: LOCAL_RESPONSE_NORMALIZATION #1\n"):
            each.result()
    runtimes.close()


def test_a_file_that_lost_its_state_is_not_run_on() -> None:
    """What earlier samples left is gone with the process."""
    target = Target("pi", [sys.executable], 60)
    edge = EdgeFile(counter(), runtimes=Runtimes(targets={"pi": target}))
    one = {"x": np.ones((1, 4), np.float32)}
    edge.runner("pi").run(one)
    _kill_worker()
    for _ in range(2):
        with pytest.raises(CrashedError, match=r"lost the \.tflite file"):
            edge.runner("pi").run(one)
    edge.restart()
    assert edge.runner("pi").run(one)[0].tolist() == [[1] * 4]
    target.close()


def test_tensors_of_a_run_that_was_lost_are_not_made_up() -> None:
    """A file that is opened anew has tensors of zeros."""
    target = Target("pi", [sys.executable], 60)
    edge = EdgeFile(NESTED, runtimes=Runtimes(targets={"pi": target}))
    runner = edge.runner("pi:builtin", keep=True)
    [border] = edge.signature.inputs
    runner.run({border.name: np.zeros(border.tensor.shape, border.tensor.dtype)})
    _kill_worker()
    with pytest.raises(CrashedError, match=r"lost the \.tflite file"):
        runner.tensor(edge.graph.ops[0].outputs[0])
    target.close()


@pytest.mark.slow
def test_a_worker_that_hangs() -> None:
    """It is ended, and the way out is a longer limit."""
    edgeq = Edgeq(targets={"pi": [sys.executable]}, threads=1, target_timeout=2)
    quantized = edgeq.load(NESTED, reference=stacks.build("nested"))
    with pytest.raises(CrashedError) as error:
        edgeq.compare(quantized, _at_sample(2, _suspend_worker), runtime="pi")
    assert str(error.value).splitlines()[0] == (
        "the pi runtime did not answer: expected an answer in time, got nothing for 2 s"
    )
    assert "--edgeq-target-timeout=4" in str(error.value)
    edgeq.close()


CLIENT = """
import sys, time
from pytest_edgeq.runtimes.workers.target import Target
target = Target("pi", [sys.executable], 60)
target.start()
print("ready", flush=True)
if sys.argv[1] == "ends":
    sys.exit()
time.sleep(60)
"""


@pytest.mark.parametrize(
    "end",
    ["ends", "SIGKILL", *(pytest.param(e, marks=pytest.mark.slow) for e in ("SIGINT", "SIGTERM"))],
)
def test_no_process_is_left_after_any_end(tmp_path: Path, end: str) -> None:
    """Of the process that has started the target."""
    script = tmp_path / "client.py"
    script.write_text(CLIENT)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    let_sigint_through()
    with running(
        [sys.executable, str(script), end],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    ) as client:
        assert line_of(client) == b"ready\n"
        started = target_workers(client.pid)
        if end != "ends":
            client.send_signal(getattr(signal, end))
        client.wait(SECONDS)
    assert not left_after(started)


@pytest.mark.slow
def test_a_thread_that_waits_starts_no_target_anew(
    session: Edgeq, quantized: QuantizedModel
) -> None:
    """A session that ends while a file runs leaves no process."""
    sample = stacks.MODELS["nested"][1]
    quantized.run(*sample, runtime="pi")
    _suspend_worker()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(quantized.run, *sample, runtime="pi")
        time.sleep(0.5)  # until it waits
        session.close()
        with pytest.raises(UnrunnableError, match="the pi runtime was closed"):
            waiting.result(SECONDS)
    assert not target_workers()
