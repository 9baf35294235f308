"""What the tests of the flows share: one `Edgeq`, outside the fixture, with its own folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_edgeq import Edgeq

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def maker(tmp_path: Path) -> Edgeq:
    """Quantize and compare; writes into a folder of the test's own."""
    return Edgeq(directory=tmp_path)
