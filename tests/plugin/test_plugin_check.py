"""`edgeq.check` and the layer to blame, inside of pytest: memory, warnings, options."""

from __future__ import annotations

from typing import Any

import pytest

from fixtures.language.models import exported
from fixtures.tflite.writer import one_op
from tests.plugin.test_plugin_errors import write_sum
from tests.projects import Project

_TEST = """
import torch
from fixtures.models import net
from pytest_edgeq import Budget, assert_within_budget

SUM = net(lambda self, x, y: {value}, "Sum").eval()


def samples(n, seed):
    generator = torch.Generator().manual_seed(seed)
    return [tuple(4 * torch.rand(1, 64, generator=generator) for _ in "xy") for _ in range(n)]


def test_it(edgeq):
    model = edgeq.load("model.tflite", reference=SUM)
    {call}
"""
# As if it were not installed: each run would import it, which takes seconds.
_WITHOUT_TENSORFLOW = "import sys\n\nsys.modules['tensorflow'] = None\n"
_CHECK = "edgeq.check(model, samples(4, seed=0))"
_BUDGET = """comparison = edgeq.compare(model, samples(4, seed=0))
    assert_within_budget(comparison, Budget(max_abs_error=0.001))"""
UPDATE = "--edgeq-update=new,changed"


class Gate:
    """A project with a file of one ADD, and one test, in whose body a call stands."""

    def __init__(self, project: Project) -> None:
        self.project = project
        project.write({"conftest": _WITHOUT_TENSORFLOW})
        self.file("int8")

    def file(self, dtype: str) -> None:
        """Write the file, of codes or of floats."""
        write_sum(self.project.path / "model.tflite", 1 / 16 if dtype == "int8" else None)

    def __call__(
        self, *options: str, call: str = _CHECK, value: str = "x + y", **checks: Any
    ) -> None:
        """Run the test."""
        test = _TEST.format(call=call, value=value)
        self.project.run("-p", "no:cacheprovider", *options, files=test, **checks)


@pytest.fixture
def gate(project: Project) -> Gate:
    """The project."""
    return Gate(project)


@pytest.mark.slow
def test_a_gate_remembers(gate: Gate) -> None:
    """Without a baseline, with one, and with another file."""
    gate(
        failed=1,
        shows=[
            ">   *edgeq.check(*",
            "E * AssertionError: no baseline is stored yet: op-dtype map * (1 op, *), errors * (*)",
            "E * file: *.op_dtypes.json, *.errors.json",
            "E * update: to store it and commit the file *: pytest *=new",
            "test_x.py:*: AssertionError",
        ],
        hides="*sqnr_db*",
    )
    gate("--edgeq-update", passed=1)
    gate("-W", "error", passed=1)
    gate.file("float32")
    gate(failed=1, shows="E *ADD #0 went from int8 to float32*")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "other", "value", "cause"),
    [
        ("float32", "int8", "x + y", "ADD #0 went from float32 to int8; *"),
        ("int8", "float32", "x + y + 0.1", "ADD #0: the file in float does not compute *"),
    ],
)
def test_errors_of_an_op_that_lost_precision_refer_to_it(
    gate: Gate, dtype: str, other: str, value: str, cause: str
) -> None:
    """Not so the errors of one that gained some: of another reference."""
    gate.file(dtype)
    gate(UPDATE, passed=1)
    gate.file(other)
    shows = [f"E *AssertionError: {cause}", "E *errors regressed: *", "E *: explained by [[]1]"]
    gate(value=value, shows=shows)
    gate(value=value, shows=f"E *ADD #0 went from {dtype} to {other}*")


def test_several_models_are_told_apart_by_name(gate: Gate) -> None:
    """Each has files of its own."""
    calls = [f'edgeq.check(model, samples(4, seed=0), name="{name}")' for name in ("one", "two")]
    gate("--edgeq-update", call="\n    ".join(calls), passed=1)
    assert sorted(path.name for path in gate.project.path.rglob("test_it.*.json")) == [
        f"test_it.{name}_{what}.json" for name in ("one", "two") for what in ("errors", "op_dtypes")
    ]


