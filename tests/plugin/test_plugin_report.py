"""The record of a run: booked on the reports of tests, written as JSON and HTML, and as a table."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest

from pytest_edgeq.report import run as run_module
from pytest_edgeq.report.run import PhaseReport, RunRecorder, read_run
from pytest_edgeq.report.run import Run as Record
from tests.plugin.conftest import Run

SCHEMA = json.loads(Path(run_module.__file__).with_name("run.schema.json").read_text("utf-8"))

PROJECT = """
import os
import pytest
from fixtures.models import ConvBnRelu, samples, seeded
from pytest_edgeq import assert_input_dtypes


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


def test_without_a_model():
    pass
"""


def validated(path: Path) -> Record:
    """Read a record, and hold it to the schema."""
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(path.read_text("utf-8")))
    return read_run(path)


def events(record: Record) -> dict[str, list[str]]:
    """Return what each test did."""
    return {
        test["test"].partition("::")[2]: [event["event"] for event in test["events"]]
        for test in record.tests
    }


def test_every_call_is_in_the_record(pytester: pytest.Pytester, run_here: Run) -> None:
    """What a module's fixture does is booked on the first test; a test without a model is not."""
    pytester.makepyfile(test_x=PROJECT)
    run_here("--edgeq-json=out/run.json", "-p", "no:xdist").assert_outcomes(passed=4)
    record = validated(pytester.path / "out" / "run.json")
    assert events(record) == {
        "test_compare": ["quantize", "compare"],
        "test_dtypes": [],
        "test_localize": ["localize"],
    }
    (key,) = record.models
    assert [test["models"] for test in record.tests] == [[key]] * 3
    model = record.models[key]
    assert (model["name"], model["flow"], model["quantizer"]) == (
        "ConvBnRelu",
        "pt2e",
        "pt2e_static_int8",
    )
    assert {op["scheme"] for op in model["ops"]} == {"int8"}
    (compared,) = record.events_of(key, "compare")
    comparison = compared["comparison"]
    assert comparison["stages"]["total"]["n_samples"] == 4
    (points,) = comparison["points"].values()
    assert points.keys() == {"float", "simulated", "edge"}
    assert len({len(values) for values in points.values()}) == 1
    picture = comparison["worst_samples"][0]["pictures"]["0"]
    assert (picture["height"], picture["channels"]) == (model["inputs"][0]["shape"][2], 3)
    (localized,) = record.events_of(key, "localize")
    assert len(localized["layers"]["rows"]) == len(model["ops"])


