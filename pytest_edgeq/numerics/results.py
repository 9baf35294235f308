"""Measured errors: those of one output, and of all outputs of a stage."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np

from .metric_table import LOWER_BOUNDED, METRICS, OF_TOKENS, UPPER_BOUNDED
from .metrics import json_number, perplexity_ratio, sqnr_db


@dataclass(frozen=True, slots=True)
class ElementError:
    """One element, with its expected and actual value."""

    sample: int  # index of the sample
    index: tuple[int, ...]  # of the element in the output
    reference: float
    actual: float

    def __str__(self) -> str:
        at = f"sample {self.sample}, index {self.index}"
        return f"{at}: expected {self.reference:.6g}, got {self.actual:.6g}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain, JSON-able data with sorted keys."""
        numbers = {
            key: json_number(getattr(self, key)) for key in ("actual", "reference", "sample")
        }
        return dict(sorted({**numbers, "index": list(self.index)}.items()))


class SampleErrors(NamedTuple):
    """The sums of one output over one sample, the unit of the bootstrap."""

    sample: int  # index of the sample
    n: int  # number of elements
    signal: float  # Σf²
    noise: float  # Σ(f−q)²
    power: float  # Σq²
    product: float  # Σfq
    absolute: float  # Σ|f−q|
    largest: float  # max|f−q|
    agreeing: int  # rows where the top-1 class agrees, or that match (`OutputErrors.chosen`)
    rows: int  # all rows
    magnitude: float  # Σ|f|
    peak: float  # max|f|
    first: int  # rows of the reference with which zeros agree: the top-1 class is the first one
    # Of logits of a sequence of tokens; 0 of any other output.
    positions: int = 0  # number of positions
    kl: float = 0.0  # ΣKL(reference‖actual) over the positions, in nats
    kl_of_zeros: float = 0.0  # ΣKL(reference‖uniform)
    tokens: int = 0  # number of positions whose next token is known
    nll: float = 0.0  # Σ−log q(next token)
    nll_reference: float = 0.0  # Σ−log p(next token)
    nll_squares: float = 0.0  # Σ(log p − log q)² of the next token


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputErrors:
    """
    The errors of one output, pooled in float64 over all elements of all samples.

    With anything non-finite on either side every metric is NaN.

    Attributes:
        name: the output.
        dtype: dtype of what was measured, after dequantization.
        scale: one LSB; None for an output without a scale.
        n_samples: number of samples.
        n_elements: number of elements over all samples.
        nonfinite_reference: number of elements of the reference that are NaN or infinite.
        nonfinite_actual: the same of what was measured.
        degenerate: both sides are all zero (or have no elements): nothing was tested.
        max_abs_error: max|f−q|.
        mean_abs_error: Σ|f−q| / n.
        rmse: √(Σ(f−q)² / n).
        max_lsb_error: max|f−q| / S; None without a scale. 1/√12 of rmse/S is one ideal rounding.
        sqnr_db: 10·log10(Σf² / Σ(f−q)²).
        worst_sample_sqnr_db: the least SQNR of one sample; degenerate samples are left out.
        worst_sample: index of that sample (the first one, where all are degenerate).
        cosine_similarity: Σfq / (√Σf² · √Σq²).
        top1_agreement: share of rows where the top-1 class agrees; None of another rank than 2. Of
            an output that holds a choice the share of rows that match (`error_sums.match_counts`).
            Of logits of a language model rows whose two greatest logits in the reference are nearer
            than twice the error do not count.
        chosen: whether it holds a choice: labels, sorted boxes, masks of a comparison.
        kl: mean of KL(reference‖actual) over all positions, in nats; None without tokens.
        perplexity_ratio: perplexity of the file over that of the reference on the known next
            tokens, exp(mean NLL − mean NLL of the reference); None without tokens.
        max_abs_index: the element of max_abs_error, or the first non-finite one;
            None without elements.
        spread: rms of the reference's difference from its mean over the samples, or None.
        samples: the sums of each finite sample, by index.
    """

    name: str
    dtype: str
    scale: float | None
    n_samples: int
    n_elements: int
    nonfinite_reference: int
    nonfinite_actual: int
    degenerate: bool
    max_abs_error: float
    mean_abs_error: float
    rmse: float
    max_lsb_error: float | None
    sqnr_db: float
    worst_sample_sqnr_db: float
    worst_sample: int
    cosine_similarity: float
    top1_agreement: float | None
    max_abs_index: ElementError | None
    chosen: bool = False
    kl: float | None = None
    perplexity_ratio: float | None = None
    spread: float | None = field(default=None, repr=False, compare=False)
    samples: tuple[SampleErrors, ...] = field(default=(), repr=False, compare=False)

    @property
    def spread_db(self) -> float:
        """SQNR of what varies between the samples; NaN if unknown, or for less than 4 samples."""
        if not self.spread or self.n_samples < 4 or self.chosen:
            return math.nan
        return sqnr_db(self.spread**2, self.rmse**2)

    @property
    def nonfinite(self) -> int:
        """Number of non-finite elements on both sides together."""
        return self.nonfinite_reference + self.nonfinite_actual

    def to_dict(self) -> dict[str, Any]:
        """Return plain, JSON-able data with sorted keys; NaN and infinity as text."""
        names = (each.name for each in fields(self) if each.compare)
        data: dict[str, Any] = {name: getattr(self, name) for name in names}
        for name in (*UPPER_BOUNDED, *LOWER_BOUNDED, "scale"):
            data[name] = json_number(data[name])
        for name in OF_TOKENS:
            if data[name] is None:
                del data[name]
        data["max_abs_index"] = self.max_abs_index and self.max_abs_index.to_dict()
        data["nonfinite"] = self.nonfinite
        return dict(sorted(data.items()))


