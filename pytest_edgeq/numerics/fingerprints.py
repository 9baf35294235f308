"""Kinds of fingerprints of samples; imported without numpy."""

from __future__ import annotations

from typing import Final

BY_SAMPLE: Final = "by sample "
"""
Begins a fingerprint over a digest of each sample.

One without it is over the bytes of all samples, which a single process has to read in order.
"""
