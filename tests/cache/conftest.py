"""Fixtures of the tests of the conversion cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_edgeq import Edgeq
from pytest_edgeq.quantize.cache.directory import Store


@pytest.fixture(autouse=True)
def _no_shared_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of the cache bring their own directory."""
    monkeypatch.setitem(Edgeq.__init__.__kwdefaults__, "cache_dir", None)  # type: ignore[arg-type]


@pytest.fixture
def said() -> list[str]:
    """The warnings of the store."""
    return []


@pytest.fixture
def store(tmp_path: Path, said: list[str]) -> Store:
    """An empty one."""
    return Store(tmp_path / "cache", said.append)
