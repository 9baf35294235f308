"""`edgeq.check_errors` and `check_op_dtypes` in tests of a user."""

from __future__ import annotations

from pathlib import Path

import pytest

from fixtures.tflite.writer import one_op, pack, unpack
from tests.projects import Project

TEST = """
import os
import pytest
import torch
from fixtures.models import net


@pytest.fixture(scope="module")
def comparison(edgeq):
    generator = torch.Generator().manual_seed(0)
    samples = [tuple(4 * torch.rand(1, 64, generator=generator) for _ in "xy") for _ in range(33)]
    start = int(os.environ.get("START", "0"))
    summed = net(lambda self, x, y: (x + y) * float(os.environ["FACTOR"]), "Sum")
    model = edgeq.load("model.tflite", reference=summed.eval())
    count = int(os.environ.get("COUNT", "32"))
    return edgeq.compare(model, samples[start : start + count])


def test_errors(edgeq, comparison):
    edgeq.check_errors(comparison)


def test_dtypes(edgeq):
    edgeq.check_op_dtypes(edgeq.load("model.tflite"))
"""

ERRORS = ("-k", "errors")


@pytest.fixture(autouse=True)
def _suite(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of one ADD: codes of 1/16, summed to codes of 1/32."""
    project.write(TEST)
    write_sum(project.path / "model.tflite")
    monkeypatch.setenv("FACTOR", "1.0")


def write_sum(path: Path, scale: float | None = 1 / 16) -> None:
    """Write x + y, whose inputs have codes of `scale`, or floats."""
    side = {"dtype": "int8", "shape": (1, 64), "scales": [scale], "zero_points": [-128]}
    made = dict(side, scales=[1 / 32])
    if scale is None:
        side = made = {"dtype": "float32", "shape": (1, 64)}
    model = unpack(one_op("ADD", [side, side], [made], "AddOptions"))
    model.operatorCodes[0].version = 1 if scale is None else 2
    path.write_bytes(pack(model))


def test_op_dtypes_are_remembered(project: Project) -> None:
    """The fixture, the file's own op-dtype map and the memory, through a whole life."""
    shows = [
        # The user's line, and none of ours.
        ">   *edgeq.check_op_dtypes(*",
        'E *no baseline is stored yet: op-dtype map "op_dtypes" (1 op, 0 of them in float)',
        "test_x.py:*: AssertionError",
    ]
    project.run("-k", "dtypes", failed=1, deselected=1, shows=shows)
    project.run("-k", "dtypes", "--edgeq-update=new", passed=1, deselected=1)
    project.run("-k", "dtypes", passed=1, deselected=1)
    write_sum(project.path / "model.tflite", None)
    changed = "AssertionError: ADD #0 went from int8 to float32"
    shows = [f"E * {changed}; input *", f"FAILED test_x.py::test_dtypes - {changed[:45]}*"]
    project.run("-k", "dtypes", failed=1, deselected=1, shows=shows)


def test_inputs_calibrated_with_others_are_why_errors_regressed(project: Project) -> None:
    """It stands under the first line, and no layer is blamed for it."""
    project.run(*ERRORS, "--edgeq-update=new", passed=1, deselected=1)
    write_sum(project.path / "model.tflite", 1 / 128)
    shows = [
        "E *AssertionError: errors regressed: total, output *: sqnr_db: expected *",
        "E *cause: input 't0': expected values within the range of its codes, [[]0, 1.99], *",
        "E * stage *",
    ]
    project.run(*ERRORS, shows=shows, hides="*layer to blame*")


def test_errors_are_remembered_held_and_accepted(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that was bad is stored, is tightened when it is good, and then is an error."""
    file = project.path / "__edgeq__" / "test_x" / "test_errors.errors.json"

    monkeypatch.setenv("FACTOR", "1.01")
    shows = [
        ">   *edgeq.check_errors(comparison)",
        'E *AssertionError: no baseline is stored yet: errors "errors" (output *',
        "Error: 1 baseline is not stored yet: *--edgeq-update=new",
    ]
    project.run(*ERRORS, failed=1, deselected=1, shows=shows)
    project.run(*ERRORS, "--edgeq-update=new", passed=1, deselected=1)
    bad = file.read_bytes()
    project.run(*ERRORS, passed=1, deselected=1)

    monkeypatch.setenv("FACTOR", "1.0")
    loose = "Info: *test_errors.errors.json is loose: total, *=tighten *"
    project.run(*ERRORS, passed=1, deselected=1, shows=loose)
    assert file.read_bytes() == bad
    shows = ["1 baseline was tightened:", "*.errors.json: output 't2': sqnr * dB, fails below *"]
    project.run(*ERRORS, "--edgeq-update=tighten", passed=1, deselected=1, shows=shows)
    good = file.read_bytes()
    assert good != bad
    # Sound kernels differ by single codes; those of a worse model are told of.
    project.run(*ERRORS, "--edgeq-runtime=reference", passed=1, deselected=1)

    monkeypatch.setenv("FACTOR", "1.01")
    shows = [
        "E *AssertionError: errors regressed: total, output *: sqnr_db: expected *",
        "E *layer to blame: *",
        "E *localized on the worst 3 samples:",
        "E *update: if the change is meant: pytest *--edgeq-update=changed",
    ]
    project.run(*ERRORS, shows=shows)
    shows = ["E *runtime: xnnpack → reference; errors regressed: *"]
    project.run(*ERRORS, "--edgeq-runtime=reference", shows=shows)
    monkeypatch.setenv("FACTOR", "1.0")
    monkeypatch.setenv("START", "1")
    shows = ["E *AssertionError: the evaluation samples are not the baseline's: expected 32 *"]
    project.run(*ERRORS, failed=1, deselected=1, shows=shows)
    assert file.read_bytes() == good


def test_one_sample_is_told_at_the_end_and_is_no_warning(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every run, even if warnings are errors; not with enough samples."""
    told = "Info: 1 evaluation sample: nothing is known of others; give 5 or more that differ"
    monkeypatch.setenv("COUNT", "1")
    project.run(*ERRORS, "--edgeq-update", passed=1, deselected=1)
    project.run(*ERRORS, "-W", "error", passed=1, deselected=1, shows=told)
    monkeypatch.setenv("COUNT", "32")
    project.run(*ERRORS, "--edgeq-update", passed=1, deselected=1, hides="Info: *")


def test_a_broken_file_is_not_stored(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before the update and with it, and the summary offers no update."""
    monkeypatch.setenv("FACTOR", "-1.0")
    shows = [
        "E *AssertionError: errors not stored: total, output 't2': the error is as large "
        "as the signal: expected an SQNR above 1.5 dB, *, got -6.*",
        "E *cause: the file does not compute what the reference does; *",
        "E *fix: find the layer to blame with edgeq.localize(quantized, samples)",
    ]
    for update in ((), ("--edgeq-update=new",)):
        hides = ["Error: *", "*update: *"]
        project.run(*ERRORS, *update, failed=1, deselected=1, shows=shows, hides=hides)
    assert not (project.path / "__edgeq__").exists()
