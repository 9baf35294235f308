"""`edgeq report`: a run by its record."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from pytest_edgeq.report.html.history import read_runs
from pytest_edgeq.report.markdown import markdown_page
from pytest_edgeq.report.run import Run as Record
from tests.cli.conftest import CONVERTED, Refused, Run, without_torch
from tests.report.runs import compared, model, outcome, run_of

INT8 = str(CONVERTED / "nested.int8.tflite")


@pytest.fixture
def broken() -> Record:
    """A record with one test that passed and one that failed."""
    tests = [
        outcome("test_x.py::test_a", ["a"], compared("a", total=31.8)),
        outcome("test_x.py::test_b", ["b"], failure="sqnr_db: expected 30, got 3\ncause: it clips"),
    ]
    return run_of({"a": model("Sound"), "b": model("Broken")}, tests)


def test_the_table_and_the_failures(run: Run, broken: Record, tmp_path: Path) -> None:
    """Exit code 1, as that of the run."""
    broken.write(tmp_path / "run.json")
    done = run("report", tmp_path / "run.json", "--markdown", tmp_path / "out" / "page.md")
    assert (done.exit_code, done.stderr) == (1, "")
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["model", "Broken", "Sound"]
    assert lines[3:] == ["2 tests, 1 failed", "test_x.py::test_b: sqnr_db: expected 30, got 3"]
    assert (tmp_path / "out" / "page.md").read_text("utf-8") == markdown_page(broken)
    for view in ("--markdown", "--html"):
        done = run("report", tmp_path / "run.json", view, "/no/such/dir/page")
        told = "Error: /no/such/dir/page: there is no folder /no/such/dir\n"
        assert (done.exit_code, done.stderr) == (2, told)


def test_the_page_with_charts(
    run: Run, broken: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of --edgeq-html; without its extra nothing is written, and the command is named."""
    broken.write(tmp_path / "run.json")
    assert run("report", tmp_path / "run.json", "--html", tmp_path / "page.html").exit_code == 1
    assert "<title>1 of 2 models failed" in (tmp_path / "page.html").read_text("utf-8")
    monkeypatch.setitem(sys.modules, "bokeh", None)
    done = run("report", tmp_path / "run.json", "--html", tmp_path / "other.html")
    assert done.exit_code == 2
    assert "pip install 'pytest-edgeq[report]'" in done.stderr
    assert not (tmp_path / "other.html").exists()


def test_a_history(
    run: Run, broken: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page with a section for each model, from all records of a folder, the oldest first."""
    for day, sqnr in (("26", 30.0), ("25", "inf")):
        tests = [outcome("test_x.py::test_a", ["a"], compared("a", total=sqnr))]
        started = f"2026-11-{day}T09:25:19+00:00"
        again = run_of({"a": model("Sound")}, tests, started=started)
        again.write(tmp_path / f"{day}.json")
    (tmp_path / "other.txt").write_text("no record")
    done = run("report", "--history", tmp_path)
    assert (done.exit_code, done.stdout) == (0, f"{tmp_path / 'history.html'}: 2 runs\n")
    page = (tmp_path / "history.html").read_text("utf-8")
    assert re.findall(r"<h2>(.*?) <span", page) == ["Sound"]
    charts = re.findall(r'aria-label="(.*?) of each run"', page)
    assert charts[:2] == ["SQNR, dB", "size, KB"]
    days = [each.data["started"][8:10] for each in read_runs(tmp_path)]
    assert days == ["25", "26"]

    broken.write(tmp_path / "27.json")
    assert run("report", "--history", tmp_path, "--html", tmp_path / "x.html").exit_code == 0
    assert "<h2>Broken" in (tmp_path / "x.html").read_text("utf-8")
    monkeypatch.setitem(sys.modules, "bokeh", None)
    assert "pip install 'pytest-edgeq[report]'" in run("report", "--history", tmp_path).stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "expected RECORD, or --history DIR"),
        (["run.json", "--history", "."], "expected RECORD, or --history DIR"),
        (["--history", "gone"], "gone: there is no such folder"),
        (["--history", "."], ".: there is no record in it (pytest --edgeq-json=./….json)"),
        (["--history", "bad"], "expected the JSON of --edgeq-json, got another document"),
        (["bad/package.json"], "expected the JSON of --edgeq-json, got another document"),
        (["gone.json"], "gone.json"),
        (["nested"], "the JSON of --edgeq-json, got a file that is no JSON"),
        ([INT8], "the JSON of --edgeq-json, got a file that is no JSON"),
        (["bad"], "Error: bad: Is a directory"),
    ],
)
def test_what_is_no_record(
    arguments: list[str],
    told: str,
    refused: Refused,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One sentence."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "package.json").write_text("{}")
    (tmp_path / "nested").write_text("[" * 100_000)
    refused("report", *arguments, says=told)
    assert not (tmp_path / "history.html").exists()


def test_a_run_without_failures(broken: Record, tmp_path: Path) -> None:
    """Exit code 0; neither torch nor pytest is needed."""
    run_of({"a": model("Sound")}, [outcome("test_x.py::test_a", ["a"])]).write(
        tmp_path / "run.json"
    )
    done = without_torch("report", tmp_path / "run.json")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "1 test, 0 failed"
