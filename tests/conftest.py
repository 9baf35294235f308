"""Shared by all tests; pytest allows `pytest_plugins` at the top only."""

from __future__ import annotations

import importlib.util

pytest_plugins = ["pytester"]

# The examples run without the libraries that only tests need.
if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import HealthCheck, settings

    # The same examples in every run; and no verdict on a machine that is busy with something else.
    settings.register_profile(
        "edgeq", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("edgeq")
