"""Errors of LiteRT's GPU engine for broken drivers and refused files."""

from __future__ import annotations

import json
import platform
import shlex
import shutil
from pathlib import Path

import pytest

from fixtures.tflite import make
from fixtures.tflite.writer import one_op
from pytest_edgeq.errors import UnrunnableError
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.runtimes.registry import Runtimes
from pytest_edgeq.runtimes.workers.target import Target

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("_no_process_is_left")]

NESTED = make.CONVERTED / "nested.int8.tflite"


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


def _refusal(command: list[str]) -> list[str]:
    """Return the lines of the error of the first file on the GPU."""
    runtimes = Runtimes(targets={"pi": Target("pi", command, 60)})
    with pytest.raises(UnrunnableError) as error:
        EdgeFile(NESTED, runtimes=runtimes).runner("pi:gpu")
    runtimes.close()
    return str(error.value).splitlines()


@pytest.mark.parametrize(
    ("library", "told"),
    [(None, "No adapters found"), ("/gone.so", "/gone.so: cannot open shared object file")],
)
def test_a_driver_that_is_not_there(
    gpu_command: list[str], tmp_path: Path, library: str | None, told: str
) -> None:
    """The engine does not compute on the CPU in its place; the text names a missing library."""
    manifest = tmp_path / "driver.json"
    if library is not None:
        icd = {"library_path": library, "api_version": "1.3.0"}
        manifest.write_text(json.dumps({"file_format_version": "1.0.0", "ICD": icd}))
    names = ("VK_DRIVER_FILES", "VK_ICD_FILENAMES")
    lines = _refusal(_with(gpu_command, tmp_path, **dict.fromkeys(names, str(manifest))))
    assert (
        lines[0] == "the pi:gpu runtime finds no GPU: expected a Vulkan driver with a GPU, got none"
    )
    assert "VK_DRIVER_FILES names none" in lines[1]
    assert told in "\n".join(lines)


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


def test_a_file_that_the_gpu_does_not_take(gpu_command: list[str]) -> None:
    """The engine would run it on the CPU."""
    floats = [{"dtype": "float32", "shape": (1, 1, 1, 4)}]
    content = one_op("LOCAL_RESPONSE_NORMALIZATION", floats, floats)
    runtimes = Runtimes(targets={"pi": Target("pi", gpu_command, 60)})
    with pytest.raises(UnrunnableError, match="would run every op of the file on the CPU") as error:
        EdgeFile(content, runtimes=runtimes).runner("pi:gpu")
    runtimes.close()
    assert "LOCAL_RESPONSE_NORMALIZATION: Operation is not supported" in str(error.value)
