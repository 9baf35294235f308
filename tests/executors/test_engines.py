"""Real engines: spawned processes, loky, dask's own command lines; and workers that die."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from fixtures.models import ResidualNet, samples, seeded
from pytest_edgeq import Edgeq, QuantizedModel
from pytest_edgeq.compare.executors.local_pool import LocalPool
from pytest_edgeq.runtimes.workers.link import LOCAL_NAME
from pytest_edgeq.runtimes.workers.local_worker import close_workers
from tests.executors.conftest import Near, figures
from tests.processes import left_after
from tests.projects import ROOT, Project
from tests.shared_cache import VARIABLE
from tests.waiting import SECONDS, running

# A scheduler and workers are started, each of which imports torch.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def _dask() -> str:
    """Return the command line of dask beside this Python."""
    found = shutil.which("dask", path=sysconfig.get_path("scripts"))
    assert found is not None, "distributed is installed, so its command line is, too"
    return found


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


@contextlib.contextmanager
def _cluster(workers: int) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """Start a scheduler and workers as the docs do, on loopback TCP."""
    address = f"tcp://127.0.0.1:{_free_port()}"
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    scheduler = [_dask(), "scheduler", "--host", address, "--no-dashboard"]
    worker = [_dask(), "worker", address, "--nthreads", "1", "--no-nanny", "--no-dashboard"]
    with contextlib.ExitStack() as stack:

        def start(command: list[str]) -> subprocess.Popen[bytes]:
            return stack.enter_context(running(command, env=environment, **quiet))

        start(scheduler)
        yield address, [start(worker) for _ in range(workers)]


@pytest.fixture(scope="module")
def many() -> list[Any]:
    """Samples enough to kill a worker between them."""
    return list(samples(ResidualNet, 120, seed=2))


@pytest.fixture(scope="module")
def alone(quantized: QuantizedModel, many: list[Any]) -> Near:
    """The figures of one process."""
    return Near(figures(Edgeq().compare(quantized, many)))


def test_dask_with_a_worker_that_is_killed_in_mid_run(
    quantized: QuantizedModel, many: list[Any], alone: Near
) -> None:
    """Two workers, then one: the figures are those of one process."""
    from distributed import Client

    with _cluster(2) as (address, workers), Client(address) as client:
        client.wait_for_workers(2, timeout=SECONDS)
        executor = client.get_executor()
        whole = Edgeq().compare(quantized, many, executor=executor)
        assert figures(whole) == alone

        killing = _killing(many, 50, workers[0].pid)
        broken = Edgeq().compare(quantized, killing, executor=executor)
        assert figures(broken) == alone

        source = Edgeq.samples(lambda indices: (many[index] for index in indices), len(many))
        session = Edgeq(executor=f"dask:{address}")
        elsewhere = session.compare(quantized, source)
        session.close()
        assert figures(elsewhere) == Near(figures(Edgeq().compare(quantized, source)))


def _killing(samples: list[Any], at: int, pid: int) -> Iterator[Any]:
    for index, sample in enumerate(samples):
        if index == at:
            os.kill(pid, signal.SIGKILL)
        yield sample


def test_a_loky_executor_with_a_worker_killed_in_mid_run(
    quantized: QuantizedModel, many: list[Any], alone: Near
) -> None:
    """The user's own executor; loky's pool breaks with a worker, and is asked for again."""
    from loky import get_reusable_executor

    executor = get_reusable_executor(max_workers=2)
    assert figures(Edgeq().compare(quantized, many, executor=executor)) == alone
    pid = executor.submit(os.getpid).result(SECONDS)
    found = Edgeq().compare(quantized, _killing(many, 50, pid), executor=executor)
    assert figures(found) == alone
    get_reusable_executor(max_workers=2).shutdown(kill_workers=True)


def _children() -> list[int]:
    """Return the ids of the pool's processes; that of the isolation is started by other tests."""
    close_workers()
    return [each.pid for each in psutil.Process().children() if LOCAL_NAME in _command(each)]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalPool]:
    """Two processes; none is left when it is shut down."""
    made = LocalPool(2)
    yield made
    children = [psutil.Process(pid) for pid in _children()]
    made.shutdown()
    assert not left_after(children)


def test_processes_with_a_worker_killed_in_mid_run(
    quantized: QuantizedModel, many: list[Any], alone: Near, pool: LocalPool
) -> None:
    """Another process takes its place."""
    assert figures(Edgeq().compare(quantized, many, executor=pool)) == alone
    before = _children()
    assert len(before) == 2
    found = Edgeq().compare(quantized, _killing(many, 50, before[0]), executor=pool)
    assert figures(found) == alone


def test_a_session_on_two_processes(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, warm: str
) -> None:
    """By the option: the figures are those of one process, and the record names the machine."""
    test = """
        import pytest

        from fixtures.models import ResidualNet, samples, seeded
        from pytest_edgeq import Edgeq

        def test_it(edgeq):
            quantized = edgeq.quantize(
                seeded(ResidualNet),
                ResidualNet.sample_inputs(),
                calibration=samples(ResidualNet, 8),
            )
            given = list(samples(ResidualNet, 12, seed=2))
            elsewhere, alone = edgeq.compare(quantized, given), Edgeq().compare(quantized, given)
            there, here = elsewhere.total, alone.total
            assert there.sqnr_db == pytest.approx(here.sqnr_db, rel=1e-12)
    """
    cache = [f"--edgeq-cache-dir={os.environ[VARIABLE]}"] if VARIABLE in os.environ else []
    project = Project(pytester, monkeypatch, *cache)
    options = ("--edgeq-executor=processes:2", "--edgeq-json=run.json")
    shows = "edgeq: *executor=processes:2*"
    project.run(*options, files=test, process=warm, passed=1, shows=shows)
    record = json.loads((project.path / "run.json").read_text())
    events = [each for each in record["tests"][0]["events"] if each["event"] == "compare"]
    (machine,) = events[0]["comparison"]["machines"]
    assert torch.backends.cpu.get_cpu_capability() in machine


class _Pooled(torch.nn.Module):
    """The mean of each channel, and a layer behind it: next to nothing to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return 4 scores."""
        scores: torch.Tensor = self.head(x.mean(dim=(2, 3)))
        return scores


def test_memory_of_the_client_does_not_grow_with_the_number_of_samples(pool: LocalPool) -> None:
    """2,500 samples of 97 kB of a generator: 243 MB, of which less than a fifth is kept."""
    image = torch.zeros(1, 3, 90, 90)
    session = Edgeq(executor=pool)
    quantized = session.quantize(seeded(_Pooled), (image,), quantizer="recipe_dynamic_wi8_afp32")
    generator = torch.Generator().manual_seed(0)

    def generated(count: int) -> Iterator[torch.Tensor]:
        return (torch.randn(image.shape, generator=generator) for _ in range(count))

    session.compare(quantized, generated(500))
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _memory("VmHWM")
    comparison = session.compare(quantized, generated(2500))
    grown = _memory("VmHWM") - before
    assert comparison.evaluated == (2500, 2500, 0)
    assert grown < 48, f"{grown:.0f} MB"


def _memory(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [each for each in lines if each.startswith(f"{field}:")]
    return int(line.split()[1]) / 1024
