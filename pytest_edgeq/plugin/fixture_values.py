"""Values of a test's fixtures."""

from __future__ import annotations

import sys
from typing import Any

import pytest


def fixture_values(item: pytest.Item, module: str, name: str) -> list[Any]:
    """Return the fixtures' values of one of our classes, which may not be imported."""
    loaded = sys.modules.get(f"pytest_edgeq.{module}")
    if loaded is None:
        return []
    kind: type = getattr(loaded, name)
    return [each for each in getattr(item, "funcargs", {}).values() if isinstance(each, kind)]
