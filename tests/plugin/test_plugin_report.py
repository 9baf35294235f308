"""The record of a run: booked on the reports of tests, and shown in every form."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest

from fixtures.tflite.make import CONVERTED
from pytest_edgeq.report import run as run_module
from pytest_edgeq.report.run import Run as Record
from pytest_edgeq.report.run import RunRecorder, read_run
from tests.projects import Project

SCHEMA = json.loads(Path(run_module.__file__).with_name("run.schema.json").read_text("utf-8"))

PROJECT = """
import os
import pytest
from fixtures.models import ConvBnRelu, samples, seeded
from pytest_edgeq import assert_input_dtypes, assert_op_dtypes


@pytest.fixture(scope="module")
def quantized(edgeq):
    return edgeq.quantize(
        seeded(ConvBnRelu), ConvBnRelu.sample_inputs(), calibration=samples(ConvBnRelu, 8)
    )


def test_compare(edgeq, quantized):
    edgeq.compare(quantized, samples(ConvBnRelu, 4, seed=1))


def test_dtypes(quantized):
    assert_input_dtypes(quantized, os.environ.get("DTYPE", "int8"))


def test_localize(edgeq, quantized):
    edgeq.localize(quantized, samples(ConvBnRelu, 1, seed=1))


def test_op(quantized):
    assert_op_dtypes(quantized, "CONV_2D", input=["int16"] * 30)


def test_without_a_model():
    pass


def test_crash(quantized):
    os._exit(3)
"""

FOUR = ("-k", "not op and not crash", "-p", "no:xdist")


def validated(path: Path) -> Record:
    """Read a record, and validate it by the schema."""
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(path.read_text("utf-8")))
    return read_run(path)


def events(record: Record) -> dict[str, list[str]]:
    """Return the events of each test."""
    return {
        test["test"].partition("::")[2]: [event["event"] for event in test["events"]]
        for test in record.tests
    }


@pytest.mark.slow
def test_a_run_in_every_form(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed assertion fails its model; a module's fixture belongs to the first test."""
    monkeypatch.setenv("DTYPE", "float32")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "summary.md")
    out = project.path / "out"
    result = project.run(
        *(*FOUR, "--edgeq-json=out/run.json", "--edgeq-markdown=out/page.md"),
        "--junit-xml=out/junit.xml",
        files={
            "test_x": PROJECT,
            "pytest.ini": "[pytest]\nedgeq_html = out/report.html\n",
            "summary.md": "before\n",
        },
        passed=3,
        failed=1,
        deselected=2,
        hides="::error*",
    )

    record = validated(out / "run.json")
    assert events(record) == {
        "test_compare": ["quantize", "compare"],
        "test_dtypes": [],
        "test_localize": ["localize"],
    }
    (key,) = record.models
    assert [test["models"] for test in record.tests] == [[key]] * 3
    model = record.models[key]
    made = (model["name"], model["flow"], model["quantizer"])
    assert made == ("ConvBnRelu", "pt2e", "pt2e_static_int8")
    assert {op["scheme"] for op in model["ops"]} == {"int8"}
    ((_, comparison),) = record.measured(key, "comparison")
    assert comparison["stages"]["total"]["n_samples"] == 4
    (points,) = comparison["points"].values()
    assert points.keys() == {"float", "simulated", "edge"}
    assert len({len(values) for values in points.values()}) == 1
    picture = comparison["worst_samples"][0]["pictures"]["0"]
    assert (picture["height"], picture["channels"]) == (model["inputs"][0]["shape"][2], 3)
    ((_, localized),) = record.measured(key, "layers")
    assert len(localized["rows"]) == len(model["ops"])
    (failed,) = [test for test in record.tests if test["outcome"] == "failed"]
    assert (failed["test"], failed["failure"]["path"]) == ("test_x.py::test_dtypes", "test_x.py")
    assert "expected float32, got int8" in failed["failure"]["message"].splitlines()[0]

    html = (out / "report.html").read_text("utf-8")
    assert "<title>1 of 1 models failed" in html
    assert "expected float32, got int8" in html
    # Stages, layers, the histogram and the scatter chart of the output.
    assert html.count("data-chart=") == 4
    assert html.count('src="data:image/png;base64,') == 3

    page = (out / "page.md").read_text("utf-8")
    assert page.startswith("## pytest-edgeq: 1 of 1 model failed, in 1 of 3 tests\n")
    assert "\n| ConvBnRelu | pt2e\\_static\\_int8 | " in page
    assert "### ❌ test\\_x.py::test\\_dtypes" in page
    assert (project.path / "summary.md").read_text("utf-8") == "before\n" + page

    found = {
        case.get("name"): {each.get("name"): each.get("value") for each in case.iter("property")}
        for case in ElementTree.parse(out / "junit.xml").iter("testcase")
    }
    name = "edgeq.ConvBnRelu[pt2e_static_int8]"
    assert float(found["test_compare"][f"{name}.total.sqnr_db"] or "nan") > 30
    assert found["test_compare"][f"{name}.float_ops"] == "0"
    assert found["test_dtypes"] == {}

    lines = result.stdout.lines
    start = next(i for i, line in enumerate(lines) if re.fullmatch("=+ edgeq =+", line))
    heading, row = lines[start + 1 : start + 3]
    columns = ["model", "quantizer", "KB", "share", "float ops", "SQNR dB", "quant."]
    assert re.split(r"\s{2,}", heading)[:7] == columns
    figures = r"\d+\.\d +\d+ % +0/\d+( +\d+\.\d){3} .*failed 1/3 "
    assert re.match(rf"ConvBnRelu  pt2e_static_int8 +{figures}", row)
    assert max(map(len, lines[start:])) <= 120


