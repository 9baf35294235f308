"""Drivers that fail, and processes that are killed, on LiteRT's own GPU engine."""

from __future__ import annotations

import json
import platform
import shlex
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from fixtures.tflite import make, stacks
from fixtures.tflite.writer import one_op
from pytest_edgeq import Edgeq
from pytest_edgeq.errors import CrashedError, UnrunnableError
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.runtimes.registry import Runtimes
from pytest_edgeq.runtimes.workers.target import Target
from tests.processes import target_workers
from tests.runtimes.gpu.killer import killing
from tests.runtimes.targets.conftest import drawn
from tests.waiting import SECONDS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("_no_process_is_left")]

NESTED = make.CONVERTED / "nested.int8.tflite"

_DRIVER = """
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <unistd.h>
/* The first function of a driver that the Vulkan loader calls. */
int vk_icdNegotiateLoaderICDInterfaceVersion(unsigned *version) {
  char path[4096];
  snprintf(path, sizeof path, FOLDER "/%d", (int)getpid());
  close(open(path, O_CREAT | O_WRONLY, 0600));
  if (CRASHES) {
    fputs("driver: device lost\\n", stderr);
    raise(SIGSEGV);
  }
  for (;;) sleep(1);
}
void *vk_icdGetInstanceProcAddr(void *instance, const char *name) { return 0; }
"""


def _with(command: list[str], folder: Path, **variables: str) -> list[str]:
    """Return a command whose Python has other variables, also where a launcher sets them."""
    program = Path(shutil.which(command[0]) or command[0]).absolute()
    begin = program.read_bytes()[:2]
    script = program.read_text() if begin == b"#!" else f'#!/bin/sh\nexec {program} "$@"\n'
    assert script.count("\nexec ") == 1
    exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    script = script.replace("\nexec ", f"\nexport {exports}\nexec ").replace('"$0"', f"'{program}'")
    launcher = folder / "launcher"
    launcher.write_text(script)
    launcher.chmod(0o755)
    return [str(launcher), *command[1:]]


def _with_driver(command: list[str], folder: Path, library: Path) -> list[str]:
    """Return a command whose Vulkan has one driver, a library."""
    manifest = folder / "driver.json"
    icd = {"library_path": str(library), "api_version": "1.3.0"}
    manifest.write_text(json.dumps({"file_format_version": "1.0.0", "ICD": icd}))
    names = ("VK_DRIVER_FILES", "VK_ICD_FILENAMES")
    return _with(command, folder, **dict.fromkeys(names, str(manifest)))


