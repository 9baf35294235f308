"""Whole sessions on a local target: how it is named, what is recorded, what is told."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fixtures.tflite import make, stacks
from pytest_edgeq import Edgeq, assert_runtimes_agree
from pytest_edgeq.plugin.options.values import CI_VARIABLES
from pytest_edgeq.runtimes.workers.remote_worker import facts
from tests.processes import left_after, let_sigint_through, target_workers
from tests.targets.packages import patched_litert
from tests.waiting import output_of, wait_until

GOLDEN = Path(__file__).parent / "golden"
ROOT = Path(__file__).parents[2]

PORTABLE = ["env", "RUY_PATHS=1", sys.executable]
"""Builtin kernels without AVX2, as on ARM: ruy reads which code it may use."""

needs_avx2 = pytest.mark.skipif(
    "AVX2" not in facts()["features"],
    reason="this CPU has no AVX2, whose kernels round otherwise than those of all others",
)

TEST = """
import pytest
from fixtures.tflite import make, stacks


@pytest.fixture(scope="module")
def quantized(edgeq):
    path = make.CONVERTED / "batch_norms.int8.tflite"
    return edgeq.load(path, reference=stacks.build("batch_norms"))


def samples():
    import torch

    generator = torch.Generator().manual_seed(0)
    shape = stacks.MODELS["batch_norms"][1][0].shape
    return [torch.randn(shape, generator=generator) for _ in range(32)]


def test_compare(edgeq, quantized):
    comparison = edgeq.compare(quantized, samples())
    assert comparison.runtime == EXPECTED
    edgeq.check_errors(comparison)


