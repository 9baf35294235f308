"""`edgeq target check`: one command tells whether a target serves."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from fixtures.tflite import make, stacks
from pytest_edgeq.cli import edgeq
from pytest_edgeq.runtimes.workers.remote_worker import facts
from pytest_edgeq.runtimes.workers.target import Target
from tests.cli.conftest import module
from tests.runtimes.targets.conftest import patched_litert


@pytest.fixture(autouse=True)
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A project with a target that serves, and one that does not start."""
    targets = [f"here = {sys.executable}", "gone = no-such-program"]
    (tmp_path / "pyproject.toml").write_text(
        f"[tool.pytest.ini_options]\nedgeq_targets = {json.dumps(targets)}\n"
    )
    monkeypatch.chdir(tmp_path)


def _edgeq(*arguments: str) -> Result:
    return CliRunner().invoke(edgeq, arguments, prog_name="edgeq")


def test_the_command_tells_what_the_target_is() -> None:
    """In lines and as JSON; what is wrong is one sentence, and exit code 2."""
    done = _edgeq("target", "check", "here")
    assert done.exit_code == 0, done.output
    command, machine, times = done.stdout.splitlines()
    assert command == f"command: {sys.executable}"
    assert machine.startswith(f"machine: {facts()['machine']} ")
    assert times.startswith("started in ")
    for name, what in (
        ("her", "Error: no target 'her' (did you mean here?); edgeq_targets of this project has "),
        ("gone", "Error: the gone runtime did not start: expected a Python that answers, got no "),
    ):
        done = _edgeq("target", "check", name)
        assert done.exit_code == 2
        assert done.stderr.startswith(what)
    Path("conftest.py").write_text("print('from the conftest')\n")
    told = json.loads(module("target", "check", "here", "--json").stdout)
    assert told["machine"] == {"target": "here", **facts()}
    assert set(told["run_ms"]) == {"xnnpack", "builtin"}


def test_files_are_compared_on_a_target() -> None:
    """By the name that the ini gives it; the figures are those of this process."""
    paths = [str(make.CONVERTED / f"nested.{kind}.tflite") for kind in ("float", "int8")]
    shape = stacks.MODELS["nested"][1][0].shape
    np.savez("x.npz", args_0=np.ones((3, *shape), np.float32))
    done = [
        _edgeq("compare", *paths, "--inputs", "x.npz", "--json", "--runtime", name)
        for name in ("xnnpack", "here", "pi")
    ]
    assert [each.exit_code for each in done] == [0, 0, 2], done
    one, other = (json.loads(each.stdout) for each in done[:2])
    assert (one.pop("runtime"), other.pop("runtime")) == ("xnnpack", "here")
    assert one == other
    assert "unknown runtime 'pi'; valid: " in done[2].stderr


def test_a_target_that_computes_something_else_does_not_serve(tmp_path: Path) -> None:
    """It answers, and its answer is wrong."""
    code = "_get = Interpreter.get_tensor\nInterpreter.get_tensor = lambda *args: _get(*args) * 2"
    target = Target("bad", patched_litert(tmp_path / "bad", code), 60)
    with pytest.raises(RuntimeError, match=r"expected \[-3.0\] of NEG of 3, got \[-6.0\]"):
        target.try_out()
    target.close()
