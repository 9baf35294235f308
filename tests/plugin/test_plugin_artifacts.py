"""Bundles of failed tests: `--edgeq-artifacts` writes them, and failures name them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

from pytest_edgeq.report.run import read_run
from tests.plugin.conftest import Run
from tests.plugin.test_plugin_report import validated

PROJECT = """
import os
import numpy as np
import pytest
from fixtures.models import ConvBnRelu, samples, seeded
from fixtures.tflite.writer import pack, unpack
from pytest_edgeq import Budget, assert_input_dtypes, assert_within_budget


@pytest.fixture(scope="module")
def quantized(edgeq):
    return edgeq.quantize(
        seeded(ConvBnRelu), ConvBnRelu.sample_inputs(), calibration=samples(ConvBnRelu, 8)
    )


@pytest.fixture(scope="module")
def comparison(edgeq, quantized):
    content = quantized.tflite
    if "SOUND" not in os.environ:
        # Another bias in the convolution.
        model = unpack(content)
        graph = model.subgraphs[0]
        op = next(op for op in graph.operators if len(op.inputs) == 3)
        buffer = model.buffers[graph.tensors[op.inputs[2]].buffer]
        buffer.data = (np.asarray(buffer.data, np.uint8).view(np.int32) + 5000).view(np.uint8)
        content = pack(model)
    return edgeq.compare(quantized.with_tflite(content), samples(ConvBnRelu, 6, seed=1))


@pytest.mark.parametrize("name", [__file__ + "/ä b"])
def test_budget(comparison, name):
    assert_within_budget(comparison, Budget(sqnr_db=30)), name


def test_dtypes(quantized):
    secret = os.environ.get("EDGEQ_TEST_TOKEN")
    assert quantized.inputs[0].dtype == "float32", f"{secret} in {__file__} of {os.getcwd()}"


def test_sound(edgeq, quantized):
    edgeq.compare(quantized, samples(ConvBnRelu, 6, seed=1))


def test_without_a_model():
    assert False
"""

ONE_STEP_UP = """
import numpy as np
from pytest_edgeq.runtimes.edge import EdgeFile


def one_step_up(path, signature):
    edge = EdgeFile(path)
    names = [border.name for border in edge.signature.outputs]

    def run(inputs):
        outputs = edge.runner("builtin").run(inputs)
        return dict(zip(names, [np.clip(each, -128, 126) + np.int8(1) for each in outputs]))

    return run


def pytest_edgeq_runtimes(config):
    return {"mine": one_step_up}
"""

LINE = re.compile(r"^bundle: (\S+)/ \(python reproduce\.py shows the failure\)$", re.MULTILINE)


def bundles(folder: Path) -> dict[str, Path]:
    """Return the bundles in a folder by the start of their names."""
    return {path.name.split("-")[1]: path for path in sorted(folder.iterdir())}


def shown_elsewhere(bundle: Path, elsewhere: Path) -> str:
    """Run the script of a copy of a bundle, by itself and without environment; give its text."""
    copy = Path(shutil.copytree(bundle, elsewhere / "copy"))
    done = subprocess.run(
        [sys.executable, "-I", str(copy / "reproduce.py")],
        capture_output=True,
        encoding="utf-8",
        env={"PATH": os.environ["PATH"]},
        cwd=elsewhere,
        check=False,
        timeout=100,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def contents(bundle: Path) -> dict[str, bytes]:
    """Return the content of every file of a bundle, those inside of archives, too."""
    found = {}
    for path in bundle.rglob("*"):
        if path.suffix == ".npz":
            with zipfile.ZipFile(path) as archive:
                for info in archive.infolist():
                    found[f"{path.name}/{info.filename}"] = archive.read(info) + info.extra
        elif path.is_file():
            found[path.name] = path.read_bytes()
    return found


def test_a_failed_budget_is_shown_without_pytest(
    pytester: pytest.Pytester, run_here: Run, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The comparison came from a fixture; the failure and the record name the bundle."""
    pytester.makepyfile(test_x=PROJECT)
    options = ("--edgeq-artifacts=out/kept", "--edgeq-json=run.json", "--show-capture=no")
    result = run_here(*options, "-p", "no:xdist", "-k", "budget")
    result.assert_outcomes(failed=1, deselected=3)
    (named,) = LINE.findall(result.stdout.str())
    bundle = pytester.path / named
    assert bundle.parent == pytester.path / "out" / "kept"
    (test,) = validated(pytester.path / "run.json").tests
    assert test["failure"]["bundle"] == named
    assert {path.name for path in bundle.iterdir()} == {
        "bundle.json",
        "expected.npz",
        "failure.txt",
        "got.npz",
        "model.tflite",
        "model_2.tflite",  # the fixture `quantized`
        "model_explorer",
        "record.json",
        "reproduce.py",
        "samples.npz",
        "simulated.npz",
    }
    assert {path.stem for path in (bundle / "model_explorer").iterdir()} == {
        "dtypes",
        "local_lsb_error",
        "local_sqnr_db",
        "scheme",
        "verdict",
    }
    text = shown_elsewhere(bundle, tmp_path_factory.mktemp("elsewhere"))
    assert "sqnr_db: expected at least 30, got " in text
    assert re.search(r"SQNR dB: (\d\.\d\d) \(recorded: \1\)", text)
    assert "layer to blame: CONV_2D #1 (conv): the bias's codes: " in text

    record = validated(bundle / "record.json")
    (test,) = record.tests
    assert test["failure"]["message"].startswith("AssertionError: total, output 'output_0'")
    assert test["models"] == list(record.models)
    assert any(event["event"] == "compare" for event in test["events"])


