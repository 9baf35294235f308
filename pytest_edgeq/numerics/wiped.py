"""
The metrics of an output of zeros: a limit that accepts these tests nothing.

Zeros are what a wiped layer, a constant at the zero point or an output that was never written read
as. Their metrics follow from the reference alone: SQNR is 0 dB, because the noise is the signal.
"""

from __future__ import annotations

import math

from .results import LOWER_BOUNDED, OutputErrors

FIXED_SCALES = (1 / 256, 1 / 128, 1 / 32768)
"""
Scales that TFLite fixes for SOFTMAX, LOGISTIC and TANH.

Where nothing is detected all values are less than a step, of a sound model, too; of a range that
was calibrated they are not.
"""


def wiped(errors: OutputErrors) -> dict[str, float]:
    """
    Return every metric that zeros in place of this output would have on the same samples.

    The top-1 agreement is that of the first class, which the argmax of zeros is, or of a guess
    among all classes, whichever is more. Empty where the reference is zero itself.
    """
    samples = errors.samples
    signal = math.fsum(each.signal for each in samples)
    if not signal:
        return {}
    n = sum(each.n for each in samples)
    peak = max(each.peak for each in samples)
    metrics = {
        "max_abs_error": peak,
        "mean_abs_error": math.fsum(each.magnitude for each in samples) / n,
        "rmse": math.sqrt(signal / n),
        "sqnr_db": 0.0,
        "worst_sample_sqnr_db": 0.0,
        "cosine_similarity": 0.0,
    }
    if errors.scale:
        metrics["max_lsb_error"] = peak / errors.scale
    if rows := sum(each.rows for each in samples):
        guessed = 0.0 if errors.chosen else rows**2 / n
        metrics["top1_agreement"] = max(sum(each.first for each in samples), guessed) / rows
    return metrics


def accepts(metric: str, limit: float, value: float) -> bool:
    """Whether a metric of this value is within this limit."""
    return value >= limit if metric in LOWER_BOUNDED else value <= limit


def is_below_a_step(errors: OutputErrors) -> bool:
    """Whether the reference's values are less than a step of a scale that no calibration set."""
    rms = errors.rmse * 10 ** (errors.sqnr_db / 20)
    return errors.scale in FIXED_SCALES and rms < errors.scale
