"""The garbage collector during a conversion."""

from __future__ import annotations

import gc

from pytest_edgeq.process_state import frozen_heap


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
    try:
        with frozen_heap():
            pass
        # Not how many: frozen objects go when nothing holds them any more.
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