def test_a_bundle_holds_no_path_and_no_environment(
    pytester: pytest.Pytester, run_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the failure's text and the test's id hold some."""
    monkeypatch.setenv("EDGEQ_TEST_TOKEN", "hunter2-hunter2-hunter2")
    pytester.makepyfile(test_x=PROJECT)
    run_here("--edgeq-artifacts=out", "-p", "no:xdist").assert_outcomes(passed=1, failed=3)
    found = bundles(pytester.path / "out")
    assert len(found) == 2
    folders = (
        pytester.path,
        Path.home(),
        tempfile.gettempdir(),
        sys.prefix,
        Path(__file__).parents[2],
    )
    values = [value for value in os.environ.values() if len(value) >= 12]
    # What the test's id and its file are called is no secret.
    values = [value for value in values if not value.startswith("test_x.py")]
    for bundle in found.values():
        texts = contents(bundle)
        for name, content in texts.items():
            for text in (*map(str, folders), *values):
                assert text.encode() not in content, (name, text)
    message = (found["test_dtypes"] / "failure.txt").read_text("utf-8")
    assert "AssertionError: $EDGEQ_TEST_TOKEN in test_x.py of .\n" in message


def test_a_failed_dtype_is_shown_by_the_file(
    pytester: pytest.Pytester, run_here: Run, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A test that compared nothing has no samples: the dtypes of the file are its evidence."""
    pytester.makeini("[pytest]\nedgeq_artifacts = out\n")
    pytester.makepyfile(test_x=PROJECT)
    result = run_here("-p", "no:xdist", "-k", "dtypes or without or sound")
    result.assert_outcomes(passed=1, failed=2, deselected=1)
    (named,) = LINE.findall(result.stdout.str())
    assert [path.name for path in (pytester.path / "out").iterdir()] == [Path(named).name]
    text = shown_elsewhere(pytester.path / named, tmp_path_factory.mktemp("elsewhere"))
    assert "assert 'int8' == 'float32'" in text
    assert re.search(
        r"  input args_0: int8 \[1, 3, 16, 16\], scale 0\.0\d+, zero point -\d+\n", text
    )
    assert "CONV_2D #1 (conv): int8, int8, int32 -> int8\n" in text


def test_a_failed_agreement_is_shown_by_its_samples(
    pytester: pytest.Pytester, run_here: Run, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Nothing was compared with a reference: the outputs of both runtimes are the evidence."""
    pytester.makeconftest(ONE_STEP_UP)
    file = (
        Path(__file__).parents[2] / "fixtures/tflite/converted/nested.recipe_static_wi8_ai8.tflite"
    )
    pytester.makepyfile(
        test_x=f"""
        import numpy as np
        from pytest_edgeq import assert_runtimes_agree

        def test_agreement(edgeq):
            samples = [np.full((2, 4), value, np.float32) for value in (0.0, 0.5, -0.5, 1.0)]
            loaded = edgeq.load({str(file)!r})
            assert_runtimes_agree(loaded, samples, max_lsb_error=0, runtimes=("mine", "builtin"))
        """
    )
    result = run_here("--edgeq-artifacts=out", "-p", "no:xdist")
    result.assert_outcomes(failed=1)
    (named,) = LINE.findall(result.stdout.str())
    text = shown_elsewhere(pytester.path / named, tmp_path_factory.mktemp("elsewhere"))
    assert "  expected: what the mine kernels gave\n" in text
    assert "    max LSB error: 1 (recorded: 1)\n" in text


def test_a_lost_accuracy_is_shown_by_its_samples(
    pytester: pytest.Pytester, run_here: Run, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Those that lost most of their score, with what the float model gives for them."""
    pytester.makepyfile(
        test_x=f"""{PROJECT}
def test_accuracy(quantized):
    from pytest_edgeq import assert_accuracy_drop
    given = samples(ConvBnRelu, 6, seed=1)
    pairs = [(sample, quantized.float_model(*sample)) for sample in given]
    assert_accuracy_drop(quantized, pairs, lambda outputs, label: bool((outputs == label).all()))
"""
    )
    result = run_here("--edgeq-artifacts=out", "-p", "no:xdist", "-k", "test_accuracy")
    result.assert_outcomes(failed=1, deselected=4)
    (named,) = LINE.findall(result.stdout.str())
    text = shown_elsewhere(pytester.path / named, tmp_path_factory.mktemp("elsewhere"))
    assert re.search(r"  samples \d, \d, \d of 6, the worst ones\n", text)
    assert re.search(r"    SQNR dB: \d+\.\d+ \(recorded: ", text)


def test_a_test_that_passes_now_has_no_bundle(
    pytester: pytest.Pytester, run_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of an earlier run would tell of a failure that is no more."""
    pytester.makepyfile(test_x=PROJECT)
    options = ("--edgeq-artifacts=out", "-p", "no:xdist", "-k", "budget or dtypes")
    run_here(*options).assert_outcomes(failed=2, deselected=2)
    before = bundles(pytester.path / "out")
    monkeypatch.setenv("SOUND", "1")
    run_here(*options).assert_outcomes(passed=1, failed=1, deselected=2)
    after = bundles(pytester.path / "out")
    assert before.keys() - after.keys() == {"test_budget"}
    assert after == {"test_dtypes": before["test_dtypes"]}


def test_nothing_is_kept_of_a_run_without_the_option(
    pytester: pytest.Pytester, run_here: Run
) -> None:
    """No folder, no line, and no call is held longer than its report."""
    pytester.makepyfile(test_x=PROJECT)
    pytester.makeconftest(
        """
        import pytest
        from pytest_edgeq.plugin.state import journal_key

        @pytest.hookimpl(trylast=True)
        def pytest_runtest_logfinish(nodeid):
            print(f"held after {nodeid.partition('::')[2][:9]}: {len(journal.calls)}")

        def pytest_sessionstart(session):
            global journal
            journal = session.config.stash[journal_key]
        """
    )
    for option in ((), ("--edgeq-artifacts=out",)):
        result = run_here("-s", "-p", "no:xdist", "-k", "sound or dtypes", *option)
        result.assert_outcomes(passed=1, failed=1, deselected=2)
        assert bool(LINE.findall(result.stdout.str())) == bool(option)
        held = [line for line in result.stdout.lines if "held after" in line]
        assert [line.rpartition("held")[2] for line in held] == [
            " after test_dtyp: 0",
            " after test_soun: 0",
        ]


def test_failures_of_set_up_and_teardown(pytester: pytest.Pytester, run_here: Run) -> None:
    """One bundle a test tells all of its failures."""
    body = """

@pytest.fixture
def broken(quantized):
    yield
    raise RuntimeError("teardown of " + quantized.name)


@pytest.fixture
def unready(quantized):
    raise RuntimeError("set-up of " + quantized.name)


def test_ready(unready):
    pass


def test_both(broken):
    raise ValueError("call")


def test_plain_text(quantized):
    pytest.fail("no traceback", pytrace=False)
"""
    pytester.makepyfile(test_x=PROJECT + body)
    result = run_here("--edgeq-artifacts=out", "-p", "no:xdist", "-k", "ready or both or plain")
    result.assert_outcomes(failed=2, errors=2, deselected=4)
    found = bundles(pytester.path / "out")
    assert found.keys() == {"test_ready", "test_both", "test_plain_text"}
    assert len(LINE.findall(result.stdout.str())) == 4
    texts = {name: (path / "failure.txt").read_text("utf-8") for name, path in found.items()}
    assert texts["test_ready"].splitlines()[1:] == ["RuntimeError: set-up of ConvBnRelu"]
    assert texts["test_plain_text"].endswith("no traceback\n")
    first, second = texts["test_both"].strip().split("\n\n")
    assert re.fullmatch(
        r"test_x.py::test_both failed in its call at test_x.py:\d+\nValueError: call", first
    )
    assert second.endswith("\nRuntimeError: teardown of ConvBnRelu")


@pytest.mark.slow
def test_workers_write_their_bundles(pytester: pytest.Pytester) -> None:
    """Those of pytest-xdist write into one folder at once, and the record names each bundle."""
    body = (
        "\n\n@pytest.mark.parametrize('n', range(6))\ndef test_n(quantized, n):\n    assert not n\n"
    )
    pytester.makepyfile(test_x=PROJECT + body)
    result = pytester.runpytest_subprocess(
        "-n", "2", "--edgeq-artifacts=out", "--edgeq-json=run.json"
    )
    result.assert_outcomes(passed=2, failed=8)
    named = LINE.findall(result.stdout.str())
    assert len(named) == len(set(named)) == 7
    assert {path.name for path in Path("out").iterdir()} == {Path(name).name for name in named}
    for name in named:
        assert (pytester.path / name / "model.tflite").is_file()
    tests = read_run(pytester.path / "run.json").tests
    recorded = {test["failure"]["bundle"] for test in tests if test["failure"] is not None}
    assert recorded == set(named)


@pytest.mark.parametrize("where", ["flag", "ini"])
def test_a_folder_that_cannot_be_written(
    pytester: pytest.Pytester, run_here: Run, where: str
) -> None:
    """Is told before any test runs."""
    pytester.makefile(".txt", file="")
    pytester.makepyfile("def test_plain(): pass")
    if where == "ini":
        pytester.makeini("[pytest]\nedgeq_artifacts = file.txt/sub\n")
    option = ["--edgeq-artifacts=file.txt/sub"] if where == "flag" else []
    result = run_here(*option, "-p", "no:xdist")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    told = "--edgeq-artifacts" if where == "flag" else "ini option edgeq_artifacts"
    result.stderr.re_match_lines(
        [
            rf"ERROR: {told}: expected a folder that can be written, got .*sub",
            r"cause: .*file.txt is a file",
        ]
    )


def test_a_folder_that_is_taken_away(pytester: pytest.Pytester, run_here: Run) -> None:
    """The failure says that there is no bundle, and why; the run goes on."""
    body = "\n\ndef test_taken(quantized):\n    open('out', 'w').close()\n    assert False\n"
    pytester.makepyfile(test_x=PROJECT + body)
    result = run_here("--edgeq-artifacts=out", "-p", "no:xdist", "-k", "test_taken or without")
    result.assert_outcomes(failed=2, deselected=3)
    result.stdout.re_match_lines([r"bundle: cannot be written: .*out.*"])


def test_a_model_whose_file_is_gone(pytester: pytest.Pytester, run_here: Run) -> None:
    """Nothing can be kept of it, which the failure says."""
    body = """

def test_gone(edgeq, quantized, tmp_path):
    path = tmp_path / "shipped.tflite"
    path.write_bytes(quantized.tflite + bytes(16))
    shipped = edgeq.load(path)
    path.unlink()
    assert shipped.inputs[0].dtype == "float32"
"""
    pytester.makepyfile(test_x=PROJECT + body)
    result = run_here("--edgeq-artifacts=out", "-p", "no:xdist", "-k", "test_gone")
    result.assert_outcomes(failed=1, deselected=4)
    result.stdout.re_match_lines([r"bundle: cannot be written: .*shipped.tflite.*"])
    assert not list((pytester.path / "out").iterdir())
