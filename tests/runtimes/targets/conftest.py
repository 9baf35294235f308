"""Fixtures and helpers for tests of targets."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ai_edge_litert
import pytest
import torch
from click.testing import CliRunner, Result

from fixtures.tflite import stacks
from pytest_edgeq.cli import edgeq

Program = Callable[[str, str], None]


def target(*arguments: object) -> Result:
    """Run `edgeq target`."""
    return CliRunner().invoke(edgeq, ["target", *map(str, arguments)], prog_name="edgeq")


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """Write a program for PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def write(name: str, script: str) -> None:
        path = folder / name
        path.write_text(f"#!/bin/sh\n{script}\n", "utf-8")
        path.chmod(0o755)

    return write


@pytest.fixture
def _no_programs(program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


@pytest.fixture
def _no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "apt.conf").write_text('Acquire::Retries "0";', "utf-8")
    monkeypatch.setenv("APT_CONFIG", str(tmp_path / "apt.conf"))
    for each in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(each, "http://127.0.0.1:9")  # nobody listens there


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    """An empty folder."""
    folder = tmp_path / "roots"
    folder.mkdir()
    return folder


def finished(root: Path, release: str, **others: str) -> Path:
    """Make a folder that looks as a finished root."""
    root.mkdir()
    releases = {"ai-edge-litert": release, **others}
    (root / "edgeq-root.json").write_text(json.dumps(releases), "utf-8")
    return root


def drawn(name: str, count: int) -> list[Any]:
    """Draw samples of a model of the fixtures."""
    generator = torch.Generator().manual_seed(1)
    shapes = [each.shape for each in stacks.MODELS[name][1]]
    return [tuple(torch.randn(s, generator=generator) for s in shapes) for _ in range(count)]


def patched_litert(folder: Path, code: str) -> list[str]:
    """Return the command of a local target whose interpreter module ends with this code."""
    package, real = folder / "ai_edge_litert", Path(ai_edge_litert.__file__).parent
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"__path__.append({str(real)!r})\n")
    (package / "interpreter.py").write_text(f"{(real / 'interpreter.py').read_text()}\n{code}\n")
    return ["env", f"PYTHONPATH={folder}", sys.executable]
