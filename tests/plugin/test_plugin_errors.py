"""`edgeq.check_errors` and `edgeq.suggest_budget` in tests of a user."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from fixtures.tflite.writer import one_op, pack, unpack
from tests.plugin.conftest import Run

TEST = """
import os
import pytest
import torch
from torch import nn
from pytest_edgeq import assert_within_budget


class Sum(nn.Module):
    def forward(self, x, y):
        return (x + y) * float(os.environ["FACTOR"])


@pytest.fixture(scope="module")
def comparison(edgeq):
    generator = torch.Generator().manual_seed(0)
    samples = [tuple(4 * torch.rand(1, 64, generator=generator) for _ in "xy") for _ in range(33)]
    start = int(os.environ.get("START", "0"))
    model = edgeq.load("model.tflite", reference=Sum().eval())
    count = int(os.environ.get("COUNT", "32"))
    return edgeq.compare(model, samples[start : start + count])


def test_errors(edgeq, comparison):
    edgeq.check_errors(comparison)


def test_budget(edgeq, comparison):
    assert_within_budget(comparison, edgeq.suggest_budget(comparison))
"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A file of one ADD: codes of 1/16, summed to codes of 1/32."""
    _write(pytester.path / "model.tflite", 1 / 16)
    pytester.makepyfile(test_x=TEST)
    return pytester


def _write(path: Path, scale: float) -> None:
    """Write x + y, whose inputs have codes of `scale`."""
    side = {"dtype": "int8", "shape": (1, 64), "scales": [scale], "zero_points": [-128]}
    model = unpack(one_op("ADD", [side, side], [dict(side, scales=[1 / 32])], "AddOptions"))
    model.operatorCodes[0].version = 2
    path.write_bytes(pack(model))


