"""Whole sessions on a local target: how it is named, what is recorded, what is told."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fixtures.tflite import make, stacks
from pytest_edgeq import Edgeq, assert_runtimes_agree
from pytest_edgeq.runtimes.workers.remote_worker import facts
from pytest_edgeq.runtimes.workers.target_spec import parse_targets
from tests.processes import left_after, let_sigint_through, target_workers
from tests.projects import Project
from tests.runtimes.targets.conftest import drawn, patched_litert
from tests.waiting import output_of, wait_until

BATCH_NORMS = make.CONVERTED / "batch_norms.int8.tflite"
GOLDEN = Path(__file__).parent / "golden"

PORTABLE = ["env", "RUY_PATHS=1", sys.executable]
"""Builtin kernels without AVX2, as on ARM: ruy reads which code it may use."""

needs_avx2 = pytest.mark.skipif(
    "AVX2" not in facts()["features"],
    reason="this CPU has no AVX2, whose kernels round otherwise than those of all others",
)

TEST = """
import pytest
from fixtures.tflite import make, stacks
from tests.runtimes.targets.conftest import drawn


@pytest.fixture(scope="module")
def quantized(edgeq):
    path = make.CONVERTED / "batch_norms.int8.tflite"
    return edgeq.load(path, reference=stacks.build("batch_norms"))


def samples():
    return drawn("batch_norms", 8)


def test_compare(edgeq, quantized):
    comparison = edgeq.compare(quantized, samples())
    assert comparison.runtime == EXPECTED
    edgeq.check_errors(comparison)


@pytest.mark.edgeq(runtime="pi:builtin")
def test_marked(edgeq, quantized):
    assert edgeq.compare(quantized, samples()).runtime == MARKED
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project whose ini names a target."""
    made = Project(pytester, monkeypatch)
    targets = [f"pi = {sys.executable}", "board = no-such-program -x"]
    ini = f"[tool.pytest.ini_options]\nedgeq_targets = {json.dumps(targets)}\n"
    made.write({"pyproject.toml": ini})
    return made


def _test(expected: str, marked: str = "pi:builtin") -> str:
    return TEST.replace("EXPECTED", repr(expected)).replace("MARKED", repr(marked))


def test_a_session_on_a_target(project: Project) -> None:
    """Header, last lines, record and baseline say what ran; no process is left."""
    before = target_workers()
    machine = f"{facts()['machine']} "
    shows = [
        f"edgeq: target pi: {machine}*ai-edge-litert *, Python *, numpy *",
        "edgeq: target board: no-such-program -x",
        f"ran on pi: {machine}*",
    ]
    options = ("--edgeq-runtime=pi", "--edgeq-update", "--edgeq-json=run.json")
    project.run(*options, files=_test("pi", "pi"), passed=2, shows=shows)
    assert not left_after([each for each in target_workers() if each not in before])
    record = json.loads((project.path / "run.json").read_text())
    told = {"target": "pi", **facts()}
    assert record["targets"] == [told]
    compared = [e["comparison"] for t in record["tests"] for e in t["events"] if "comparison" in e]
    assert compared
    assert all(each["target"] == told and each["runtime"] == "pi" for each in compared)
    [path] = (project.path / "__edgeq__").rglob("*errors*.json")
    stored = json.loads(path.read_text())["data"]
    assert stored["runtime"] == "pi"
    assert stored["target"] == {
        name: told[name] for name in ("machine", "features", "package", "release")
    }


@pytest.mark.slow
def test_errors_of_other_kernels_are_held_to_wider_limits(project: Project) -> None:
    """A baseline of one machine serves on another, and a regression says which they were."""
    options = ("--edgeq-runtime=pi", "--edgeq-update")
    project.run(*options, files=_test("pi"), passed=1, failed=1)
    [path] = (project.path / "__edgeq__").rglob("*errors*.json")
    stored = json.loads(path.read_text())
    stored["data"]["target"] |= {"machine": "aarch64", "features": ["ASIMD"]}
    path.write_text(json.dumps(stored))
    project.run("--edgeq-runtime=pi", "-k", "compare", passed=1, deselected=1)
    rows = {(r["stage"], r["metric"]): r for r in stored["data"]["errors"]}
    rows["total", "sqnr_db"] |= {"value": 90.0, "worst": 85.0, "best": 95.0, "samples": []}
    path.write_text(json.dumps(stored))
    shows = "*runtime: pi (aarch64, ai-edge-litert *) → pi (*); errors regressed: *"
    project.run("--edgeq-runtime=pi", "-k", "compare", failed=1, deselected=1, shows=shows)


def test_the_command_line_adds_targets(project: Project) -> None:
    """The same name replaces the ini's; a marker names its own kernels."""
    project.run(
        f"--edgeq-targets=other = {sys.executable}",
        f"--edgeq-targets=board = env -u X {sys.executable}",
        *("--edgeq-update", "--edgeq-runtime=other", "-k", "compare"),
        files=_test("other"),
        passed=1,
        deselected=1,
        shows=[
            f"edgeq: target pi: {sys.executable}",
            f"edgeq: target board: env -u X {sys.executable}",
        ],
    )
    project.run("--edgeq-update", files=_test("xnnpack"), passed=2)


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("--edgeq-runtime=pi:compiled", "*--edgeq-runtime: unknown runtime 'pi:compiled'*pi:xn*"),
        ("--edgeq-targets=nothing", "*--edgeq-targets: expected NAME = COMMAND, got 'nothing'*"),
        ("--edgeq-targets=xnnpack = python3", "*'xnnpack' is the name of a built-in runtime*"),
        ("--edgeq-check-targets=pie", "*--edgeq-check-targets: 'pie' names no target*mean pi?*"),
    ],
)
def test_a_wrong_option_is_told(project: Project, option: str, told: str) -> None:
    """Before any test runs."""
    project.run(option, ret=pytest.ExitCode.USAGE_ERROR, shows=told)


