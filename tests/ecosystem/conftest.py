from __future__ import annotations

from pathlib import Path

import pytest

from tests.ecosystem.overlay import PYPROJECT, ROOT, Overlay, fetch
from tests.roots import Provide


@pytest.fixture(scope="session")
def newest(once_a_run: Provide) -> Overlay:
    """The running environment with the dependency groups `plugins` and `packaging`."""

    def make(folder: Path) -> None:
        Overlay.make(folder).install(
            *("--group", f"{PYPROJECT}:plugins", "--group", f"{PYPROJECT}:packaging")
        )

    return Overlay(once_a_run("newest", make))


@pytest.fixture(scope="session")
def built(newest: Overlay, once_a_run: Provide) -> Path:
    """A folder of the sdist, and the wheel that was built from it."""

    def make(folder: Path) -> None:
        fetch(
            str(newest.python), "-m", "build", "--installer=uv", "--outdir", str(folder), str(ROOT)
        )

    return once_a_run("built", make)


@pytest.fixture(scope="session")
def wheel(built: Path) -> Path:
    """The wheel's file."""
    (path,) = built.glob("*.whl")
    return path
