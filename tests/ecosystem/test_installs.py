"""Fresh environments: the wheel on every Python, and what resolves on other machines."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.ecosystem.overlay import ROOT, Overlay, fetch
from tests.ecosystem.test_without_torch import MOST_PACKAGES, TESTS

# Environments are installed.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

PYTHONS = ("3.10", "3.12", "3.14", "3.13", "3.11")


def _uv(newest: Overlay) -> tuple[str, ...]:
    return str(newest.python), "-m", "uv"


def _interpreter(newest: Overlay, version: str) -> str:
    """Return a Python of this machine, also one of pyenv that no shim names."""
    places = [str(path) for path in Path.home().glob(f".pyenv/versions/{version}.*/bin")]
    run = subprocess.run(
        [*_uv(newest), "python", "find", "--no-python-downloads", version],
        env=os.environ | {"PATH": os.pathsep.join((*places, os.environ["PATH"]))},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    if run.returncode:
        pytest.skip(f"there is no Python {version} on this machine")
    return run.stdout.strip()


@pytest.mark.sweep(0, slow=3)  # Python 3.10 and 3.14, and the oldest LiteRT
@pytest.mark.parametrize(
    ("version", "pins"),
    [
        *((version, ()) for version in PYTHONS),
        ("3.11", ("ai-edge-litert==2.1.6",)),
        ("3.11", ("ai-edge-litert==2.2.*",)),
        ("3.11", ("pytest==7.4.*",)),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else value,
)
def test_files_are_checked_with_the_plain_install(
    version: str, pins: tuple[str, ...], newest: Overlay, wheel: Path, tmp_path: Path
) -> None:
    """On every Python, with the oldest LiteRT and the oldest pytest."""
    python = tmp_path / "installed" / "bin" / "python"
    interpreter = _interpreter(newest, version)
    fetch(*_uv(newest), "venv", "--quiet", "--python", interpreter, str(python.parents[1]))
    install = ("pip", "install", "--quiet", "--python", str(python), str(wheel), *pins)
    fetch(*_uv(newest), *install)
    listed = fetch(*_uv(newest), "pip", "freeze", "--python", str(python)).splitlines()
    assert len(listed) <= MOST_PACKAGES, listed

    (tmp_path / "test_files.py").write_text(TESTS, "utf-8")
    run = subprocess.run(
        [python, "-m", "pytest", "-q", "--edgeq-update=new"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name in ("HOME", "PATH")},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert "8 passed" in run.stdout, run.stdout + run.stderr


def _resolved(newest: Overlay, *arguments: str) -> list[str]:
    """Return the requirements that uv chooses for this project."""
    options = ("--no-header", "--no-annotate", "--quiet", "--upgrade")
    told = fetch(*_uv(newest), "pip", "compile", *options, *arguments, str(ROOT / "pyproject.toml"))
    return [line for line in told.splitlines() if "==" in line]


@pytest.mark.sweep(0, slow=2)
@pytest.mark.parametrize("version", PYTHONS)
def test_the_extra_convert_resolves(version: str, newest: Overlay, tmp_path: Path) -> None:
    """Beside a torch that a team has pinned."""
    constraint = tmp_path / "constraint.txt"
    constraint.write_text("torch==2.13.0\n", "utf-8")
    found = _resolved(
        newest, "--extra=convert", f"--python-version={version}", f"--constraint={constraint}"
    )
    assert "torch==2.13.0" in found
    assert [each for each in found if each.startswith("litert-torch==")]


@pytest.mark.sweep(0, slow=2)
@pytest.mark.parametrize("platform", ["aarch64-unknown-linux-gnu", "windows", "macos"])
@pytest.mark.parametrize("version", PYTHONS)
def test_the_plain_install_resolves_elsewhere(version: str, platform: str, newest: Overlay) -> None:
    """By wheels alone, on boards and where litert-converter has none."""
    options = (f"--python-version={version}", f"--python-platform={platform}")
    found = _resolved(newest, *options, "--only-binary=:all:")
    assert len(found) < MOST_PACKAGES
    assert [each for each in found if each.startswith("ai-edge-litert==")]
