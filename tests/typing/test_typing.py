"""Type checkers accept what users may write, and refuse each wrong call."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pytest_edgeq
from pytest_edgeq.plugin import HookSpecs

USER_CODE = sorted(Path(__file__).parent.glob("user_*.py"))
WRONG = "  # type: ignore["
FIXTURES = {"edgeq", "edgeq_quantizer"}


def _names(path: Path) -> Iterator[str]:
    """Names that are read, parameters and functions: not those that are only imported."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.FunctionDef):
            yield node.name


def test_the_user_code_uses_every_public_name() -> None:
    """Those of the package, the fixtures and the hooks."""
    hooks = {name for name in vars(HookSpecs) if name.startswith("pytest_")}
    used = {name for path in USER_CODE for name in _names(path)}
    assert {*pytest_edgeq.__all__, *FIXTURES, *hooks} <= used


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("basedpyright") is None,
    reason="needs basedpyright: pip install --group lint",
)
def test_pyright_refuses_the_wrong_calls_and_nothing_else(tmp_path: Path) -> None:
    """In strict mode, with the marks of wrong calls removed; `mypy` holds the same lines."""
    expected = set()
    for path in USER_CODE:
        lines = path.read_text("utf-8").splitlines()
        expected |= {(path.name, i) for i, line in enumerate(lines, 1) if WRONG in line}
        unmarked = "".join(f"{line.partition(WRONG)[0]}\n" for line in lines)
        (tmp_path / path.name).write_text(unmarked, "utf-8")
    config = {"typeCheckingMode": "strict"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config), "utf-8")

    # The package that the tests import, where another one is installed, too.
    environment = {**os.environ, "PYTHONPATH": str(Path(pytest_edgeq.__file__).parents[1])}
    command = [sys.executable, "-m", "basedpyright", "--outputjson"]
    run = subprocess.run(
        [*command, "--pythonpath", sys.executable, "--project", str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )

    report = json.loads(run.stdout)
    found = {
        (Path(each["file"]).name, each["range"]["start"]["line"] + 1): each["message"]
        for each in report["generalDiagnostics"]
    }
    assert report["summary"]["filesAnalyzed"] == len(USER_CODE)
    assert {line: text for line, text in found.items() if line not in expected} == {}
    assert expected - found.keys() == set()
