"""What the tests of this folder share: an `Edgeq` outside the fixture, and a fixed seed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from pytest_edgeq import Edgeq

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def maker(tmp_path: Path) -> Edgeq:
    """Quantize and compare; writes into a folder of the test's own."""
    return Edgeq(directory=tmp_path)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Weights of layers made in a test are the same in each run."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_shared_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversions with and without a shim have one key."""
    monkeypatch.setitem(Edgeq.__init__.__kwdefaults__, "cache_dir", None)  # type: ignore[arg-type]
