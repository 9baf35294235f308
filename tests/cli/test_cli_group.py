"""The group: help, version, exit codes, completion, and the imports of commands without torch."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import click
import numpy as np
import pytest

from pytest_edgeq.cli import edgeq
from pytest_edgeq.cli.pages import pages
from tests.cli.conftest import CONVERTED, Refused, Run, module, without_torch

ROOT = Path(__file__).parents[2]
SOUND = str(CONVERTED / "nested.int8.tflite")
ATTENTION = str(CONVERTED / "attention.int8.tflite")
Patch = pytest.MonkeyPatch
COMMANDS = edgeq.list_commands(click.Context(edgeq))


def test_python_m_shows_the_commands_and_the_exit_codes() -> None:
    """The usage names `edgeq`, whichever way it was started."""
    done = module("--help")

    assert done.returncode == 0
    assert done.stdout.startswith("Usage: edgeq [OPTIONS] COMMAND [ARGS]...")
    assert "Exit codes of every command:" in done.stdout
    assert "_EDGEQ_COMPLETE=bash_source edgeq" in done.stdout
    for name in COMMANDS:
        assert f"\n  {name} " in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_each_command_tells_its_exit_codes(name: str, run: Run) -> None:
    """A script can rely on them."""
    done = run(name, "--help")

    assert done.exit_code == 0
    assert "Exit codes:\n    0  " in done.stdout
    assert "\n    2  " in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100


@pytest.mark.parametrize(
    "arguments", [["--help"], ["diff", SOUND, SOUND], ["show", "--json", SOUND]]
)
def test_output_that_cannot_be_written_is_no_finding(arguments: list[str]) -> None:
    """Nor a traceback."""
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "pytest_edgeq", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=100,
        )
    assert done.stderr == "Error: standard output: No space left on device\n"
    assert done.returncode == 2


def test_output_in_another_encoding_than_utf_8_is_no_finding() -> None:
    """Such as that of a file on Windows: a character that it lacks is escaped."""
    done = module("diff", ATTENTION, SOUND, PYTHONIOENCODING="latin-1")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith(f"{ATTENTION} \\u2192 {SOUND}\n")


def test_the_version(run: Run) -> None:
    """The version of the distribution; a checkout on `PYTHONPATH` prints "unknown"."""
    assert run("--version").stdout == f"edgeq, version {metadata.version('pytest-edgeq')}\n"
    code = (
        "from pytest_edgeq import versions; versions.version_of = {}.get; "
        "from pytest_edgeq.cli import edgeq; edgeq(['--version'])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.endswith(", version unknown\n")


def test_an_unknown_command_names_the_nearest(refused: Refused) -> None:
    """Exit code 2, on stderr."""
    refused("shwo", says="Error: no command 'shwo' (did you mean show?)")


def test_the_shell_completes_commands() -> None:
    """By the variable that the help names."""
    script = module(_EDGEQ_COMPLETE="zsh_source")
    words = module(_EDGEQ_COMPLETE="zsh_complete", COMP_WORDS="edgeq sh", COMP_CWORD="1")

    assert "#compdef edgeq" in script.stdout
    assert words.stdout.splitlines()[:2] == ["plain", "show"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "printed"),
    [
        (["--help"], 0, "Exit codes of every command:"),
        (["show", ATTENTION], 0, "ops: 27 of 51 in float (27 float, 24 int8)"),
        (["diff", ATTENTION, SOUND], 1, "options, wiring, parameters and constants ("),
        (["compare", ATTENTION, ATTENTION, "--inputs", "x.npz"], 0, "sqnr_db"),
        (["cache"], 0, ": no cache yet"),
        (["docs"], 0, f"{pages()[0].name} "),
    ],
    ids=lambda each: each[0] if isinstance(each, list) else "",
)
def test_commands_need_no_torch(
    arguments: list[str], code: int, printed: str, run: Run, tmp_path: Path, monkeypatch: Patch
) -> None:
    """In a process where torch, the converter and pytest are missing; they print the same."""
    monkeypatch.chdir(tmp_path)
    np.savez("x.npz", args_0=np.ones((1, 5, 8), np.float32))

    done = without_torch(*arguments)

    assert (done.returncode, "Error" in done.stderr) == (code, False), done.stderr
    assert printed in done.stdout
    assert arguments == ["--help"] or done.stdout == run(*arguments).stdout