def _driver(folder: Path, pids: Path, *, crashes: bool) -> Path:
    """Build a driver that crashes or hangs, and that writes the numbers of its processes."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler, which builds the driver: install gcc")
    source, library = folder / "driver.c", folder / "driver.so"
    source.write_text(_DRIVER)
    defines = [f'-DFOLDER="{pids}"', f"-DCRASHES={int(crashes)}"]
    subprocess.run([compiler, "-shared", "-fPIC", *defines, "-o", library, source], check=True)
    return library


@pytest.fixture
def pids(tmp_path: Path) -> Path:
    """A folder in which a driver writes files with the numbers of its processes."""
    folder = tmp_path / "pids"
    folder.mkdir()
    return folder


def _refusal(command: list[str]) -> list[str]:
    """Return the lines of the error of the first file on the GPU."""
    runtimes = Runtimes(targets={"pi": Target("pi", command, 60)})
    with pytest.raises(UnrunnableError) as error:
        EdgeFile(NESTED, runtimes=runtimes).runner("pi:gpu")
    runtimes.close()
    return str(error.value).splitlines()


def test_an_adapter_that_is_not_there(gpu_command: list[str], tmp_path: Path) -> None:
    """The engine does not compute on the CPU in its place."""
    names = ("VK_DRIVER_FILES", "VK_ICD_FILENAMES")
    lines = _refusal(_with(gpu_command, tmp_path, **dict.fromkeys(names, "/nonexistent")))
    assert (
        lines[0] == "the pi:gpu runtime finds no GPU: expected a Vulkan driver with a GPU, got none"
    )
    assert "VK_DRIVER_FILES names none" in lines[1]
    assert "No adapters found" in "\n".join(lines)


def test_a_drivers_library_that_is_missing(gpu_command: list[str], tmp_path: Path) -> None:
    """The text names it."""
    lines = _refusal(_with_driver(gpu_command, tmp_path, tmp_path / "gone.so"))
    assert (
        lines[0] == "the pi:gpu runtime finds no GPU: expected a Vulkan driver with a GPU, got none"
    )
    assert lines[1] == "cause: the library of a Vulkan driver cannot be loaded"
    assert f"{tmp_path}/gone.so: cannot open shared object file" in "\n".join(lines)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="takes SSE from lavapipe, which has it")
def test_an_adapter_without_float16(gpu_command: list[str], tmp_path: Path) -> None:
    """LiteRT computes in float32 there; by its own name that is right."""
    command = _with(gpu_command, tmp_path, GALLIUM_OVERRIDE_CPU_CAPS="sse4.1")
    lines = _refusal(command)
    assert lines[0] == (
        "the pi:gpu runtime does not compute in float16: expected 300 · 300 to overflow, got 90000"
    )
    assert lines[-1].startswith("fix: use the runtime pi:gpu_f32")
    runtimes = Runtimes(targets={"pi": Target("pi", command, 60)})
    machine = runtimes.machine_of("pi:gpu_f32")
    runtimes.close()
    assert machine is not None
    assert machine.precision == "float32"


def test_a_driver_that_crashes(gpu_command: list[str], tmp_path: Path, pids: Path) -> None:
    """It is started once more, as crashes of a busy machine are rare."""
    library = _driver(tmp_path, pids, crashes=True)
    lines = _refusal(_with_driver(gpu_command, tmp_path, library))
    assert lines[0] == (
        "the pi:gpu runtime cannot start its GPU: expected it to compute one product, got SIGSEGV "
        "of its process"
    )
    text = "\n".join(lines)
    assert "  | driver: device lost\ncause: the Vulkan driver or LiteRT's" in text
    assert len(list(pids.iterdir())) == 2


def test_a_compile_that_never_ends(gpu_command: list[str], tmp_path: Path, pids: Path) -> None:
    """It is ended after the time limit, for which later tests do not wait again."""
    command = _with_driver(gpu_command, tmp_path, _driver(tmp_path, pids, crashes=False))
    runtimes = Runtimes(targets={"pi": (target := Target("pi", command, 60))})
    target.start()
    target.seconds = 5
    began = time.monotonic()
    for runtime in ("pi:gpu", "pi:gpu", "pi:gpu_f32"):
        with pytest.raises(CrashedError) as error:
            EdgeFile(NESTED, runtimes=runtimes).runner(runtime)
        lines = str(error.value).splitlines()
        assert lines[0] == (
            f"the {runtime} runtime cannot start its GPU: expected it to compute one product, got "
            "nothing for 5 s"
        )
        assert lines[-1].startswith("fix: allow more time by --edgeq-target-timeout=10")
    assert time.monotonic() - began < SECONDS
    assert len(list(pids.iterdir())) < 2
    runtimes.close()


def test_a_process_that_is_killed_in_a_compile(
    gpu_command: list[str], tmp_path: Path, pids: Path
) -> None:
    """It is started once more; when it is killed again, the test fails."""
    command = _with_driver(gpu_command, tmp_path, _driver(tmp_path, pids, crashes=False))
    with killing(pids):
        lines = _refusal(command)
    assert lines[0] == (
        "the pi:gpu runtime cannot start its GPU: expected it to compute one product, got SIGKILL "
        "of its process"
    )
    assert any(each.startswith("cause: another program ended the process") for each in lines), lines


def test_a_process_that_is_killed_in_a_run(gpu_command: list[str]) -> None:
    """At whatever moment of a batch: it is started once more, and figures are the same."""
    session = Edgeq(targets={"pi": gpu_command}, threads=1)
    quantized, samples = session.load(NESTED, reference=stacks.build("nested")), drawn("nested", 40)
    expected = session.compare(quantized, samples, runtime="pi:gpu")
    for seed in range(3):
        moment = float(np.random.default_rng(seed).uniform(0.02, 0.3))
        print(f"seed {seed}: killed after {moment:.3f} s")  # shown where it fails
        [process] = target_workers()
        killer = threading.Timer(moment, process.send_signal, [signal.SIGKILL])
        killer.start()
        found = session.compare(quantized, samples, runtime="pi:gpu")
        killer.join(SECONDS)
        process.wait(SECONDS)
        assert found.total == expected.total
        assert found.target == expected.target
        session.compare(quantized, samples[:2], runtime="pi:gpu")  # starts it, if nothing else did
    session.close()


def test_a_file_that_the_gpu_does_not_take(gpu_command: list[str]) -> None:
    """The engine would run it on the CPU."""
    floats = [{"dtype": "float32", "shape": (1, 1, 1, 4)}]
    content = one_op("LOCAL_RESPONSE_NORMALIZATION", floats, floats)
    runtimes = Runtimes(targets={"pi": Target("pi", gpu_command, 60)})
    with pytest.raises(UnrunnableError, match="would run every op of the file on the CPU") as error:
        EdgeFile(content, runtimes=runtimes).runner("pi:gpu")
    runtimes.close()
    assert "LOCAL_RESPONSE_NORMALIZATION: Operation is not supported" in str(error.value)