def test_the_page_shows_what_the_run_measured(
    pytester: pytest.Pytester, run_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its points and pictures, too, without a record as JSON beside it."""
    pytester.makepyfile(test_x=PROJECT)
    pytester.makeini("[pytest]\nedgeq_html = out/report.html\n")
    monkeypatch.setenv("DTYPE", "float32")
    run_here("-p", "no:xdist").assert_outcomes(passed=3, failed=1)
    page = (pytester.path / "out" / "report.html").read_text("utf-8")
    assert "<title>1 of 1 models failed" in page
    assert "expected float32, got int8" in page
    # Stages, layers, the histogram and the scatter chart of the output.
    assert page.count("data-chart=") == 4
    assert page.count('src="data:image/png;base64,') == 3
    assert [path.name for path in (pytester.path / "out").iterdir()] == ["report.html"]


def test_a_failed_test_fails_its_model(
    pytester: pytest.Pytester, run_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though only an assertion failed, which is no call of `edgeq`."""
    pytester.makepyfile(test_x=PROJECT)
    monkeypatch.setenv("DTYPE", "float32")
    result = run_here("--edgeq-json=run.json", "-p", "no:xdist")
    result.assert_outcomes(passed=3, failed=1)
    (failed,) = [
        test for test in validated(pytester.path / "run.json").tests if test["outcome"] == "failed"
    ]
    assert failed["test"] == "test_x.py::test_dtypes"
    assert failed["failure"]["path"] == "test_x.py"
    assert "expected float32, got int8" in failed["failure"]["message"].splitlines()[0]
    result.stdout.re_match_lines([r"ConvBnRelu  pt2e_static_int8 .* failed 1/3 "])


def test_the_table_ends_a_run(pytester: pytest.Pytester, run_here: Run) -> None:
    """Models with sizes, ops, SQNR by stage and the verdict; `-q` leaves it out."""
    pytester.makepyfile(test_x=PROJECT)
    result = run_here("-p", "no:xdist")
    lines = result.stdout.lines
    start = next(i for i, line in enumerate(lines) if re.fullmatch("=+ edgeq =+", line))
    heading, row = lines[start + 1 : start + 3]
    assert re.split(r"\s{2,}", heading)[:7] == [
        "model",
        "quantizer",
        "KB",
        "share",
        "float ops",
        "SQNR dB",
        "quant.",
    ]
    assert re.match(
        r"ConvBnRelu  pt2e_static_int8 +\d+\.\d +\d+ % +0/\d+( +\d+\.\d){3} .*passed +\d", row
    )
    assert max(map(len, lines[start:])) <= 120
    run_here("-q", "-p", "no:xdist").stdout.no_re_match_line("ConvBnRelu .*passed")


def test_no_model_no_table(pytester: pytest.Pytester, run_here: Run) -> None:
    """Nothing is printed in a run without models, and its record is empty."""
    pytester.makepyfile(test_x="def test_it():\n    pass\n")
    result = run_here("--edgeq-json=run.json", "-p", "no:xdist")
    result.stdout.no_re_match_line("=+ edgeq =+")
    record = validated(pytester.path / "run.json")
    assert (record.models, record.tests) == ({}, [])


def test_a_record_is_written_where_nothing_could_be_collected(
    pytester: pytest.Pytester, run_here: Run
) -> None:
    """A later step finds a file, which says that no test ran."""
    pytester.makepyfile(test_x="import gone\n")
    assert run_here("--edgeq-json=run.json", "-p", "no:xdist").ret == 2
    assert validated(pytester.path / "run.json").tests == []


@pytest.mark.slow
def test_two_workers_give_the_same_record(pytester: pytest.Pytester, run_here: Run) -> None:
    """Apart from times, and from who made the model."""
    pytester.makepyfile(test_x=PROJECT)
    found = []
    for number in ("0", "2"):
        pytester.runpytest_subprocess("-n", number, "--dist=loadfile", "--edgeq-json=run.json")
        record = validated(pytester.path / "run.json")
        found.append((events(record), plain(record.models)))
    assert found[0] == found[1]


def test_a_test_that_is_run_again_keeps_what_its_wider_fixtures_did() -> None:
    """A fixture of the module is set up once; what is set up again is not recorded twice."""

    def booked(*kinds: str) -> Any:
        made = [{"event": kind, "model": "net-0", "steps": []} for kind in kinds]
        return {"models": {"net-0": {}}, "events": made}

    recorder = RunRecorder()
    for set_up, outcome in ((("quantize", "quantize", "load"), "rerun"), (("quantize",), "passed")):
        recorder.add(PhaseReport("a.py::test", "", "setup", "passed", 1, booked(*set_up)))
        recorder.add(PhaseReport("a.py::test", "", "call", outcome, 1, booked("compare")))
        recorder.add(PhaseReport("a.py::test", "", "teardown", "passed", 1))
    (test,) = recorder.run(obsolete=(), pruned=()).tests
    assert [event["event"] for event in test["events"]] == [
        "quantize",
        "load",
        "quantize",
        "compare",
    ]
    assert test["outcome"] == "passed"


def plain(models: Any) -> Any:
    """Return models without what nothing depends on."""
    return json.loads(json.dumps(models))


@pytest.mark.slow
def test_a_crashed_worker_loses_its_own_test_alone(pytester: pytest.Pytester) -> None:
    """What the tests before it did is in the record, and the crash is a failure of its test."""
    body = "\n\ndef test_crash(quantized):\n    os._exit(3)\n"
    pytester.makepyfile(test_x=PROJECT + body)
    pytester.runpytest_subprocess("-n", "1", "--max-worker-restart=0", "--edgeq-json=run.json")
    record = validated(pytester.path / "run.json")
    assert events(record)["test_compare"] == ["quantize", "compare"]
    crashed = [test["test"] for test in record.tests if test["failure"] is not None]
    assert crashed == ["test_x.py::test_crash"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "expected the JSON of --edgeq-json, got "),
        ("{}", 'there is no "format": "pytest-edgeq run"'),
        ('{"format": "pytest-edgeq run", "version": 2}', "expected version 1 of the record"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, text: str, said: str) -> None:
    """Each with the reason."""
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(said)):
        read_run(path)


def test_a_file_that_cannot_be_written_fails_the_run(pytester: pytest.Pytester, run: Run) -> None:
    """The tests passed, but a later step would read what is not there."""
    (pytester.path / "taken").write_text("")
    pytester.makepyfile(test_x="def test_it():\n    pass\n")
    result = run("--edgeq-json=taken/run.json", "--edgeq-markdown=page.md")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.re_match_lines([r"Error: --edgeq-json: .*run\.json could not be written: "])
    assert (pytester.path / "page.md").exists()