PLAN = """
from pytest_edgeq import Edgeq
from tests.quantize.mixed import nets


def test_plan(edgeq):
    quantized = nets.quantized_digits(edgeq)
    edgeq.sensitivity(quantized, nets.held_out(4))
    budget = nets.budget_of_two_layers(Edgeq(), quantized)  # not booked on this test
    edgeq.suggest_mixed_precision(quantized, nets.held_out(), budget)
"""


@pytest.mark.slow
def test_a_plan_is_recorded_and_drawn(project: Project) -> None:
    """With the sensitivities of the call, which measured other samples than the plan."""
    project.run("--edgeq-json=run.json", "--edgeq-html=page.html", files=PLAN, passed=1)

    record = validated(project.path / "run.json")
    assert events(record) == {"test_plan": ["quantize", "sensitivity", "suggest"]}
    (key,) = record.models
    ((_, measured),) = record.measured(key, "sensitivity")
    ((_, plan),) = record.measured(key, "plan")
    rows = measured["rows"]
    assert {row["module"] for row in rows} == {"conv1", "conv2", "fc"}
    assert plan["is_met"]
    assert {layer["module"] for layer in plan["layers"]} == {"conv1", "fc"}

    page = unescape((project.path / "page.html").read_text("utf-8"))
    # Bars of the layers, and the curve of the search.
    assert page.count("data-chart=") == 2
    assert ", over 4 samples, in test_x.py::test_plan." in page
    assert f"<p>The plan {plan['summary']}." in page
    assert f">{plan['code']}</pre>" in page


def test_a_record_begins_with_the_run(project: Project) -> None:
    """Before the collection, and long before the first report."""
    slow = "import time\ntime.sleep(0.9)\ndef test_it(): pass\n"
    project.run("--edgeq-json=run.json", files=slow, passed=1)
    assert validated(project.path / "run.json").data["seconds"] >= 0.9


def test_quiet_runs_and_runs_without_a_model(project: Project) -> None:
    """`-q` leaves the table out; a later step finds a record, also of a run that failed."""
    project.run("-q", *FOUR, files=PROJECT, passed=4, deselected=2, hides="ConvBnRelu *passed*")
    project.run("--edgeq-json=run.json", files="def test_it(): pass\n", hides="=* edgeq =*")
    record = validated(project.path / "run.json")
    assert (record.models, record.tests) == ({}, [])
    project.run("--edgeq-json=run.json", files="import gone\n", ret=2)
    assert validated(project.path / "run.json").tests == []
    project.run("--edgeq-json=other.json", "--collect-only", files="def test_it(): pass\n", ret=0)
    assert not (project.path / "other.json").exists()


# Three runs in processes of their own, two of them with workers.
@pytest.mark.timeout(400)
@pytest.mark.slow
def test_workers_give_the_same_record_and_a_crash_loses_its_own_test_alone(
    project: Project, warm: str
) -> None:
    """Apart from times, and from who made the model; a crash is a failure of its test."""
    found = []
    options = ("--dist=loadfile", "--edgeq-json=run.json", "-k", "not crash")
    for number in ("0", "2"):
        project.run("-n", number, *options, files=PROJECT, process=warm)
        record = validated(project.path / "run.json")
        found.append((events(record), record.models))
    assert found[0] == found[1]
    crash = ("-n", "1", "--max-worker-restart=0", "--edgeq-json=run.json", "-k", "compare or crash")
    project.run(*crash, process=warm)
    record = validated(project.path / "run.json")
    assert events(record)["test_compare"] == ["quantize", "compare"]
    crashed = [test["test"] for test in record.tests if test["failure"] is not None]
    assert crashed == ["test_x.py::test_crash"]


