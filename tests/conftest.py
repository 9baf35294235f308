"""Shared by all tests; pytest allows `pytest_plugins` at the top only."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

from tests.shared_cache import VARIABLE

if TYPE_CHECKING:
    import pytest

pytest_plugins = ["pytester"]

# The examples run without the libraries that only tests need.
if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import HealthCheck, settings

    # The same examples in every run; and no verdict on a machine that is busy with something else.
    settings.register_profile(
        "edgeq", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("edgeq")


def pytest_sessionstart(session: pytest.Session) -> None:
    """
    Let every `Edgeq()` of the tests share the run's conversion cache.

    So the tests, the workers of pytest-xdist and the processes that tests start convert each model
    once. Tests of the cache, and tests that change the libraries, turn it off.
    """
    from pytest_edgeq import Edgeq
    from pytest_edgeq.plugin import cache_dir_key

    directory = session.config.stash[cache_dir_key]
    defaults = Edgeq.__init__.__kwdefaults__
    assert defaults is not None, "unreachable because it has keyword arguments"
    defaults["cache_dir"] = directory
    if directory is not None:
        os.environ[VARIABLE] = str(directory)
