"""`edgeq.check_errors` and `edgeq.suggest_budget` in tests of a user."""

from __future__ import annotations

import pytest

# The plugin is loaded into the run, and the model is converted once for all of these steps.
TEST = """
import os
import pytest
import torch
from pytest_edgeq import assert_within_budget

@pytest.fixture(scope="module")
def comparison(edgeq):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    samples = [torch.randn(1, 8) for _ in range(48)]
    quantized = edgeq.quantize(model.eval(), (samples[0],), calibration=samples[:16])
    worse = torch.nn.Sequential(*model)
    with torch.no_grad():
        worse[2].weight.mul_(float(os.environ.get("FACTOR", "1")))
    held = edgeq.load(quantized.tflite, reference=worse.eval())
    start = int(os.environ.get("START", "16"))
    return edgeq.compare(held, samples[start:start + 32])

def test_errors(edgeq, comparison):
    edgeq.check_errors(comparison)

def test_budget(edgeq, comparison):
    assert_within_budget(comparison, edgeq.suggest_budget(comparison))
"""


def test_errors_are_remembered_held_and_accepted(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Missing, stored, the same, regressed, loose and tightened, and other data."""
    pytester.makepyfile(test_x=TEST)
    file = pytester.path / "__edgeq__/test_x/test_errors.errors.json"

    def run(*args: str) -> pytest.RunResult:
        return pytester.runpytest_subprocess("-p", "no:randomly", "-s", *args)

    missing = run()
    missing.assert_outcomes(passed=1, failed=1)
    missing.stdout.fnmatch_lines(
        ["*Budget(*sqnr_db=*", '*AssertionError: errors "errors" is not remembered yet']
    )
    monkeypatch.setenv("FACTOR", "3")
    run("--edgeq-update=new", "-k", "errors").assert_outcomes(passed=1)
    bad = file.read_bytes()
    run("-k", "errors").assert_outcomes(passed=1)

    monkeypatch.setenv("FACTOR", "1")
    loose = run("-k", "errors")
    loose.assert_outcomes(passed=1)
    loose.stdout.fnmatch_lines(["Info: *test_errors.errors.json is loose: total, *=tighten *"])
    assert file.read_bytes() == bad
    tightened = run("-k", "errors", "--edgeq-update=tighten")
    tightened.stdout.fnmatch_lines(["1 remembered file was tightened:"])
    good = file.read_bytes()
    assert good != bad

    monkeypatch.setenv("FACTOR", "3")
    regressed = run("-k", "errors")
    regressed.assert_outcomes(failed=1)
    regressed.stdout.fnmatch_lines(
        ["*AssertionError: errors regressed: total, output *", "*--edgeq-update=changed"]
    )
    monkeypatch.setenv("FACTOR", "1")
    monkeypatch.setenv("START", "15")
    other = run("-k", "errors")
    other.stdout.fnmatch_lines(
        ["*AssertionError: errors not compared: the evaluation data are not those*"]
    )
    assert file.read_bytes() == good
