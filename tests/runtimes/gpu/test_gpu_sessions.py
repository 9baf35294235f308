"""Sessions on a GPU, which is a fake: what is run, recorded, stored and compared."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from fixtures.tflite import make, stacks
from fixtures.tflite.stateful import counter
from fixtures.tflite.writer import FileWriter, chain
from pytest_edgeq import Edgeq, assert_runtimes_agree
from pytest_edgeq.numerics.target_machine import TargetMachine
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.runtimes.registry import Runtimes
from pytest_edgeq.runtimes.workers.remote_worker import facts
from tests.bench.speed.kernels_of_arm import drawn as inputs_of
from tests.cli.conftest import run  # noqa: F401 # a fixture
from tests.projects import Project
from tests.runtimes.gpu.fake_engine import ADAPTER
from tests.runtimes.gpu.fake_gpu import fake_here, fake_target
from tests.runtimes.targets.conftest import drawn

pytestmark = pytest.mark.usefixtures("_no_process_is_left")

FLOAT = make.CONVERTED / "batch_norms.float.tflite"
INT8 = make.CONVERTED / "batch_norms.int8.tflite"

ON_GPU = ("pi:gpu", "gpu")
IN_FLOAT32 = ("pi:gpu_f32", "gpu_f32")


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command of a target with a GPU; this machine has one, too."""
    fake_here(monkeypatch, tmp_path / "here")
    return fake_target(tmp_path / "pi")


def _ini(command: list[str]) -> str:
    targets = json.dumps([f"pi = {' '.join(command)}"])
    return f"[tool.pytest.ini_options]\nedgeq_targets = {targets}\n"


@pytest.fixture
def session(command: list[str]) -> Iterator[Edgeq]:
    """One with both GPUs, one of which `check` runs."""
    made = Edgeq(targets={"pi": command}, check_targets=ON_GPU, threads=1, target_timeout=60)
    yield made
    made.close()


@pytest.fixture
def runtimes(session: Edgeq) -> Runtimes:
    """Its runtimes."""
    return session.load(INT8).edge.runtimes


def test_kernels_compute_in_their_precision(runtimes: Runtimes) -> None:
    """By the names of both GPUs, whose machines name adapter and precision."""
    edge = EdgeFile(FLOAT, runtimes=runtimes)
    inputs = inputs_of(edge, 0)
    [exact] = edge.runner("compiled").run(inputs)
    for name in IN_FLOAT32:
        assert np.array_equal(edge.runner(name).run(inputs)[0], exact)
    for name in ON_GPU:
        assert np.array_equal(edge.runner(name).run(inputs)[0], exact.astype(np.float16))
        assert runtimes.machine_of(name) == TargetMachine.of(
            name.partition(":")[0], {**facts(), "adapter": ADAPTER, "precision": "float16"}
        )
    # Those of both kernels; and the kernels of the CPU have none.
    assert [each.precision for each in runtimes.machines] == ["float16 and float32"] * 2
    machine = runtimes.machine_of("pi")
    assert machine is not None
    assert not machine.adapter


def test_shapes_and_states(runtimes: Runtimes) -> None:
    """Shapes change from sample to sample; a state stays until a restart."""
    free = {"signature": (-1, 4)}
    content = chain(("RELU", "x", "y"), inputs="x", outputs="y", key="main", x=free, y=free)
    edge, stateful = (EdgeFile(each, runtimes=runtimes) for each in (content, counter()))
    for name in ON_GPU:
        for batch in (1, 3, 1):
            values = np.arange(batch * 4, dtype=np.float32).reshape(batch, 4) - 2
            assert np.array_equal(edge.runner(name).run({"x": values})[0], values.clip(0))
        for _ in range(2):
            one = {"x": np.ones((1, 4), np.float32)}
            totals = [stateful.runner(name).run(one)[0] for _ in range(3)]
            assert [total.tolist() for total in totals] == [[[n] * 4] for n in (1, 2, 3)]
            stateful.restart()


def test_several_signatures(runtimes: Runtimes) -> None:
    """Each is run by its position in the file."""
    file = FileWriter()
    for key in ("NEG", "FLOOR"):
        file.graph(key).fill((key, "x", "y"), inputs="x", outputs="y", key=key)
    edge = EdgeFile(file.content(), runtimes=runtimes)
    inputs = {"x": np.full((1, 4), -2.5, np.float32)}
    for key, expected in (("NEG", 2.5), ("FLOOR", -3.0)):
        for name in ON_GPU:
            assert edge.at(key).runner(name).run(inputs)[0].tolist() == [[expected] * 4]


@pytest.mark.filterwarnings("ignore:edgeq.check. baselines were not checked")
def test_a_model_is_compared_and_checked(session: Edgeq) -> None:
    """Figures of int8 are those of this process; a GPU keeps no tensors to localize by."""
    quantized, inputs = (
        session.load(INT8, reference=stacks.build("batch_norms")),
        drawn("batch_norms", 8),
    )
    here = session.compare(quantized, inputs)
    for name in ON_GPU:
        there = session.compare(quantized, inputs, runtime=name)
        assert there.total == here.total
        assert there.runtime == name
        assert there.target is not None
        assert (there.target.adapter, there.target.precision) == (ADAPTER, "float16")
        with pytest.raises(
            ValueError, match=f"the {name} runtime keeps no .*: builtin, reference, pi:builtin,"
        ):
            session.localize(quantized, inputs, runtime=name)
    assert_runtimes_agree(quantized, inputs, 0, runtimes=("xnnpack", *ON_GPU, *IN_FLOAT32))
    session.check(quantized, inputs)