def test_a_test_that_is_run_again_keeps_what_its_wider_fixtures_did() -> None:
    """A fixture of the module is set up once; what is set up again is not recorded twice."""

    def booked(*kinds: str) -> Any:
        made = [{"event": kind, "model": "net-0", "steps": []} for kind in kinds]
        return {"models": {"net-0": {}}, "events": made}

    recorder = RunRecorder()
    for set_up, outcome in ((("quantize", "quantize", "load"), "rerun"), (("quantize",), "passed")):
        for when, kinds in (("setup", set_up), ("call", ["compare"]), ("teardown", [])):
            report = pytest.TestReport("a.py::test", ("", 0, ""), {}, "passed", None, when)  # type: ignore[arg-type]
            report.outcome = outcome if when == "call" else "passed"  # type: ignore[assignment]
            report.__dict__["edgeq_journal"] = booked(*kinds)
            recorder.add(report, "", Path())
    (test,) = recorder.run().tests
    assert [each["event"] for each in test["events"]] == ["quantize", "load", "quantize", "compare"]
    assert test["outcome"] == "passed"


def test_a_file_that_cannot_be_written_fails_the_run(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests passed, but a later step would read what is not there; also where none ran."""
    shows = ["=* edgeq =*", "Error: --edgeq-json: *run.json could not be written: *"]
    options = ("--edgeq-json=taken.txt/run.json", "--edgeq-markdown=page.md")
    files = {"taken.txt": "", "test_x": "def test_it(): pass\n"}
    project.run(*options, files=files, ret=1, passed=1, shows=shows)
    assert (project.path / "page.md").exists()
    project.run(*options, files="import gone\n", shows=shows)
    # As in a container to which the variables of a runner are passed.
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "no/folder/summary.md")
    file = str(CONVERTED / "equal_weights.int8.tflite")
    warning = "Warning: GITHUB_STEP_SUMMARY: no/folder/summary.md could not be written: No such *"
    project.run(files=f"def test_it(edgeq): edgeq.load({file!r})", ret=0, shows=warning)


def test_a_failed_assertion_is_a_finding_in_every_format(project: Project) -> None:
    """Its headline is whole, however long it is."""
    formats = ("--edgeq-markdown=page.md", "--edgeq-json=run.json", "--edgeq-html=page.html")
    chosen = ("-p", "no:xdist", "-k", "test_op")
    result = project.run(*formats, *chosen, files=PROJECT, failed=1, deselected=5)
    (test,) = validated(project.path / "run.json").tests
    (found,) = test["failure"]["records"]
    expected = ", ".join(["int16"] * 30)
    said = (found["kind"], found["expected"], found["got"])
    assert said == ("unexpected_dtype", expected, "int8")
    place = found["place"]
    assert (place["kind"], place["name"]) == ("op", "CONV_2D")
    at = f"CONV_2D #{place['op']} ({place['module']})"
    headline = f"{at} input: expected {expected}, got int8 (1 of 1 CONV_2D)"
    page = (project.path / "page.md").read_text("utf-8").replace("\\", "")
    assert f"\n\n{headline}\n\n- cause: {found['causes'][0]}\n- update: " in page
    assert headline in (project.path / "page.html").read_text("utf-8")
    assert headline in result.stdout.str()


BEFORE_A_MODEL = """
import pytest, unittest
from pytest_edgeq import assert_no_float_ops

@pytest.fixture(scope="module")
def loaded(edgeq): return edgeq.load("gone.tflite")

def test_file(loaded): pass
def test_same_file(loaded): pass
def test_argument(edgeq): edgeq.quantize("net", ())
def test_path(): assert_no_float_ops("gone.tflite")
def test_own_code(edgeq): open("weights.pt")
def test_elsewhere(): assert False

class Test(unittest.TestCase):
    def test_unit(self): assert_no_float_ops("gone.tflite")
"""


def test_failures_before_a_model_is_made_are_in_every_format(project: Project) -> None:
    """Otherwise a run of which no model could be made would pass its views."""
    options = ("-p", "no:xdist", "--edgeq-json=run.json", "--edgeq-markdown=page.md")
    project.run(*options, files=BEFORE_A_MODEL, failed=5, errors=2)
    tests = validated(project.path / "run.json").tests
    failed = [test["test"].rpartition("::test_")[2] for test in tests]
    assert failed == ["file", "same_file", "argument", "path", "own_code", "unit"]
    assert {test["failure"]["path"] for test in tests} == {"test_x.py"}
    page = (project.path / "page.md").read_text("utf-8")
    assert page.startswith("## pytest-edgeq: 6 of 6 tests failed without a model\n")


def test_failures_are_annotated_on_github(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One command a failed test, with the file below the checkout and the line."""
    folder = project.path / "project"
    monkeypatch.setenv("DTYPE", "float32")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(project.path))
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    options = ("-p", "no:xdist", f"--rootdir={folder}", str(folder), "-k", "dtypes", "--tb=native")
    result = project.run(*options, files={"project/test_x": PROJECT})
    (line,) = [each for each in result.stdout.lines if each.startswith("::error")]
    assert re.match(
        r"::error file=project/test_x\.py,line=\d+,title=test_x\.py%3A%3Atest_dtypes::"
        r"input '.*': expected float32, got int8 \(1 of 1 inputs\)%0Acause: .*%0Aupdate: .*$",
        line,
    )