@dataclass(frozen=True, slots=True)
class StageErrors:
    """
    The errors of one stage: every output, and the worst over them of every metric.

    Worst is the greatest error, the least similarity; NaN is worse than any number.

    Attributes:
        outputs: errors by output name, in the model's own output order.
        max_abs_error: greatest max|f−q|.
        mean_abs_error: greatest mean of `|f−q|`.
        rmse: greatest root of the mean of (f−q)².
        max_lsb_error: greatest max|f−q| / S of the outputs that have a scale; None where none has.
        sqnr_db: least SQNR.
        worst_sample_sqnr_db: least SQNR of one output in one sample.
        cosine_similarity: least cosine similarity.
        top1_agreement: least top-1 agreement of the outputs that have classes; None where none has.
        kl: greatest KL divergence of the outputs that have tokens; None where none has.
        perplexity_ratio: greatest ratio of perplexities of these outputs, or None.
    """

    outputs: Mapping[str, OutputErrors]
    max_abs_error: float = field(init=False, repr=False, compare=False)
    mean_abs_error: float = field(init=False, repr=False, compare=False)
    rmse: float = field(init=False, repr=False, compare=False)
    max_lsb_error: float | None = field(init=False, repr=False, compare=False)
    sqnr_db: float = field(init=False, repr=False, compare=False)
    worst_sample_sqnr_db: float = field(init=False, repr=False, compare=False)
    cosine_similarity: float = field(init=False, repr=False, compare=False)
    top1_agreement: float | None = field(init=False, repr=False, compare=False)
    kl: float | None = field(init=False, repr=False, compare=False)
    perplexity_ratio: float | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for metric in METRICS:
            measured = (getattr(output, metric) for output in self.outputs.values())
            values = [value for value in measured if value is not None]
            worst = np.max if metric in UPPER_BOUNDED else np.min  # both give NaN for any
            object.__setattr__(self, metric, float(worst(values)) if values else None)

    @property
    def n_samples(self) -> int:
        """Number of samples."""
        return next(iter(self.outputs.values())).n_samples

    @property
    def n_elements(self) -> int:
        """Number of elements over all samples and outputs."""
        return sum(output.n_elements for output in self.outputs.values())

    @property
    def nonfinite(self) -> int:
        """Number of non-finite elements over all outputs, both sides together."""
        return sum(output.nonfinite for output in self.outputs.values())

    @property
    def degenerate(self) -> bool:
        """Whether nothing was tested at one output or more."""
        return any(output.degenerate for output in self.outputs.values())

    def to_dict(self) -> dict[str, Any]:
        """Return plain, JSON-able data with sorted keys; NaN and infinity as text."""
        data: dict[str, Any] = {
            name: json_number(getattr(self, name))
            for name in measured_metrics(self.outputs.values())
        }
        data["outputs"] = {name: self.outputs[name].to_dict() for name in sorted(self.outputs)}
        for name in ("degenerate", "n_elements", "n_samples", "nonfinite"):
            data[name] = getattr(self, name)
        return dict(sorted(data.items()))


