"""The metrics of errors, a row each, and the confidence of their limits; without numpy."""

from __future__ import annotations

import math
from typing import Final, Literal, NamedTuple


class Metric(NamedTuple):
    """Properties of one metric for budgets, margins and baselines."""

    name: str
    # less is better of an amplitude, of a power, and of a ratio of perplexities; more of decibels,
    # of a similarity, and of a share of rows
    kind: Literal["amplitude", "power", "ratio", "decibels", "similarity", "share"]
    rank: int  # metrics with narrow margins come first where several got worse
    by_sample: str = ""  # field of `SampleErrors` by which two builds are compared sample by sample
    of_tokens: bool = False  # whether only logits of sequences of tokens have it
    is_maximum: bool = False  # whether it depends on a single element
    in_junit: bool = True  # whether JUnit XML has it

    def accepts(self, value: float, limit: float) -> bool:
        """Return whether a value is within a limit, which NaN never is."""
        return value >= limit if self.name in LOWER_BOUNDED else value <= limit

    def after_loss(self, value: float, decibels: float) -> float | None:
        """Return the metric when the error grows by so many dB; None of a share or a ratio."""
        if self.kind == "decibels":
            return value - decibels
        if self.kind == "amplitude":
            return value * 10 ** (decibels / 20)
        if self.kind == "power":
            return value * 10 ** (decibels / 10)
        return 1 - (1 - value) * 10 ** (decibels / 10) if self.kind == "similarity" else None

    @property
    def is_share(self) -> bool:
        """Whether 1 is the best value."""
        return self.kind in ("similarity", "share")

    @property
    def per_neper(self) -> float:
        """Decibels that a change of the metric's sum by a factor of e is."""
        return (20 if self.kind == "amplitude" else 10) / math.log(10)


METRICS: Final = {
    each.name: each
    for each in (
        Metric("max_abs_error", "amplitude", rank=6, is_maximum=True),
        Metric("mean_abs_error", "amplitude", rank=2, by_sample="absolute", in_junit=False),
        Metric("rmse", "amplitude", rank=1, in_junit=False),
        Metric("max_lsb_error", "amplitude", rank=5, is_maximum=True),
        Metric("sqnr_db", "decibels", rank=0, by_sample="noise"),
        Metric("worst_sample_sqnr_db", "decibels", rank=7, in_junit=False),
        Metric("cosine_similarity", "similarity", rank=3),
        Metric("top1_agreement", "share", rank=4),
        Metric("kl", "power", rank=8, by_sample="kl", of_tokens=True),
        Metric("perplexity_ratio", "ratio", rank=9, of_tokens=True),
    )
}

_LESS_IS_BETTER: Final = ("amplitude", "power", "ratio")

UPPER_BOUNDED: Final = tuple(each.name for each in METRICS.values() if each.kind in _LESS_IS_BETTER)
"""Metrics where less is better."""

LOWER_BOUNDED: Final = tuple(each for each in METRICS if each not in UPPER_BOUNDED)
"""Metrics where more is better."""

OF_TOKENS: Final = tuple(each.name for each in METRICS.values() if each.of_tokens)
"""Metrics that only logits of sequences of tokens have."""

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
