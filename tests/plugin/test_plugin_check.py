"""`edgeq.check` and the layer to blame, inside of pytest: memory, warnings, options."""

from __future__ import annotations

from pathlib import Path

import pytest

from fixtures.tflite.writer import one_op, pack, unpack
from tests.plugin.conftest import Run

_TEST = """
import torch
from torch import nn
from pytest_edgeq import Budget, assert_within_budget


class Sum(nn.Module):
    def forward(self, x, y):
        return {value}


def samples(n, seed):
    generator = torch.Generator().manual_seed(seed)
    return [tuple(4 * torch.rand(1, 64, generator=generator) for _ in "xy") for _ in range(n)]


def test_it(edgeq):
    model = edgeq.load("model.tflite", reference=Sum().eval())
    {call}
"""
# As if it were not installed: each run would import it, which takes seconds.
_WITHOUT_TENSORFLOW = "import sys\n\nsys.modules['tensorflow'] = None\n"
_CHECK = "edgeq.check(model, samples(4, seed=0))"
_BUDGET = """comparison = edgeq.compare(model, samples(4, seed=0))
    assert_within_budget(comparison, Budget(max_abs_error=0.001))"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A file of one ADD."""
    _write(pytester.path / "model.tflite", "int8")
    pytester.makeconftest(_WITHOUT_TENSORFLOW)
    return pytester


def _write(path: Path, dtype: str) -> None:
    """Write x + y: codes of 1/16, or floats."""
    scaled = {"scales": [1 / 16], "zero_points": [-128]} if dtype == "int8" else {}
    side = {"dtype": dtype, "shape": (1, 64), **scaled}
    made = dict(side, scales=[1 / 32]) if scaled else side
    model = unpack(one_op("ADD", [side, side], [made], "AddOptions"))
    model.operatorCodes[0].version = 2 if scaled else 1
    path.write_bytes(pack(model))


@pytest.fixture
def run_test(project: pytest.Pytester, run_here: Run) -> Run:
    """Run one test, in whose body a call stands."""

    def run(call: str, *args: str, value: str = "x + y") -> pytest.RunResult:
        project.makepyfile(test_x=_TEST.format(call=call, value=value))
        return run_here("-p", "no:cacheprovider", *args)

    return run


def test_a_gate_remembers(run_test: Run, project: pytest.Pytester) -> None:
    """Nothing is remembered, it is, and another file is told from it."""
    missing = run_test(_CHECK)
    missing.assert_outcomes(failed=1)
    missing.stdout.fnmatch_lines(
        [
            "E * AssertionError: no baseline is stored yet: op-dtype map * (1 op, *), errors * (*)",
            "E * file: *.op_dtypes.json, *.errors.json",
            "E * update: to store it and commit the file *: pytest *=new",
        ],
        consecutive=True,
    )
    missing.stdout.no_fnmatch_line("*sqnr_db*")
    missing.stdout.fnmatch_lines([">   *edgeq.check(*", "test_x.py:*: AssertionError"])

    run_test(_CHECK, "--edgeq-update").assert_outcomes(passed=1)
    run_test(_CHECK, "-W", "error").assert_outcomes(passed=1)

    _write(project.path / "model.tflite", "float32")
    changed = run_test(_CHECK)
    changed.assert_outcomes(failed=1)
    changed.stdout.fnmatch_lines(["E *ADD #0 went from int8 to float32*"])


def test_errors_of_an_op_that_lost_precision_refer_to_it(
    run_test: Run, project: pytest.Pytester
) -> None:
    """Not so the errors of one that gained some: of another reference."""
    for dtype, other, value, cause in (
        ("float32", "int8", "x + y", "ADD #0 went from float32 to int8; *"),
        ("int8", "float32", "x + y + 0.1", "ADD #0: the file in float does not compute *"),
    ):
        _write(project.path / "model.tflite", dtype)
        run_test(_CHECK, "--edgeq-update=new,changed").assert_outcomes(passed=1)
        _write(project.path / "model.tflite", other)
        result = run_test(_CHECK, value=value)
        result.stdout.fnmatch_lines(
            [f"E *AssertionError: {cause}", "E *errors regressed: *", "E *: explained by [[]1]"]
        )
        result.stdout.fnmatch_lines([f"E *ADD #0 went from {dtype} to {other}*"])


def test_several_models_are_told_apart_by_name(run_test: Run, project: pytest.Pytester) -> None:
    """Each has files of its own."""
    call = "\n    ".join(
        f'edgeq.check(model, samples(4, seed={seed}), name="{name}")'
        for seed, name in enumerate(("one", "two"))
    )

    run_test(call, "--edgeq-update").assert_outcomes(passed=1)

    assert sorted(path.name for path in project.path.rglob("test_it.*.json")) == [
        f"test_it.{name}_{what}.json" for name in ("one", "two") for what in ("errors", "op_dtypes")
    ]


