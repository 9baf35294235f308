"""The garbage collector during a conversion."""

from __future__ import annotations

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


def test_older_objects_are_passed_over_and_given_back() -> None:
    """Existing objects are frozen during the block; a nested block changes nothing."""
    with frozen_heap():
        with frozen_heap():
            pass
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


def test_what_somebody_else_froze_stays_frozen() -> None:
    """A project that freezes its own heap finds it so afterwards."""
    gc.freeze()
    with frozen_heap():
        pass
    # Not how many: frozen objects go when nothing holds them any more.
    assert gc.get_freeze_count() > 0


def test_nothing_is_collected_during_an_import() -> None:
    """The collector runs again afterwards."""
    with paused_collector():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_an_import_that_fails_leaves_the_collector_on() -> None:
    """An exception of the import is raised."""
    with pytest.raises(ImportError), paused_collector():
        raise ImportError
    assert gc.isenabled()


def test_who_turned_the_collector_off_finds_it_so() -> None:
    """A project that collects by itself keeps that."""
    gc.disable()
    with frozen_heap(), paused_collector():
        pass
    assert not gc.isenabled()