@pytest.mark.slow
def test_nothing_unsound_is_remembered(gate: Gate) -> None:
    """No command is given that would make a memory of a defect, and none makes one."""
    told = "E *no baseline is stored yet: *; update it once the other findings are fixed"
    gate(value="x - y", failed=1, shows=told, hides="*fails below*")
    told = "E *no baseline was stored: a model must be sound first"
    gate("--edgeq-update", value="x - y", failed=1, shows=told)
    assert not (gate.project.path / "__edgeq__").exists()

    gate("--edgeq-update", passed=1)
    shows = ["E *[[]?] errors regressed: *", "E *update: once the other findings are fixed"]
    gate(value="x - y", failed=1, shows=shows, hides="E *update: if the change*")
    gate.file("float32")
    gate(shows="E *update: if the change is meant: *")


def test_in_a_fixture_it_says_that_nothing_is_remembered(gate: Gate) -> None:
    """All else is checked there, too."""
    fixture = (
        "import pytest\n\n@pytest.fixture\ndef gated(edgeq):\n"
        '    import test_x\n    model = edgeq.load("model.tflite", reference=test_x.SUM)\n'
        "    edgeq.check(model, test_x.samples(4, seed=0))\n"
    )
    gate.project.write({"conftest": _WITHOUT_TENSORFLOW + fixture})
    call = "pass\n\n\ndef test_gated(gated):\n    pass"
    shows = "*UserWarning: edgeq.check: baselines were not checked: *"
    gate(call=call, passed=2, warnings=1, shows=shows)
    gate(call=call, value="x - y", passed=1, errors=1)


_FAILING = (
    "from unittest import mock\n"
    "    where = 'pytest_edgeq.localize.localizer.Localizer.update'\n"
    "    with mock.patch(where, side_effect=RuntimeError('no kernels')):\n        "
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "options", "shows", "hides"),
    [
        (_BUDGET, (), ["E *layer to blame: ADD #0*", "E *op *module *verdict*"], ()),
        (_BUDGET, ("--edgeq-localize=off",), [], "*layer to blame*"),
        # The outputs of the file are held against those of a callable.
        (
            _BUDGET.replace(
                "edgeq.compare(model",
                'edgeq.compare(edgeq.load("model.tflite", reference=lambda x, y: x - y)',
            ),
            (),
            ["E *layer to blame: ADD #0: the file in float*"],
            (),
        ),
        # Where localizing fails itself, the failure that it was to explain comes first.
        (
            _FAILING + _BUDGET.replace("\n    ", "\n        "),
            (),
            ["E *layer to blame: not known, as localizing failed: RuntimeError: no kernels"],
            (),
        ),
    ],
    ids=["on", "off", "callable", "fails"],
)
def test_a_budget_that_fails_names_the_layer(
    gate: Gate, call: str, options: tuple[str, ...], shows: list[str], hides: Any
) -> None:
    """On the worst samples, with the worst rows; a switch turns it off."""
    first = "E *AssertionError: total, output*"
    gate(*options, call=call, value="x - y", failed=1, shows=[first, *shows], hides=hides)


def test_a_verbose_run_names_what_a_loaded_file_breaks(project: Project) -> None:
    """At the end, as the file may be loaded to be compared alone."""
    row = {"dtype": "int8", "shape": (1, 8)}
    taken, made = ({**row, "scales": [each]} for each in (0.1, 0.2))
    content = one_op("RESHAPE", [taken], [made], "ReshapeOptions", newShape=[1, 8])
    test = "def test_it(edgeq):\n    edgeq.load('wrong.tflite')"
    line = (
        "Info: wrong: same_scale: RESHAPE #0: its output: expected input 0's scale 0.1, got 0.2 *"
    )
    project.run("-v", files={"wrong.tflite": content, "test_x": test}, shows=line)
    project.run(hides=line)


def test_a_language_models_end_is_in_the_summary(project: Project) -> None:
    """Not as a warning, which fails a suite that turns warnings into errors."""
    project.run(
        *("-p", "no:cacheprovider", "-W", "error::UserWarning", "--edgeq-update"),
        files=f"""
            from fixtures.language.models import sequences

            def test_model(edgeq):
                path = {str(exported("llama", "float"))!r}
                edgeq.check(edgeq.load(path, float_tflite=path), sequences(5, 20, 0))
            """,
        shows="Info: llama.float: the cache holds 96 tokens, and one more overwrites position 95*",
        passed=1,
    )
