"""Models that are converted once for a module of tests."""

from __future__ import annotations

import pytest

from pytest_edgeq import Edgeq
from tests.localize.builds import Build, built_once


@pytest.fixture(scope="module")
def build(maker: Edgeq) -> Build:
    """Convert each model by each flow once."""
    return built_once(maker)