@pytest.mark.edgeq(runtime="pi:builtin")
def test_marked(edgeq, quantized):
    assert edgeq.compare(quantized, samples()).runtime == MARKED
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project whose ini names a target."""
    for name in CI_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    pytester.makepyprojecttoml(
        f"""
        [tool.pytest.ini_options]
        pythonpath = [{str(ROOT)!r}]
        edgeq_targets = ["pi = {sys.executable}", "board = no-such-program -x"]
        """
    )
    return pytester


def _write(project: pytest.Pytester, expected: str, marked: str = "pi:builtin") -> None:
    text = TEST.replace("EXPECTED", repr(expected)).replace("MARKED", repr(marked))
    project.makepyfile(test_it=text)


def test_a_session_on_a_target(project: pytest.Pytester) -> None:
    """Header, last lines, record and baseline say what ran; no process is left."""
    _write(project, "pi", "pi")
    before = target_workers()
    result = project.runpytest("--edgeq-runtime=pi", "--edgeq-update", "--edgeq-json=run.json")
    result.assert_outcomes(passed=2)
    machine = f"{facts()['machine']} "
    result.stdout.fnmatch_lines(
        [
            f"edgeq: target pi: {machine}*ai-edge-litert *, Python *, numpy *",
            "edgeq: target board: no-such-program -x",
            f"ran on pi: {machine}*",
        ]
    )
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


def test_errors_of_other_kernels_are_held_to_wider_limits(project: pytest.Pytester) -> None:
    """A baseline of one machine serves on another, and a regression says which they were."""
    _write(project, "pi")
    project.runpytest("--edgeq-runtime=pi", "--edgeq-update").assert_outcomes(passed=1, failed=1)
    [path] = (project.path / "__edgeq__").rglob("*errors*.json")
    stored = json.loads(path.read_text())
    stored["data"]["target"] |= {"machine": "aarch64", "features": ["ASIMD"]}
    path.write_text(json.dumps(stored))
    project.runpytest("--edgeq-runtime=pi", "-k", "compare").assert_outcomes(passed=1)
    rows = {(r["stage"], r["metric"]): r for r in stored["data"]["errors"]}
    rows["total", "sqnr_db"] |= {"value": 90.0, "worst": 85.0, "best": 95.0, "samples": []}
    path.write_text(json.dumps(stored))
    result = project.runpytest("--edgeq-runtime=pi", "-k", "compare")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*runtime: pi (aarch64, ai-edge-litert *) → pi (*); errors regressed: *"]
    )


def test_the_command_line_adds_targets(project: pytest.Pytester) -> None:
    """The same name replaces the ini's; a marker names its own kernels."""
    _write(project, "other")
    result = project.runpytest(
        f"--edgeq-targets=other = {sys.executable}",
        f"--edgeq-targets=board = env -u X {sys.executable}",
        "--edgeq-update",
        "--edgeq-runtime=other",
        "-k",
        "compare",
    )
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        [f"edgeq: target pi: {sys.executable}", f"edgeq: target board: env -u X {sys.executable}"]
    )
    _write(project, "xnnpack")
    project.runpytest("--edgeq-update").assert_outcomes(passed=2)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--edgeq-runtime=pie"], "*--edgeq-runtime: unknown runtime 'pie'*pi*"),
        (["--edgeq-runtime=pi:compiled"], "*--edgeq-runtime: unknown runtime 'pi:compiled'*"),
        (["--edgeq-targets=nothing"], "*--edgeq-targets: expected NAME = COMMAND, got 'nothing'*"),
        (["--edgeq-targets=xnnpack = python3"], "*'xnnpack' is the name of a built-in runtime*"),
        (["--edgeq-targets=a = sh -c 'x"], "*--edgeq-targets: a: the command cannot be read: No *"),
        (["--edgeq-check-targets=pie"], "*--edgeq-check-targets: 'pie' names no target*mean pi?*"),
        (["--edgeq-target-timeout=0"], "*--edgeq-target-timeout: expected an integer from 1*"),
    ],
)
def test_a_wrong_option_is_told(project: pytest.Pytester, options: list[str], told: str) -> None:
    """Before any test runs."""
    result = project.runpytest(*options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([told])


def test_a_target_that_does_not_start_is_told_in_the_header(project: pytest.Pytester) -> None:
    """And fails the tests; it is looked for once."""
    _write(project, "board", "board")
    result = project.runpytest("--edgeq-runtime=board")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        [
            "edgeq: target board: the board runtime did not start: expected a Python that answers, "
            "got no program 'no-such-program'",
            "E *the board runtime did not start: expected a Python that answers, got no program *",
        ]
    )


@pytest.mark.slow
def test_workers_have_one_each(project: pytest.Pytester) -> None:
    """None is left, and the last lines name the machine once."""
    _write(project, "pi", "pi")
    before = target_workers()
    result = project.runpytest("--edgeq-runtime=pi", "-n2", "--edgeq-update")
    result.assert_outcomes(passed=2)
    assert result.stdout.str().count("ran on pi: ") == 1
    assert not left_after([each for each in target_workers() if each not in before])


# --- runtimes that do not agree ------------------------------------------------------------------


def _samples(name: str) -> list[Any]:
    import torch

    generator = torch.Generator().manual_seed(1)
    return [
        tuple(torch.randn(each.shape, generator=generator) for each in stacks.MODELS[name][1])
        for _ in range(8)
    ]


@needs_avx2
def test_a_difference_of_kernels_is_explained() -> None:
    """Which op, how many codes; and XNNPACK gives the same on both."""
    edgeq = Edgeq(targets={"portable": PORTABLE})
    quantized = edgeq.load(make.CONVERTED / "batch_norms.int8.tflite")
    samples = _samples("batch_norms")
    assert_runtimes_agree(quantized, samples, 0, runtimes=("xnnpack", "portable"))
    with pytest.raises(AssertionError) as error:
        assert_runtimes_agree(quantized, samples, 0, runtimes=("builtin", "portable:builtin"))
    text = str(error.value).replace(facts()["machine"], "MACHINE")
    assert text + "\n" == (GOLDEN / "kernels_apart.txt").read_text()
    edgeq.close()