def test_inputs_calibrated_with_others_are_why_errors_regressed(
    project: pytest.Pytester, run_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands under the first line, and no layer is blamed for it."""
    monkeypatch.setenv("FACTOR", "1.0")
    run = functools.partial(run_here, "-k", "errors")
    run("--edgeq-update=new").assert_outcomes(passed=1, deselected=1)
    _write(project.path / "model.tflite", 1 / 128)
    result = run()
    result.stdout.fnmatch_lines(
        [
            "E *AssertionError: errors regressed: total, output *: sqnr_db: expected *",
            "E *cause: input 't0': expected values within the range of its codes, [[]0, 1.99], *",
            "E * stage *",
        ],
        consecutive=False,
    )
    result.stdout.no_fnmatch_line("*layer to blame*")


@pytest.mark.parametrize(
    "workers",
    [(), pytest.param(("-n", "2"), marks=pytest.mark.slow)],
    ids=["one process", "workers"],
)
def test_errors_are_remembered_held_and_accepted(
    project: pytest.Pytester,
    run_here: Run,
    monkeypatch: pytest.MonkeyPatch,
    workers: tuple[str, ...],
) -> None:
    """Missing, stored, the same, loose and tightened, regressed, and other data."""
    file = project.path / "__edgeq__/test_x/test_errors.errors.json"

    def run(factor: float, *args: str) -> pytest.RunResult:
        monkeypatch.setenv("FACTOR", str(factor))
        start = project.runpytest_subprocess if "-n" in args else run_here
        return start("-k", "errors", *args)

    missing = run(1.01)
    missing.assert_outcomes(failed=1, deselected=1)
    missing.stdout.fnmatch_lines(
        [
            ">   *edgeq.check_errors(comparison)",
            'E *AssertionError: no baseline is stored yet: errors "errors" (output *',
            "Error: 1 check has no baseline yet: *--edgeq-update=new",
        ]
    )
    run(1.01, "--edgeq-update=new").assert_outcomes(passed=1, deselected=1)
    bad = file.read_bytes()
    run(1.01).assert_outcomes(passed=1, deselected=1)

    loose = run(1.0)
    loose.assert_outcomes(passed=1, deselected=1)
    loose.stdout.fnmatch_lines(["Info: *test_errors.errors.json is loose: total, *=tighten *"])
    assert file.read_bytes() == bad
    tightened = run(1.0, *workers, "--edgeq-update=tighten")
    tightened.assert_outcomes(passed=1, deselected=0 if workers else 1)
    tightened.stdout.fnmatch_lines(
        ["1 baseline was tightened:", "*.errors.json: output 't2': sqnr * dB, fails below *"]
    )
    good = file.read_bytes()
    assert good != bad

    regressed = run(1.01, *workers)
    regressed.stdout.fnmatch_lines(
        [
            "E *AssertionError: errors regressed: total, output *: sqnr_db: expected *",
            "E *layer to blame: *",
            "E *localized on the worst 3 samples:",
            "E *update: if the change is meant: pytest *--edgeq-update=changed",
        ]
    )
    monkeypatch.setenv("START", "1")
    other = run(1.0)
    other.assert_outcomes(failed=1, deselected=1)
    other.stdout.fnmatch_lines(
        ["E *AssertionError: the evaluation samples are not the baseline's: expected 32 *"]
    )
    monkeypatch.delenv("START")
    # Sound kernels differ by single codes; those of a worse model are told of.
    run(1.0, "--edgeq-runtime=reference").assert_outcomes(passed=1, deselected=1)
    regressed = run(1.01, "--edgeq-runtime=reference")
    regressed.stdout.fnmatch_lines(["E *runtime: xnnpack → reference; errors regressed: *"])
    assert file.read_bytes() == good


def test_a_suggested_budget_is_printed_and_kept(
    project: pytest.Pytester, run_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is ready to paste, and the measurement that it was made from keeps it."""
    monkeypatch.setenv("FACTOR", "1")
    result = run_here("-s", "-k", "budget")
    result.assert_outcomes(passed=1, deselected=1)
    result.stdout.fnmatch_lines(["*Budget(max_lsb_error=*, sqnr_db=*, cosine_similarity=0.99*)*"])


def test_one_sample_is_told_at_the_end_and_is_no_warning(
    project: pytest.Pytester, run_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every run, also where warnings are errors; of enough samples nothing is told."""
    monkeypatch.setenv("FACTOR", "1.0")
    told = "Info: 1 evaluation sample: nothing is known of others; give 5 or more that differ"
    for update in ((), ("--edgeq-update=changed",)):
        monkeypatch.setenv("COUNT", "1")
        run_here("-k", "errors", "--edgeq-update").assert_outcomes(passed=1, deselected=1)
        result = run_here("-k", "errors", "-W", "error", *update)
        result.assert_outcomes(passed=1, deselected=1)
        result.stdout.fnmatch_lines([told])
    monkeypatch.setenv("COUNT", "32")
    result = run_here("-k", "errors", "--edgeq-update")
    result.assert_outcomes(passed=1, deselected=1)
    result.stdout.no_fnmatch_line("Info: *")


def test_a_broken_file_is_not_stored(
    project: pytest.Pytester, run_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused before the update and with it, and the summary offers no update."""
    monkeypatch.setenv("FACTOR", "-1.0")
    for update in ((), ("--edgeq-update=new",)):
        result = run_here("-k", "errors", *update)
        result.assert_outcomes(failed=1, deselected=1)
        result.stdout.fnmatch_lines(
            [
                "E *AssertionError: errors not stored: total, output 't2': the error is as large "
                "as the signal: expected an SQNR above 1.5 dB, *, got -6.*",
                "E *cause: the file does not compute what the reference does; *",
                "E *fix: find the layer to blame with edgeq.localize(quantized, samples)",
            ]
        )
        result.stdout.no_fnmatch_line("Error: *")
        result.stdout.no_fnmatch_line("*update: *")
    assert not (project.path / "__edgeq__").exists()
