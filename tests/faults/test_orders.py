"""Baselines do not depend on the order of the tests, nor on which worker runs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import sessions
from tests.faults.orders import run_in_random_orders

# 20 sessions of pytest on two workers.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_all_orders_store_the_same(tmp_path: Path) -> None:
    """`python -m tests.faults.orders` does so with any suite."""
    run_in_random_orders((), tmp_path, 0, 20)


def test_an_order_that_shows_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above looks for: a value that depends on the test before."""
    monkeypatch.setattr(
        sessions,
        "CONFTEST",
        sessions.CONFTEST.replace(
            '"module": "layer1.0"', '"module": f"layer{next(calls)}"'
        ).replace("import os\n", "import itertools, os\ncalls = itertools.count()\n", 1),
    )
    with pytest.raises(AssertionError, match="stored differently than by seed 0"):
        run_in_random_orders((), tmp_path, 0, 6)