@needs_avx2
@pytest.mark.filterwarnings("default:edgeq.check. baselines were not checked")
def test_a_check_notes_a_difference_of_kernels() -> None:
    """It is no failure; and a target whose kernels are broken is one."""
    edgeq = Edgeq(targets={"portable": PORTABLE}, check_targets=("portable:builtin",))
    quantized = edgeq.load(
        make.CONVERTED / "batch_norms.int8.tflite", reference=stacks.build("batch_norms")
    )
    told = r"builtin and portable:builtin: CONV_2D #4( \(\w+\))?, run alone on the same inputs"
    with pytest.warns(UserWarning, match=told):
        edgeq.check(quantized, _samples("batch_norms"))
    edgeq.close()


@pytest.mark.filterwarnings("default:edgeq.check. baselines were not checked")
def test_a_check_fails_on_a_target_that_is_broken(tmp_path: Path) -> None:
    """Its outputs are not those of the file."""
    code = (
        "_get = Interpreter.get_tensor\n"
        "Interpreter.get_tensor = lambda *args: _get(*args)[..., ::-1].copy()"
    )
    command = patched_litert(tmp_path / "bad", code)
    edgeq = Edgeq(targets={"pi": command}, check_targets=("pi",))
    quantized = edgeq.load(
        make.CONVERTED / "batch_norms.int8.tflite", reference=stacks.build("batch_norms")
    )
    with pytest.raises(AssertionError, match="runtimes 'pi' and 'builtin'"):
        edgeq.check(quantized, _samples("batch_norms"))
    edgeq.close()


@pytest.mark.slow
@pytest.mark.parametrize("call", ["compare", "agree"])
def test_ctrl_c_does_not_wait_for_a_target_that_hangs(project: pytest.Pytester, call: str) -> None:
    """The session ends, and with it the target."""
    project.makepyfile(
        test_it=f"""
        import pathlib
        from fixtures.tflite import make, stacks
        from pytest_edgeq import assert_runtimes_agree
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
            if {call!r} == "compare":
                edgeq.compare(quantized, samples(), runtime="pi")
            else:
                assert_runtimes_agree(quantized, samples(), 0, runtimes=("xnnpack", "pi"))
        """
    )
    let_sigint_through()
    session = project.popen(
        [sys.executable, "-m", "pytest", "-p", "no:randomly"],
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


def _older(folder: Path) -> list[str]:
    """Return the command of a local target that says of itself to be of another release."""
    command = patched_litert(folder, "")
    known = folder / "ai_edge_litert-1.9.0.dist-info"
    known.mkdir()
    (known / "METADATA").write_text("Metadata-Version: 2.1\nName: ai-edge-litert\nVersion: 1.9.0\n")
    return command


def test_another_release_is_told(project: pytest.Pytester, tmp_path: Path) -> None:
    """By the last lines, and by what two releases round otherwise."""
    command = _older(tmp_path / "other")
    _write(project, "old", "old")
    result = project.runpytest(
        f"--edgeq-targets=old = {' '.join(command)}", "--edgeq-runtime=old", "--edgeq-update"
    )
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["ran on old: *ai-edge-litert 1.9.0,*; here ai-edge-litert is *"])


@needs_avx2
def test_what_two_releases_round_otherwise_is_told_as_that(tmp_path: Path) -> None:
    """The kernels differ by the release first."""
    command = _older(tmp_path / "other")
    edgeq = Edgeq(targets={"old": ["env", "RUY_PATHS=1", *command]})
    quantized = edgeq.load(make.CONVERTED / "batch_norms.int8.tflite")
    with pytest.raises(
        AssertionError, match=r"kernels of ai-edge-litert .* and ai-edge-litert 1.9"
    ):
        assert_runtimes_agree(
            quantized, _samples("batch_norms"), 0, runtimes=("builtin", "old:builtin")
        )
    edgeq.close()
