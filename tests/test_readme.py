"""Every code block of the README is run: its two commands by the pipeline, the rest here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pytest_edgeq.localize.cause import blame
from pytest_edgeq.localize.rows import Evidence, LayerError
from pytest_edgeq.options import CI_VARIABLES
from tests.readme import blocks, commands


@pytest.fixture
def files(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The README's Python files, written as a reader would; not on CI, so that it may remember."""
    for name in CI_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    # What comes with the converter's own dependencies warns when pytest loads it.
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:anyio -p no:randomly -p no:xdist")
    names = []
    for block in blocks():
        if block.language == "python":
            first = block.text.splitlines()[0]
            name = first.removeprefix("# ")
            assert re.fullmatch(r"# \w+\.py", first), "a block says in which file it stands"
            pytester.path.joinpath(name).write_text(block.text, encoding="utf-8")
            names.append(name)
    monkeypatch.syspath_prepend(str(pytester.path))
    return names


def test_every_block_is_of_a_kind_that_is_run() -> None:
    """Python blocks and the failure here, console blocks by the pipeline; no other kind."""
    assert [block.language for block in blocks()] == [
        "text",
        "console",
        "console",
        *["python"] * 2,
        "text",
        *["python"] * 5,
    ]


def test_the_layer_to_blame_is_told_as_shown() -> None:
    """The table has the columns of a real one, and the sentence stands above it."""
    texts = [block.text for block in blocks() if block.language == "text"]
    sentence, coverage, heading = texts[1].splitlines()[:3]
    row = LayerError(
        index=4,
        op="CONV_2D",
        module="c2",
        dtypes={},
        matched=True,
        findings=("the weight's codes: output channel 3 is zero (72 of 576 differ)",),
        local_lsb_error=None,
        local_sqnr_db=None,
        local_rmse_lsb=None,
        cumulative_lsb_error=None,
        cumulative_sqnr_db=None,
        cumulative_rmse_lsb=None,
        clipped=None,
    )
    errors = blame([row] * 13, [Evidence()] * 13)
    told = str(errors).splitlines()
    assert [sentence, coverage] == told[:2]
    assert heading.split() == told[2].split()


def test_the_commands_pin_torch_and_stand_in_the_pipeline() -> None:
    """The pipeline runs what the README says, not a copy of it."""
    script = Path(__file__).parent.parent.joinpath(".ci", "run").read_text("utf-8")

    assert len(commands()) == 2
    assert all("pip install --quiet torch==2.13.0 . --group" in command for command in commands())
    assert "tests/readme.py" in script


def test_the_examples_pass_and_the_failure_is_as_shown(
    pytester: pytest.Pytester, files: list[str]
) -> None:
    """First nothing is remembered; then all pass; then a real defect gives the text shown."""
    assert files == [
        "my_model.py",
        "test_model_quant.py",
        "test_quantizers.py",
        "test_accuracy.py",
        "test_two_sizes.py",
        "simulator.py",
        "conftest.py",
    ]
    first = pytester.runpytest_subprocess("test_model_quant.py")
    first.assert_outcomes(passed=2, failed=2)
    first.stdout.fnmatch_lines(["*op-dtype map*is not remembered yet*"])

    pytester.runpytest_subprocess("--edgeq-update").assert_outcomes(passed=8)
    pytester.runpytest_subprocess("test_model_quant.py").assert_outcomes(passed=4)

    simulated = pytester.runpytest_subprocess("test_quantizers.py", "--edgeq-runtime=simulator")
    simulated.assert_outcomes(passed=2)

    test = pytester.path / "test_model_quant.py"
    text = test.read_text("utf-8")
    changed = text.replace("seed=1))", "seed=1), strict_export=False)")
    assert changed != text
    test.write_text(changed, encoding="utf-8")
    result = pytester.runpytest_subprocess("test_model_quant.py", "-k", "every_op")
    result.assert_outcomes(failed=1, deselected=3)
    shown = next(block.text for block in blocks() if block.language == "text")
    lines = [line for line in shown.splitlines() if line.startswith(("E ", ">"))]

    assert len(lines) == 12
    result.stdout.fnmatch_lines([re.sub(r"([\[\]*?])", r"[\1]", line) for line in lines])
