from __future__ import annotations

from pathlib import Path

import pytest

from tests.ecosystem.overlay import PYPROJECT, Overlay
from tests.roots import Provide


@pytest.fixture(scope="session")
def newest(once_a_run: Provide) -> Overlay:
    """The running environment with the dependency groups `plugins` and `packaging`."""

    def make(folder: Path) -> None:
        Overlay.make(folder).install(
            *("--group", f"{PYPROJECT}:plugins", "--group", f"{PYPROJECT}:packaging")
        )

    return Overlay(once_a_run("newest", make))
