"""Failure texts of a fake GPU that refuses a file, crashes or hangs."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fixtures.tflite import make, stacks
from fixtures.tflite.writer import one_op
from pytest_edgeq import Edgeq
from pytest_edgeq.errors import CrashedError, UnrunnableError
from pytest_edgeq.runtimes.delegation import delegation_of
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.runtimes.registry import Runtimes
from pytest_edgeq.runtimes.workers.target import Target
from tests.processes import target_workers
from tests.runtimes.gpu.fake_gpu import fake_here, fake_target
from tests.runtimes.gpu.killer import killing
from tests.runtimes.targets.conftest import drawn, patched_litert
from tests.waiting import SECONDS

pytestmark = pytest.mark.usefixtures("_no_process_is_left")

GOLDEN = Path(__file__).parent / "golden"
NESTED = make.CONVERTED / "nested.int8.tflite"
OP = "FULLY_CONNECTED"


def _refusal(runtimes: Runtimes, content: bytes | Path, runtime: str) -> str:
    """Return the text with which a runtime refuses a file; paths of this machine are words."""
    with pytest.raises(UnrunnableError) as error:
        EdgeFile(content, runtimes=runtimes).runner(runtime)
    runtimes.close()
    text = re.sub(r"PYTHONPATH=\S+", "PYTHONPATH=FOLDER", str(error.value))
    return text.replace(sys.executable, "PYTHON")


def _targets(command: list[str], seconds: float = 60) -> Runtimes:
    return Runtimes(targets={"pi": Target("pi", command, seconds)})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "faults"),
    [
        ("no_adapter", {"no_adapter": True}),
        ("no_engine", {"no_engine": True}),
        ("no_float16", {"float32": True}),
        ("shader", {"shader": OP}),
        ("refused", {"refused": OP}),
        ("no_op", {"left": "NEG"}),
        ("crash", {"crash": OP}),
        ("no_start", {"crash": "MUL"}),
        ("hang", {"hang": OP}),
        ("hangs_at_start", {"hang": "MUL"}),
    ],
)
def test_a_text_names_what_fails(tmp_path: Path, name: str, faults: dict[str, str]) -> None:
    """And the op, where it is one, the cause and the fix."""
    runtimes = _targets(fake_target(tmp_path / "pi", **faults))
    if "hang" in name:
        target = runtimes.targets["pi"]
        target.machine_for("gpu" if name == "hang" else "xnnpack")  # within a minute
        target.seconds = 2
    floats = [{"dtype": "float32"}]
    content = one_op("NEG", floats, floats) if name == "no_op" else NESTED
    assert _refusal(runtimes, content, "pi:gpu") + "\n" == (GOLDEN / f"{name}.txt").read_text()


def test_the_error_of_the_engine_is_shown_before_the_ops_on_the_cpu(tmp_path: Path) -> None:
    """A failure shows few lines of it."""
    text = _refusal(_targets(fake_target(tmp_path / "pi", left="ADD", shader=OP)), NESTED, "pi:gpu")
    assert re.search("the engine said: Validation error(?s:.*)ADD: Max version supported", text)


@pytest.mark.slow
def test_a_gpu_that_hung_is_not_waited_for_again(tmp_path: Path) -> None:
    """Neither on its other kernels: each test would wait for it."""
    pids = tmp_path / "pids"
    pids.mkdir()
    runtimes = _targets(fake_target(tmp_path / "pi", hang="MUL", pids=str(pids)))
    runtimes.machine_of("pi")
    runtimes.targets["pi"].seconds = 1
    for runtime in ("pi:gpu", "pi:gpu", "pi:gpu_f32"):
        with pytest.raises(CrashedError, match=f"the {runtime} runtime cannot start its GPU: "):
            EdgeFile(NESTED, runtimes=runtimes).runner(runtime)
    runtimes.close()
    assert len(list(pids.iterdir())) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "faults"), [("no_float16", {"float32": True}), ("crash", {"crash": OP})]
)
def test_the_gpu_of_this_machine_is_no_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, faults: dict[str, str]
) -> None:
    """The fix names other runtimes of this machine."""
    fake_here(monkeypatch, tmp_path, **faults)
    expected = (GOLDEN / f"{name}.txt").read_text().replace("runtime='pi'", "runtime='xnnpack'")
    text = _refusal(Runtimes(), NESTED, "gpu") + "\n"
    assert text == re.sub("env .* PYTHON", "PYTHON", expected).replace("pi:gpu", "gpu")


def test_an_older_package_has_no_engine(tmp_path: Path) -> None:
    """It cannot import what the engine is asked by."""
    command = patched_litert(tmp_path / "old", "")
    options = tmp_path / "old" / "ai_edge_litert" / "options.py"
    options.write_text("CpuOptions = Options = None\n")
    text = _refusal(_targets(command), NESTED, "pi:gpu")
    assert "cause: this ai-edge-litert has no GPU engine" in text
    assert "the engine said: ImportError: cannot import name 'GpuOptions'" in text


@pytest.mark.slow
@pytest.mark.parametrize("begin", ["exec ", ""])
def test_a_command_that_hides_stderr(tmp_path: Path, begin: str) -> None:
    """Errors of the engine stand nowhere else."""
    script = f'{begin}"$@" 2>/dev/null; exit 0'
    runtimes = _targets(["sh", "-c", script, "sh", *fake_target(tmp_path / "pi")])
    runtimes.machine_of("pi")
    runtimes.targets["pi"].seconds = 2
    lines = _refusal(runtimes, NESTED, "pi:gpu").splitlines()
    got = "its end" if begin else "nothing for 2 s"
    assert lines[0] == (
        "the pi:gpu runtime hides what is printed there: expected the stderr of a Python, got "
        f"{got}"
    )
    assert lines[2].startswith("cause: the command or a wrapper redirects stderr")


def test_ops_that_run_on_the_cpu_are_counted(tmp_path: Path) -> None:
    """The counts of all subgraphs are added; an error of a constant that they read is none."""
    runtimes = _targets(fake_target(tmp_path / "pi", left=OP, constant=OP))
    edge = EdgeFile(NESTED, runtimes=runtimes)
    n_left = sum(op.name == OP for op in edge.graph.ops)
    assert delegation_of(edge, "pi:gpu").n_on_gpu == len(edge.graph.ops) - n_left
    assert n_left > 0
    runtimes.close()


def test_no_file_runs_on_the_cpu_without_a_word(tmp_path: Path) -> None:
    """Also behind one that ran on the GPU: each names its adapter."""
    runtimes = _targets(fake_target(tmp_path / "pi", no_engine=OP))
    runtimes.machine_of("pi:gpu")
    lines = _refusal(runtimes, NESTED, "pi:gpu").splitlines()
    assert lines[0] == "the pi:gpu runtime cannot load the .tflite file"
    assert lines[1].endswith("GPU accelerator could not be loaded and registered.")


@pytest.mark.slow
def test_a_process_that_is_killed_in_a_compile(tmp_path: Path) -> None:
    """It is started once more; when it is killed again, the test fails."""
    pids = tmp_path / "pids"
    pids.mkdir()
    runtimes = _targets(fake_target(tmp_path / "pi", hang=OP, pids=str(pids)))
    with killing(pids):
        text = _refusal(runtimes, NESTED, "pi:gpu")
    lines = text.splitlines()
    assert lines[0] == (
        "the pi:gpu runtime lost its process: expected an answer, got SIGKILL of its process"
    )
    assert "cause: another program ended the process, or the machine ran out of memory" in lines[3]


def test_a_process_that_is_killed_between_samples(tmp_path: Path) -> None:
    """Figures are those of a run without it."""
    session = Edgeq(targets={"pi": fake_target(tmp_path / "pi")}, threads=1)
    quantized = session.load(NESTED, reference=stacks.build("nested"))

    def samples(kills_at: int) -> Iterator[Any]:
        for index, sample in enumerate(drawn("nested", 6)):
            if index == kills_at:
                [each] = target_workers()
                each.kill()
                each.wait(SECONDS)
            yield sample

    expected = session.compare(quantized, samples(-1), runtime="pi:gpu")
    found = session.compare(quantized, samples(3), runtime="pi:gpu")
    assert found.total == expected.total
    assert found.target == expected.target
    session.close()