def test_a_file_that_cannot_be_written_is_told_where_no_test_ran(
    pytester: pytest.Pytester, run: Run
) -> None:
    """A collection error is no reason to keep quiet about it."""
    (pytester.path / "taken").write_text("")
    pytester.makepyfile(test_x="import gone\n")
    result = run("--edgeq-json=taken/run.json")
    result.stdout.re_match_lines(
        ["=+ edgeq =+", r"Error: --edgeq-json: .*run\.json could not be written: "]
    )


def test_markdown_for_a_pull_request(
    pytester: pytest.Pytester, run_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table and the failures; on GitHub appended to the step's summary, too."""
    pytester.makepyfile(test_x=PROJECT)
    monkeypatch.setenv("DTYPE", "float32")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "summary.md")
    (pytester.path / "summary.md").write_text("before\n")
    run_here("--edgeq-markdown=out/page.md", "-p", "no:xdist")
    page = (pytester.path / "out" / "page.md").read_text("utf-8")
    assert page.startswith("## pytest-edgeq: 1 of 1 model failed, in 1 of 3 tests\n")
    assert "\n| ConvBnRelu | pt2e\\_static\\_int8 | " in page
    assert "### ❌ test\\_x.py::test\\_dtypes" in page
    assert (pytester.path / "summary.md").read_text("utf-8") == "before\n" + page


def test_a_failed_assertion_is_a_finding_in_every_format(
    pytester: pytest.Pytester, run_here: Run
) -> None:
    """Its headline is whole in a pull request, though a terminal folds it."""
    pytester.makepyfile(
        test_x=PROJECT
        + "\n\ndef test_op(quantized):\n"
        + "    from pytest_edgeq import assert_op_dtypes\n"
        + "    assert_op_dtypes(quantized, 'CONV_2D', input=['int16'] * 30)\n"
    )
    formats = ("--edgeq-markdown=page.md", "--edgeq-json=run.json", "--edgeq-html=page.html")
    result = run_here(*formats, "-p", "no:xdist", "-k", "test_op")
    result.assert_outcomes(failed=1, deselected=4)
    (test,) = validated(pytester.path / "run.json").tests
    (found,) = test["failure"]["records"]
    expected = ", ".join(["int16"] * 30)
    assert (found["kind"], found["expected"], found["got"]) == (
        "unexpected_dtype",
        expected,
        "int8",
    )
    place = found["place"]
    assert (place["kind"], place["name"]) == ("op", "CONV_2D")
    at = f"CONV_2D #{place['op']} ({place['module']})"
    headline = f"{at} input: expected {expected}, got int8 (1 of 1 CONV_2D)"
    page = (pytester.path / "page.md").read_text("utf-8").replace("\\", "")
    assert f"\n\n{headline}\n\n- cause: {found['causes'][0]}\n- update: " in page
    assert headline in (pytester.path / "page.html").read_text("utf-8")
    assert headline not in result.stdout.str()


def test_figures_are_properties_of_junit_xml(pytester: pytest.Pytester, run_here: Run) -> None:
    """Under names that stay the same from build to build."""
    pytester.makepyfile(test_x=PROJECT)
    run_here("--junit-xml=junit.xml", "-p", "no:xdist")
    cases = ElementTree.parse(pytester.path / "junit.xml").iter("testcase")
    found = {
        case.get("name"): {each.get("name"): each.get("value") for each in case.iter("property")}
        for case in cases
    }
    model = "edgeq.ConvBnRelu[pt2e_static_int8]"
    assert float(found["test_compare"][f"{model}.total.sqnr_db"] or "nan") > 30
    assert found["test_compare"][f"{model}.float_ops"] == "0"
    assert found["test_dtypes"] == {}


def test_failures_are_annotated_on_github(
    pytester: pytest.Pytester, run_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One command a failed test, with the file below the checkout and the line."""
    folder = pytester.mkdir("project")
    (folder / "test_x.py").write_text(PROJECT)
    monkeypatch.setenv("DTYPE", "float32")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(pytester.path))
    arguments = ("-p", "no:xdist", f"--rootdir={folder}", str(folder))
    run_here(*arguments).stdout.no_fnmatch_line("::error*")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    result = run_here(*arguments)
    (line,) = [each for each in result.stdout.lines if each.startswith("::error")]
    assert re.match(
        r"::error file=project/test_x\.py,line=\d+,title=test_x\.py%3A%3Atest_dtypes::"
        r"input '.*': expected float32, got int8 \(1 of 1 inputs\)%0Acause: .*%0Aupdate: .*$",
        line,
    )
