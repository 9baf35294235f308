"""The confidence level of limits on remembered errors."""

from __future__ import annotations

from typing import Final

LEVEL: Final = 0.9999
"""
One-sided, of one metric: three stages of eight metrics in 200 rebuilds are 4800 tests, of which
less than one may fail.
"""


def student(freedom: float) -> float:
    """Return Student's t at `LEVEL`, one-sided, with so many degrees of freedom."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, LEVEL))
