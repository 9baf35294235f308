"""Shared by all tests; pytest allows `pytest_plugins` at the top only."""

from __future__ import annotations

pytest_plugins = ["pytester"]
