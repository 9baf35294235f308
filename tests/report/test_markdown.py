"""The Markdown page: its texts, and its limit on length."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_edgeq.numerics.findings import CLIPPED_OUTPUT, NO_BASELINE, Finding, Place, text_of
from pytest_edgeq.report.markdown import LIMIT, annotation_lines, markdown_page
from pytest_edgeq.report.model_rows import table_lines
from pytest_edgeq.report.run import Run
from tests.report.runs import changed_map, claim, compared, model, outcome, run_of

GOLDEN = Path(__file__).parent / "golden"

FAILURE = """AssertionError: errors "errors": total sqnr_db regressed: expected 26.7 dB, got 20.1 dB
cause: ranges are too narrow
update: pytest test_x.py::test_b --edgeq-update=changed"""


def failed(text: str) -> Run:
    """Return a run of one model and one test that failed."""
    return run_of({"a": model("Net")}, [outcome("test_x.py::t", ["a"], failure=text)])


def sound_and_broken() -> list[str]:
    """Return the table and the page of a run with a sound model and a broken one."""
    tests = [
        outcome(
            "test_x.py::test_a",
            ["sound"],
            compared("sound", total=31.84, quantization=32.0, lowering=45.25),
            claims=[claim(path="a.json", category="new", written=True, stored="9 ops, 0 in float")],
        ),
        outcome(
            "test_x.py::test_b",
            ["broken"],
            compared("broken", total="-inf", quantization=31.0, lowering=-0.5),
            failure=FAILURE,
        ),
    ]
    models = {"sound": model("Sound"), "broken": model("Broken|`x`")}
    run = run_of(models, tests, baselines={"obsolete": ["old.json"], "pruned": []})
    return ["\n".join(text for text, _ in table_lines(run)), markdown_page(run)]


@pytest.mark.parametrize(("index", "name"), [(0, "table.txt"), (1, "page.md")])
def test_the_texts(index: int, name: str) -> None:
    """A broken model first, its failure whole; names of users are escaped."""
    assert sound_and_broken()[index] == (GOLDEN / name).read_text("utf-8").removesuffix("\n")


def test_the_page_stays_below_the_limit() -> None:
    """With a hundred long failures the table stays, and the rest is counted."""
    models = {str(i): model(f"Net{i}") for i in range(100)}
    tests = [outcome(f"test_x.py::test_{i}", [str(i)], failure="x" * 3000) for i in range(100)]
    page = markdown_page(run_of(models, tests))
    assert len(page) <= LIMIT
    assert page.startswith("## pytest-edgeq: 100 of 100 models failed, in 100 of 100 tests\n")
    assert "| Net99 |" in page
    assert " more failed tests: see the log" in page


def test_a_fence_in_a_failure_does_not_end_the_block() -> None:
    """A text that holds Markdown is shown as it is."""
    page = markdown_page(failed("one\n```\ntwo"))
    assert "\n````text\none\n```\ntwo\n````\n" in page


def test_a_failure_is_one_command() -> None:
    """Line breaks and colons are escaped, the path is relative to the checkout."""
    (line,) = annotation_lines(failed("50 %:\nx"), Path("/checkout/sub"), Path("/checkout"))
    assert line == ("::error file=sub/test_x.py,line=7,title=test_x.py%3A%3At::50 %25:%0Ax")


def test_a_long_failure_is_cut_at_a_line() -> None:
    """The log has the whole."""
    text = "\n".join(f"line {i}" for i in range(2000))
    (line,) = annotation_lines(failed(text), Path("/checkout"), None)
    assert len(line) < 6000
    assert line.endswith("%0A…")


def test_a_baseline_that_was_changed_is_shown_with_its_change() -> None:
    """As the terminal would show it."""
    change = changed_map()
    stored = claim(change, path="a.json", written=True, stored="x")
    page = markdown_page(run_of({}, [outcome("test_x.py::t", [], claims=[stored])]))
    assert page.endswith(f"\n- stored: `a.json`: x\n\n```text\n{text_of([change])}\n```\n")


def two_findings() -> Run:
    """Return a test that failed by two findings, of which the first has a long line."""
    first = Finding(
        kind=CLIPPED_OUTPUT,
        place=Place("output", "y"),
        expected="the reference within [-1, 1]",
        got="9 of 10 outside, as far as [-30, 30]",
        fix="calibrate with samples like those evaluated",
        evidence=("  a  table  of  rows",),
    )
    second = Finding(
        kind=NO_BASELINE,
        place=Place("baseline", "x.json"),
        headline="no baseline is stored yet",
        command="pytest --edgeq-update=new",
    )
    run = failed(text_of([first, second]))
    run.tests[0]["failure"]["records"] = [first.to_dict(), second.to_dict()]
    return run


def test_findings_are_whole_sentences_with_their_advice() -> None:
    """A headline is not cut where a terminal folds it, and tables are left to the whole text."""
    page = markdown_page(two_findings())
    shown, _, whole = page.partition("<details>")
    assert shown.endswith(
        "output 'y': expected the reference within \\[-1, 1\\], got 9 of 10 outside, as far as "
        "\\[-30, 30\\] \\[1 of 2 findings\\]\n\n"
        "- fix: calibrate with samples like those evaluated\n- no baseline is stored yet\n\n"
    )
    assert "  a  table  of  rows" in whole


def test_an_annotation_has_findings_without_their_tables() -> None:
    """Title, causes, fix and command of each."""
    (line,) = annotation_lines(two_findings(), Path("/checkout"), None)
    assert line.partition("t::")[2].split("%0A") == [
        "output 'y': expected the reference within [-1, 1], got 9 of 10 outside, as far as "
        "[-30, 30]",
        "fix: calibrate with samples like those evaluated",
        "no baseline is stored yet",
        "file: x.json",
        "update: pytest --edgeq-update=new",
    ]
