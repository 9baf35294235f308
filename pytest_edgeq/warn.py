"""Warnings that point at the user's own line, however deep in the package they arise."""

from __future__ import annotations

import sys
import warnings

__all__ = ["warn_user"]


def warn_user(message: str) -> None:
    """Warn at the line that called into this package."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def _is_ours(module: str) -> bool:
    return module.split(".")[0] == "pytest_edgeq"