def test_a_command_that_cannot_be_read() -> None:
    """A quote is not closed."""
    with pytest.raises(ValueError, match="a: the command cannot be read: No closing"):
        parse_targets(["a = sh -c 'x"])


def test_a_target_that_does_not_start_is_told_in_the_header(project: Project) -> None:
    """And fails the tests; it is looked for once."""
    told = "the board runtime did not start: expected a Python that answers, got no program "
    shows = [f"edgeq: target board: {told}'no-such-program'", f"E *{told}*"]
    project.run("--edgeq-runtime=board", files=_test("board", "board"), failed=2, shows=shows)


@pytest.mark.slow
def test_workers_have_one_each(project: Project) -> None:
    """None is left, and the last lines name the machine once."""
    before = target_workers()
    options = ("--edgeq-runtime=pi", "-n2", "--edgeq-update")
    result = project.run(*options, files=_test("pi", "pi"), passed=2)
    assert result.stdout.str().count("ran on pi: ") == 1
    assert not left_after([each for each in target_workers() if each not in before])


@needs_avx2
@pytest.mark.filterwarnings("ignore:edgeq.check. baselines were not checked")
def test_a_difference_of_kernels_is_explained() -> None:
    """Which op, how many codes; XNNPACK computes the same on both, and a check notes it only."""
    edgeq = Edgeq(targets={"portable": PORTABLE}, check_targets=("portable:builtin",))
    quantized = edgeq.load(BATCH_NORMS, reference=stacks.build("batch_norms"))
    samples = drawn("batch_norms", 8)
    assert_runtimes_agree(quantized, samples, 0, runtimes=("xnnpack", "portable"))
    with pytest.raises(AssertionError) as error:
        assert_runtimes_agree(quantized, samples, 0, runtimes=("builtin", "portable:builtin"))
    text = re.sub(r"(#4) \(\w+\)", r"\1", str(error.value)).replace(facts()["machine"], "MACHINE")
    assert text + "\n" == (GOLDEN / "kernels_apart.txt").read_text()

    told = r"builtin and portable:builtin: CONV_2D #4( \(\w+\))?, run alone on the same inputs"
    with pytest.warns(UserWarning, match=told):
        edgeq.check(quantized, samples)
    edgeq.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:edgeq.check. baselines were not checked")
def test_a_check_fails_on_a_target_that_is_broken(tmp_path: Path) -> None:
    """Its outputs are not those of the file."""
    code = (
        "_get = Interpreter.get_tensor\n"
        "Interpreter.get_tensor = lambda *args: _get(*args)[..., ::-1].copy()"
    )
    command = patched_litert(tmp_path / "bad", code)
    edgeq = Edgeq(targets={"pi": command}, check_targets=("pi",))
    quantized = edgeq.load(BATCH_NORMS, reference=stacks.build("batch_norms"))
    with pytest.raises(AssertionError, match="runtimes 'pi' and 'builtin'"):
        edgeq.check(quantized, drawn("batch_norms", 8))
    edgeq.close()


@pytest.mark.slow
def test_ctrl_c_does_not_wait_for_a_target_that_hangs(
    project: Project, pytester: pytest.Pytester
) -> None:
    """The session ends, and with it the target."""
    project.write(
        """
        import pathlib
        from fixtures.tflite import make, stacks
        from tests.processes import target_workers


        def samples():
            for index in range(100):
                if index == 2:
                    [process] = target_workers()
                    process.suspend()
                if index == 6:
                    pathlib.Path("hangs").touch()
                yield stacks.MODELS["nested"][1]


        def test_hangs(edgeq):
            path = make.CONVERTED / "nested.int8.tflite"
            quantized = edgeq.load(path, reference=stacks.build("nested"))
            quantized.run(*stacks.MODELS["nested"][1], runtime="pi")
            edgeq.compare(quantized, samples(), runtime="pi")
        """
    )
    let_sigint_through()
    session = pytester.popen(
        [sys.executable, "-m", "pytest"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_until((project.path / "hangs").exists, session)
    started = target_workers(session.pid)
    assert len(started) == 1
    session.send_signal(signal.SIGINT)
    told = output_of(session)
    assert "KeyboardInterrupt" in told
    assert not left_after(started)


def test_another_release_is_told(project: Project, tmp_path: Path) -> None:
    """By the last lines, and by what two releases round otherwise."""
    command = patched_litert(tmp_path / "other", "")
    known = tmp_path / "other" / "ai_edge_litert-1.9.0.dist-info"
    known.mkdir()
    (known / "METADATA").write_text("Metadata-Version: 2.1\nName: ai-edge-litert\nVersion: 1.9.0\n")
    project.run(
        *(f"--edgeq-targets=old = {' '.join(command)}", "--edgeq-runtime=old", "--edgeq-update"),
        files=_test("old", "old"),
        passed=2,
        shows="ran on old: *ai-edge-litert 1.9.0,*; here ai-edge-litert is *",
    )
    if "AVX2" in facts()["features"]:
        edgeq = Edgeq(targets={"old": ["env", "RUY_PATHS=1", *command]})
        told = r"kernels of ai-edge-litert .* and ai-edge-litert 1.9"
        with pytest.raises(AssertionError, match=told):
            assert_runtimes_agree(
                edgeq.load(BATCH_NORMS),
                drawn("batch_norms", 8),
                0,
                runtimes=("builtin", "old:builtin"),
            )
        edgeq.close()
