"""Fixtures of the tests of the conversion cache."""

from __future__ import annotations

import pytest

from pytest_edgeq import Edgeq


@pytest.fixture(autouse=True)
def _no_shared_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of the cache bring their own directory."""
    monkeypatch.setitem(Edgeq.__init__.__kwdefaults__, "cache_dir", None)  # type: ignore[arg-type]