def test_stages_are_those_of_the_cpu(session: Edgeq) -> None:
    """Kernels change the last one alone: a float file has the error of float16."""
    torch.manual_seed(0)
    model, inputs = torch.nn.Linear(8, 4).eval(), [torch.randn(1, 8) for _ in range(4)]
    int8 = session.quantize(model, inputs[0], calibration=inputs)
    here, there = (
        session.compare(int8, inputs, runtime=name).stages for name in ("xnnpack", "gpu")
    )
    assert there == here
    assert list(there) == ["quantization", "lowering", "total"]
    in_float = session.quantize(model, inputs[0], quantizer=None)
    for name, low, high in (("gpu", 50, 90), ("gpu_f32", 100, 200)):
        [output] = session.compare(in_float, inputs, runtime=name).total.outputs.values()
        assert low < output.sqnr_db < high


TEST = """
from fixtures.tflite import make, stacks
from tests.runtimes.targets.conftest import drawn


def test_compare(edgeq):
    path = make.CONVERTED / "batch_norms.int8.tflite"
    quantized = edgeq.load(path, reference=stacks.build("batch_norms"))
    edgeq.check_errors(edgeq.compare(quantized, drawn("batch_norms", 8)))
"""


@pytest.fixture
def project(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> Project:
    """A project whose ini names a target with a GPU."""
    made = Project(pytester, monkeypatch)
    made.write({"pyproject.toml": _ini(command)})
    return made


@pytest.mark.parametrize("name", ON_GPU)
def test_a_run_of_pytest_names_the_gpu(project: Project, name: str) -> None:
    """In header, last lines, record and baseline."""
    target = name.partition(":")[0]
    gpu = f"*ai-edge-litert *, GPU {ADAPTER}, float16"
    shows = [f"edgeq: target {target}: {gpu}", f"ran on {target}: {gpu}"]
    options = (f"--edgeq-runtime={name}", "--edgeq-update", "--edgeq-json=run.json")
    project.run(*options, files=TEST, passed=1, shows=shows)
    record = json.loads((project.path / "run.json").read_text())
    of_gpu = {"adapter": ADAPTER, "precision": "float16"}
    told = {"target": target, **facts(), **of_gpu}
    assert record["targets"] == [told]
    compared = [e["comparison"] for t in record["tests"] for e in t["events"] if "comparison" in e]
    assert [each["target"] for each in compared] == [told]
    [path] = (project.path / "__edgeq__").rglob("*errors*.json")
    stored = json.loads(path.read_text())["data"]
    known = {each: told[each] for each in ("machine", "features", "package", "release")}
    assert stored["target"] == {**known, **of_gpu}


@pytest.mark.slow
def test_a_baseline_of_another_gpu_has_wider_limits(project: Project, tmp_path: Path) -> None:
    """And a regression names both."""
    options = ("--edgeq-runtime=pi:gpu", "--edgeq-update")
    project.run(*options, files=TEST, passed=1)
    [path] = (project.path / "__edgeq__").rglob("*errors*.json")
    stored = json.loads(path.read_text())
    for row in stored["data"]["errors"]:
        if row["metric"] == "sqnr_db":
            row["worst"] = row["value"]
            row["samples"] = []
    other = fake_target(tmp_path / "other", adapter="Mali-G78")
    options = ("--edgeq-runtime=pi:gpu", f"--edgeq-targets=pi = {' '.join(other)}")
    path.write_text(json.dumps(stored))
    project.run(*options, passed=1)
    rows = {(r["stage"], r["metric"]): r for r in stored["data"]["errors"]}
    rows["total", "sqnr_db"] |= {"value": 90.0, "worst": 85.0, "best": 95.0}
    path.write_text(json.dumps(stored))
    shows = f"*runtime: pi:gpu ({ADAPTER}) → pi:gpu (Mali-G78); errors regressed: *"
    project.run(*options, failed=1, shows=shows)


def test_a_gpu_that_does_not_start_is_told_in_the_header(project: Project, tmp_path: Path) -> None:
    """And fails the test, with the text."""
    dead = fake_target(tmp_path / "dead", crash="MUL")
    told = (
        "the pi:gpu runtime cannot start its GPU: expected it to compute one product, got SIGSEGV *"
    )
    options = ("--edgeq-runtime=pi:gpu", f"--edgeq-targets=pi = {' '.join(dead)}")
    shows = [f"edgeq: target pi: {told}", f"E *{told}", "E *cause: the Vulkan driver or *"]
    project.run(*options, files=TEST, failed=1, shows=shows)


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_GPU)
def test_an_option_has_check_run_the_gpu(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A sound file passes; a shader that does not compile fails the check, with the op."""
    test = """
        from fixtures.tflite import make, stacks
        from tests.runtimes.targets.conftest import drawn


        def test_check(edgeq):
            path = make.CONVERTED / "batch_norms.int8.tflite"
            quantized = edgeq.load(path, reference=stacks.build("batch_norms"))
            edgeq.check(quantized, drawn("batch_norms", 8))
    """
    options = (f"--edgeq-check-targets={name}", "--edgeq-update")
    project.run(*options, files=test, passed=1, shows=f"ran on {name.partition(':')[0]}: *float16")
    fake_here(monkeypatch, tmp_path / "broken", shader="CONV_2D")
    broken = fake_target(tmp_path / "broken_pi", shader="CONV_2D")
    shows = [
        f"E *the {name} runtime cannot load the .tflite file: CONV_2D #*",
        "E *LiteRT logs an error for this op, *",
    ]
    project.run(*options, f"--edgeq-targets=pi = {' '.join(broken)}", failed=1, shows=shows)
