"""The garbage collector during a conversion."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import pytest

from pytest_edgeq.runtimes.process_state import frozen_heap, paused_collector


@pytest.fixture(autouse=True)
def _collector() -> Iterator[None]:
    enabled = gc.isenabled()
    yield
    gc.unfreeze()
    (gc.enable if enabled else gc.disable)()


@pytest.mark.slow
def test_older_objects_are_passed_over_and_given_back() -> None:
    """A nested block changes nothing, and what a project has frozen stays so."""
    with frozen_heap():
        with frozen_heap():
            pass
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0
    gc.freeze()
    with frozen_heap():
        pass
    # Not how many: frozen objects go when nothing holds them any more.
    assert gc.get_freeze_count() > 0


@pytest.mark.parametrize("runs", [True, False])
def test_nothing_is_collected_during_an_import(runs: bool) -> None:
    """Afterwards the collector runs if it did before, also where the import fails."""
    (gc.enable if runs else gc.disable)()
    with contextlib.suppress(ImportError), frozen_heap(), paused_collector():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled() is runs
