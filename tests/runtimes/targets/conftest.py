"""The emulated root of the run, and what tests of targets share."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import ai_edge_litert
import pytest
import torch
from filelock import FileLock

from fixtures.tflite import stacks
from pytest_edgeq.runtimes.workers.emulated_root import EmulatedRootError, is_finished, make_root

VARIABLE = "EDGEQ_TEST_ARM64"


@pytest.fixture(scope="session")
def arm64_root(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """
    A root for 64-bit ARM, by `edgeq target arm64`: that of the variable, else one of this run.

    It needs apt and a network, which no other test does: the tests that use it skip without them.
    """
    named = os.environ.get(VARIABLE)
    if named is not None and is_finished(Path(named)):
        return Path(named)
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "arm64"
    try:
        # The first worker of pytest-xdist makes it for all.
        with FileLock(f"{folder}.lock"):
            make_root(folder, say=lambda _: None)
    except EmulatedRootError as error:
        pytest.skip(f"no {VARIABLE}=DIR of `edgeq target arm64 DIR`, and none can be made: {error}")
    return folder


@pytest.fixture(scope="session")
def arm64_command(arm64_root: Path) -> list[str]:
    """The command that starts the root's Python."""
    return make_root(arm64_root, say=lambda _: None)


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
