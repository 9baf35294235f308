"""Bundles of failed tests: `--edgeq-artifacts` writes them, and failures name them."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

from pytest_edgeq.report.run import read_run
from tests.plugin.test_plugin_report import validated
from tests.projects import ROOT, Project
from tests.report.test_bundle import shown

PROJECT = """
import os
import numpy as np
import pytest
from fixtures.models import ConvBnRelu, samples, seeded
from fixtures.tflite.writer import pack, unpack
from pytest_edgeq import (
    Budget, assert_accuracy_drop, assert_input_dtypes, assert_runtimes_agree, assert_within_budget
)


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


def test_accuracy(quantized):
    given = samples(ConvBnRelu, 6, seed=1)
    pairs = [(sample, quantized.float_model(*sample)) for sample in given]
    assert_accuracy_drop(quantized, pairs, lambda outputs, label: bool((outputs == label).all()))


def test_agreement(edgeq):
    inputs = [np.full((2, 4), value, np.float32) for value in (0.0, 0.5, -0.5, 1.0)]
    loaded = edgeq.load(NESTED)
    assert_runtimes_agree(loaded, inputs, max_lsb_error=0, runtimes=("mine", "builtin"))


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


def test_gone(edgeq, quantized, tmp_path):
    path = tmp_path / "shipped.tflite"
    path.write_bytes(quantized.tflite + bytes(16))
    shipped = edgeq.load(path)
    path.unlink()
    assert shipped.inputs[0].dtype == "float32"


def test_taken(quantized):
    open("out", "w").close()
    assert False


@pytest.mark.parametrize("n", range(6))
def test_n(quantized, n):
    assert not n


NESTED = {nested!r}
""".replace(
    "{nested!r}", repr(str(ROOT / "fixtures/tflite/converted/nested.recipe_static_wi8_ai8.tflite"))
)

CONFTEST = """
import numpy as np
from pytest_edgeq.plugin.state import journal_of
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


def pytest_sessionstart(session):
    global journal
    journal = journal_of(session.config)


def pytest_sessionfinish(session):
    print(f"held in the end: {len(journal.calls)}")
"""

LINE = re.compile(r"^bundle: (\S+)/ \(python reproduce\.py shows the failure\)$", re.MULTILINE)


@pytest.fixture(autouse=True)
def _suite(project: Project) -> None:
    project.write({"test_x": PROJECT, "conftest": CONFTEST})


def chosen(*names: str) -> tuple[str, ...]:
    """Return the options that choose tests and keep bundles."""
    expression = " or ".join(f"test_{name}" for name in names)
    return "--edgeq-artifacts=out", "-p", "no:xdist", "-k", expression


def bundles(folder: Path) -> dict[str, Path]:
    """Return the bundles in a folder by the start of their names."""
    return {path.name.split("-")[1]: path for path in sorted(folder.iterdir())}


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


def test_failures_are_shown_without_pytest(
    project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Failure and record name the bundle; no path and no variable stands in its files."""
    monkeypatch.setenv("EDGEQ_TEST_TOKEN", "hunter2-hunter2-hunter2")
    names = ("budget", "dtypes", "sound", "without", "accuracy", "agreement")
    options = (*chosen(*names), "--edgeq-json=run.json", "--show-capture=no")
    shows = "*held in the end: 0"
    result = project.run(*options, passed=1, failed=5, deselected=11, shows=shows)
    kept = project.path / "out"
    named = {path.split("-")[1]: path for path in LINE.findall(result.stdout.str())}
    found = bundles(kept)
    assert {name: f"out/{path.name}" for name, path in found.items()} == named
    assert found.keys() == {"test_budget", "test_dtypes", "test_accuracy", "test_agreement"}
    recorded = {
        test["failure"]["bundle"]
        for test in validated(project.path / "run.json").tests
        if test["failure"] is not None
    }
    assert recorded == set(named.values())

    elsewhere = tmp_path_factory.mktemp("elsewhere")
    texts = {}
    for name, bundle in found.items():
        status, texts[name] = shown(Path(shutil.copytree(bundle, elsewhere / bundle.name)))
        assert status == 1
    budget = texts["test_budget"]
    assert "sqnr_db: expected at least 30, got " in budget
    assert re.search(r"SQNR dB: (\d\.\d\d) \(recorded: \1\)", budget)
    assert "layer to blame: CONV_2D #1 (conv): the bias's codes: " in budget
    # Nothing was compared: the dtypes of the file are the evidence.
    assert "assert 'int8' == 'float32'" in texts["test_dtypes"]
    dtypes = r"  input args_0: int8 \[1, 3, 16, 16\], scale 0\.0\d+, zero point -\d+\n"
    assert re.search(dtypes, texts["test_dtypes"])
    assert "CONV_2D #1 (conv): int8, int8, int32 -> int8\n" in texts["test_dtypes"]
    # Samples that lost most of their score, with what the float model gives for them.
    assert re.search(r"  samples \d, \d, \d of 6, the worst ones\n", texts["test_accuracy"])
    assert re.search(r"    SQNR dB: \d+\.\d+ \(recorded: ", texts["test_accuracy"])
    # The outputs of both runtimes.
    assert "  expected: outputs of the mine kernels\n" in texts["test_agreement"]
    assert "    max LSB error: 1 (recorded: 1)\n" in texts["test_agreement"]

    bundle = found["test_budget"]
    assert {path.name for path in bundle.iterdir()} == {
        *("bundle.json", "expected.npz", "failure.txt", "got.npz", "model.tflite"),
        "model_2.tflite",  # the fixture `quantized`
        *("model_explorer", "record.json", "reproduce.py", "samples.npz", "simulated.npz"),
    }
    figures = {"dtypes", "local_lsb_error", "local_sqnr_db", "scheme", "verdict"}
    assert {path.stem for path in (bundle / "model_explorer").iterdir()} == figures
    (test,) = validated(bundle / "record.json").tests
    assert test["failure"]["message"].startswith("AssertionError: total, output 'output_0'")
    assert any(event["event"] == "compare" for event in test["events"])

    # Though the failure's text and the test's id hold some.
    folders = (project.path, Path.home(), tempfile.gettempdir(), sys.prefix, ROOT)
    values = [value for value in os.environ.values() if len(value) >= 12]
    # What the test's id and its file are called is no secret.
    values = [value for value in values if not value.startswith("test_x.py")]
    for bundle in found.values():
        for name, content in contents(bundle).items():
            for text in (*map(str, folders), *values):
                assert text.encode() not in content, (name, text)
    message = (found["test_dtypes"] / "failure.txt").read_text("utf-8")
    assert "AssertionError: $EDGEQ_TEST_TOKEN in test_x.py of .\n" in message


