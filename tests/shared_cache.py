"""Where the tests of one run keep their conversions, also for the processes that they start."""

from __future__ import annotations

import os

VARIABLE = "EDGEQ_TESTS_CACHE"


def shared_cache() -> str | None:
    """Return the directory of the run's conversion cache; None where it is off."""
    return os.environ.get(VARIABLE)
