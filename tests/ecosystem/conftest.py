from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import filelock
import pytest

from tests.ecosystem.overlay import PYPROJECT, Overlay

Provide = Callable[[str, Callable[[Path], None]], Path]


@pytest.fixture(scope="session")
def once_a_run(tmp_path_factory: pytest.TempPathFactory) -> Provide:
    """Make a folder once in a run, whichever worker of pytest-xdist asks first."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def provide(name: str, make: Callable[[Path], None]) -> Path:
        folder, done = shared / name, shared / f"{name}.done"
        with filelock.FileLock(shared / f"{name}.lock"):
            if not done.exists():
                make(folder)
                done.touch()
        return folder

    return provide


@pytest.fixture(scope="session")
def newest(once_a_run: Provide) -> Overlay:
    """The running environment with the dependency groups `plugins` and `packaging`."""

    def make(folder: Path) -> None:
        Overlay.make(folder).install(
            *("--group", f"{PYPROJECT}:plugins", "--group", f"{PYPROJECT}:packaging")
        )

    return Overlay(once_a_run("newest", make))