def test_nothing_unsound_is_remembered(run_test: Run, project: pytest.Pytester) -> None:
    """With an update asked for, the failure says that nothing was written, and nothing is."""
    unasked = run_test(_CHECK, value="x - y")
    unasked.assert_outcomes(failed=1)
    unasked.stdout.fnmatch_lines(
        ["E *no baseline is stored yet: *; update it once the other findings are fixed"]
    )
    unasked.stdout.no_fnmatch_line("*fails below*")

    result = run_test(_CHECK, "--edgeq-update", value="x - y")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E *no baseline was stored: a model must be sound first"])
    assert not (project.path / "__edgeq__").exists()


def test_a_change_is_not_to_be_accepted_while_something_is_wrong(
    run_test: Run, project: pytest.Pytester
) -> None:
    """No command is given that would make a memory of a defect; alone, it is."""
    run_test(_CHECK, "--edgeq-update").assert_outcomes(passed=1)

    wrong = run_test(_CHECK, value="x - y")
    wrong.assert_outcomes(failed=1)
    wrong.stdout.fnmatch_lines(
        ["E *[[]?] errors regressed: *", "E *update: once the other findings are fixed"]
    )
    wrong.stdout.no_fnmatch_line("E *update: if the change*")

    _write(project.path / "model.tflite", "float32")
    run_test(_CHECK).stdout.fnmatch_lines(["E *update: if the change is meant: *"])


def test_in_a_fixture_it_says_that_nothing_is_remembered(
    run_test: Run, project: pytest.Pytester
) -> None:
    """All else is checked there, too."""
    project.makeconftest(
        _WITHOUT_TENSORFLOW + "import pytest\n\n@pytest.fixture\ndef gated(edgeq):\n"
        '    import test_x\n    model = edgeq.load("model.tflite", reference=test_x.Sum().eval())\n'
        "    edgeq.check(model, test_x.samples(4, seed=0))\n"
    )
    call = "pass\n\n\ndef test_gated(gated):\n    pass"

    sound = run_test(call)
    sound.assert_outcomes(passed=2, warnings=1)
    sound.stdout.fnmatch_lines(["*UserWarning: edgeq.check: baselines were not checked: *"])
    run_test(call, value="x - y").assert_outcomes(passed=1, errors=1)


def test_a_budget_that_fails_names_the_layer(run_test: Run) -> None:
    """On the worst samples, with the worst rows; a switch turns it off."""
    result = run_test(_BUDGET, value="x - y")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "E *AssertionError: total, output*",
            "E *layer to blame: ADD #0*",
            "E *op *module *verdict*",
        ]
    )

    off = run_test(_BUDGET, "--edgeq-localize=off", value="x - y")
    off.assert_outcomes(failed=1)
    off.stdout.no_fnmatch_line("*layer to blame*")

    wrong = run_test(_BUDGET, "--edgeq-localize=on")
    wrong.stderr.fnmatch_lines(["*--edgeq-localize: 'on' is none of the valid values: auto, off"])


def test_a_reference_that_is_no_module_has_layers_too(run_test: Run) -> None:
    """The outputs of the file are held against those of the callable."""
    call = _BUDGET.replace(
        "edgeq.compare(model",
        'edgeq.compare(edgeq.load("model.tflite", reference=lambda x, y: x - y)',
    )

    result = run_test(call)

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "E *AssertionError: total, output*",
            "E *layer to blame: ADD #0: the file in float*",
        ]
    )


def test_what_cannot_be_localized_does_not_hide_the_failure(run_test: Run) -> None:
    """Where localizing fails itself, the failure that it was to explain comes first."""
    failing = (
        "from unittest import mock\n"
        "    where = 'pytest_edgeq.localize.localizer.Localizer.update'\n"
        "    with mock.patch(where, side_effect=RuntimeError('no kernels')):\n        "
    )

    result = run_test(failing + _BUDGET.replace("\n    ", "\n        "))

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "E *AssertionError: total, output*",
            "E *layer to blame: not known, as localizing failed: RuntimeError: no kernels",
        ]
    )


def test_a_verbose_run_names_what_a_loaded_file_breaks(pytester: pytest.Pytester) -> None:
    """At the end, as the file may be loaded to be compared alone."""
    row = {"dtype": "int8", "shape": (1, 8)}
    taken, made = ({**row, "scales": [each]} for each in (0.1, 0.2))
    content = one_op("RESHAPE", [taken], [made], "ReshapeOptions", newShape=[1, 8])
    (pytester.path / "wrong.tflite").write_bytes(content)
    pytester.makepyfile("def test_it(edgeq):\n    edgeq.load('wrong.tflite')")
    line = (
        "Info: wrong: same_scale: RESHAPE #0: its output: expected input 0's scale 0.1, got 0.2 *"
    )

    pytester.runpytest("-v").stdout.fnmatch_lines([line])
    pytester.runpytest().stdout.no_fnmatch_line(line)