def measured_metrics(outputs: Iterable[OutputErrors]) -> tuple[str, ...]:
    """Return all metrics, those of tokens only where an output has them."""
    has = {name for each in outputs for name in OF_TOKENS if getattr(each, name) is not None}
    return tuple(
        name for name in (*UPPER_BOUNDED, *LOWER_BOUNDED) if name in has or name not in OF_TOKENS
    )


def metric_cell(output: OutputErrors, metric: str) -> str:
    """Return a metric as text, in the digits that are compared."""
    value = getattr(output, metric)
    if value is None:
        return "-"
    # 0.99987 and 0.99912 are far apart, and both read 0.9999 or 1 in few digits.
    digits = {"cosine_similarity": ".6f", "perplexity_ratio": ".6g"}.get(metric, ".4g")
    return f"{value:{digits}}"


# Scales that TFLite fixes for SOFTMAX, LOGISTIC and TANH. Where nothing is detected all values are
# less than a step, of a sound model, too; of a range that was calibrated they are not.
FIXED_SCALES = (1 / 256, 1 / 128, 1 / 32768)


def wiped(errors: OutputErrors) -> dict[str, float]:
    """
    Return the metrics of an all-zero output on the same samples.

    The top-1 agreement is that of the first class, which the argmax of zeros is, or of a guess
    among all classes, whichever is more. Empty where the reference is zero itself.
    """
    samples = errors.samples
    signal = math.fsum(each.signal for each in samples)
    if not signal:
        return {}
    n = sum(each.n for each in samples)
    peak = max(each.peak for each in samples)
    metrics = dict.fromkeys(("sqnr_db", "worst_sample_sqnr_db", "cosine_similarity"), 0.0)
    metrics["max_abs_error"] = peak
    metrics["mean_abs_error"] = math.fsum(each.magnitude for each in samples) / n
    metrics["rmse"] = math.sqrt(signal / n)
    if errors.scale:
        metrics["max_lsb_error"] = peak / errors.scale
    positions = sum(each.positions for each in samples)
    if rows := sum(each.rows for each in samples):
        classes = n / (positions or rows)
        guessed = 0.0 if errors.chosen else rows / classes
        metrics["top1_agreement"] = max(sum(each.first for each in samples), guessed) / rows
    if positions:
        metrics["kl"] = math.fsum(each.kl_of_zeros for each in samples) / positions
    if tokens := sum(each.tokens for each in samples):
        mean = math.fsum(each.nll_reference for each in samples) / tokens
        metrics["perplexity_ratio"] = perplexity_ratio(math.log(n / positions), mean)
    return metrics


def is_below_a_step(errors: OutputErrors) -> bool:
    """Whether the reference is below one step of a scale that was never calibrated."""
    rms = errors.rmse * 10 ** (errors.sqnr_db / 20)
    return errors.scale in FIXED_SCALES and rms < errors.scale
