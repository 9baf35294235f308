"""Fixtures of the tests of known bugs."""

from __future__ import annotations

from tests.bench.detection.known_bugs import maker, still

__all__ = ["maker", "still"]