@pytest.mark.slow
def test_a_test_that_passes_now_has_no_bundle(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bundle of an earlier run is removed; without the option none is written."""
    options = chosen("budget", "dtypes")
    result = project.run(*options[1:], failed=2, deselected=15, shows="*held in the end: 0")
    assert not LINE.findall(result.stdout.str())
    project.run(*options, failed=2, deselected=15)
    before = bundles(project.path / "out")
    monkeypatch.setenv("SOUND", "1")
    project.run(*options, passed=1, failed=1, deselected=15)
    after = bundles(project.path / "out")
    assert before.keys() - after.keys() == {"test_budget"}
    assert after == {"test_dtypes": before["test_dtypes"]}


def test_failures_of_set_up_and_teardown(project: Project) -> None:
    """One bundle per test has all of its failures; of a deleted file nothing is stored."""
    options = chosen("ready", "both", "plain", "gone")
    gone = "bundle: cannot be written: *shipped.tflite*"
    result = project.run(*options, failed=3, errors=2, deselected=13, shows=gone)
    found = bundles(project.path / "out")
    assert found.keys() == {"test_ready", "test_both", "test_plain_text"}
    assert len(LINE.findall(result.stdout.str())) == 4
    texts = {name: (path / "failure.txt").read_text("utf-8") for name, path in found.items()}
    assert texts["test_ready"].splitlines()[1:] == ["RuntimeError: set-up of ConvBnRelu"]
    assert texts["test_plain_text"].endswith("no traceback\n")
    first, second = texts["test_both"].strip().split("\n\n")
    place = r"test_x.py::test_both failed in its call at test_x.py:\d+\nValueError: call"
    assert re.fullmatch(place, first)
    assert second.endswith("\nRuntimeError: teardown of ConvBnRelu")


@pytest.mark.slow
def test_workers_write_their_bundles(project: Project, warm: str) -> None:
    """Those of pytest-xdist write into one folder at once, and the record names each bundle."""
    options = ("--edgeq-artifacts=out", "--edgeq-json=run.json", "-k", "test_n or dtypes")
    result = project.run("-n", "2", *options, process=warm, passed=1, failed=6)
    named = LINE.findall(result.stdout.str())
    assert len(named) == len(set(named)) == 6
    assert {path.name for path in Path("out").iterdir()} == {Path(name).name for name in named}
    for name in named:
        assert (project.path / name / "model.tflite").is_file()
    tests = read_run(project.path / "run.json").tests
    recorded = {test["failure"]["bundle"] for test in tests if test["failure"] is not None}
    assert recorded == set(named)


def test_a_folder_that_cannot_be_written(project: Project) -> None:
    """It is refused before any test runs; if it disappears later, the failure says so."""
    said = "ini option edgeq_artifacts: expected a folder that can be written, got "
    ini = {"pytest.ini": "[pytest]\nedgeq_artifacts = file.txt/sub\n", "file.txt": ""}
    text = project.refuses(files=ini, shows=said)
    assert re.search(r"^cause: .*file.txt is a file$", text, re.M)
    project.write({"test_x": PROJECT, "pytest.ini": "[pytest]\n"})
    shows = "bundle: cannot be written: *out*"
    project.run(*chosen("taken", "without"), failed=2, deselected=15, shows=shows)
