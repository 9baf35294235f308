"""Check that tests of targets and GPUs leave no process behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.processes import left_after, target_workers


@pytest.fixture
def _no_process_is_left() -> Iterator[None]:
    before = target_workers()
    yield
    assert not left_after([each for each in target_workers() if each not in before])
