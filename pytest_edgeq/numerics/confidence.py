"""The confidence of stored limits, and the kinds of fingerprints; without numpy."""

from __future__ import annotations

from typing import Final

# One-sided, of one metric: three stages of eight metrics in 200 rebuilds are 4800 tests, of which
# less than one may fail.
LEVEL: Final = 0.9999

# Begins a fingerprint over a digest of each sample; one without it is over the bytes of all
# samples, which a single process has to read in order.
BY_SAMPLE: Final = "by sample "


def student(freedom: float) -> float:
    """Return Student's t at `LEVEL`, one-sided, with so many degrees of freedom."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, LEVEL))
