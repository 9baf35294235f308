"""
Errors of curves, norms and roots beyond one rounding, in LSB of the output.

Paths are below `tflite/kernels/`. None means that the op is not quantized as the rule expects.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.runtimes.bounds.fixed import quantized_multiplier, rescale_excess
from pytest_edgeq.runtimes.bounds.site import ULP, Site, scale_of
from pytest_edgeq.tflite.subgraph import Tensor

Floats = npt.NDArray[Any]


def table(site: Site) -> float | None:
    """
    A table of 256 codes, each computed in float and rounded once; int16: `table_excess`.

    Input, function, scaling and the sum with the zero point are off by some units in the last place
    (`internal/common.h`, `LUTPopulateInt8`; LOGISTIC, TANH, EXP, LOG, ELU, GELU), and functions
    that change by more than their value where the input does add as much again.
    """
    return 16 * ULP * site.reach if site.output.dtype != "int16" else table_excess(site)


def sigmoid(site: Site, s_in: float) -> float | None:
    """
    LOGISTIC of int16: a table of σ with 24 entries a unit, interpolated linearly.

    In LSB of 2^−15: a line over 1/24 is off by max|σ''|/8 · 24^−2 (0.0962 / 8), entries of 2^−16 by
    1/4, the input by half a step of 1/12288 (σ' ≤ 1/4) and by its multiplier, an integer of at most
    15 bits that is truncated (|x·σ'| ≤ 0.2239). Beyond the table (255/24) σ is replaced by 1.
    (`internal/reference/integer_ops/logistic.h`; `activations.cc`, `SigmoidPrepare`.)
    """
    if site.output.dtype != "int16":
        return table(site)
    line = 0.0962251 / 8 / 24**2
    slopes = 0.5 / 12288 / 4 + 0.2239 * _cut_input(s_in)
    ending = 1 / (1 + math.exp(255 / 24))
    return 32768 * max(line + slopes, ending) + 0.25 + 1


def tanh(site: Site, s_in: float) -> float | None:
    """
    TANH of int16, 2σ(2x) − 1 by LOGISTIC's table: all errors count twice.

    (`internal/reference/integer_ops/tanh.h`; |x · tanh'| ≤ 0.4479, tanh' ≤ 1.)
    """
    if site.output.dtype != "int16":
        return table(site)
    line = 2 * 0.0962251 / 8 / 24**2
    slopes = 0.5 / 12288 + 0.4479 * _cut_input(s_in)
    ending = 2 / (1 + math.exp(255 / 24))
    return 32768 * max(line + slopes, ending) + 0.5 + 1


def _cut_input(s_in: float) -> float:
    """Return the relative error of truncating a multiplier to 15 bits."""
    multiplier = s_in * 4096 * 3
    while multiplier <= 32767 / 2:
        multiplier *= 2
    return 1 - math.floor(multiplier) / multiplier


def hard_swish(site: Site, s_in: float) -> float | None:
    """
    HARD_SWISH in 16 bits (`internal/reference/hard_swish.h`, `activations.cc`, `HardSwishPrepare`).

    x · 128 is brought to the output's scale · 2^e (e ≤ 0), off by 1/2 and by the multiplier's
    truncation; times relu6(x + 3) / 6, off by its own multiplier, shifts and halving, in 2^−15; the
    product is truncated (1 unit) and shifted by e.
    """
    if site.output.dtype == "int16":
        return None
    reals = s_in / 128 / site.scale, s_in / 128 / (3 / 32768)
    e, gate_shift = (int(quantized_multiplier(each)[1]) for each in reals)
    out_cut, gate_cut = (rescale_excess(each, 1, wide=True) for each in reals)
    # Rounded, then doubled by the last bit of a left shift; or rounded, shifted and rounded again.
    gate = 1.0 if gate_shift > 0 else 0.5 * 2.0**gate_shift + (0.5 if gate_shift < 0 else 0.0)
    # Halved with x at most 32767 in place of 32768, and rounded down.
    gate_off = (gate / 2 + 1) / 32768 + gate_cut / 2
    reach = max(site.reach, 3 / site.scale)
    return float(1.5 * 2.0**e + (out_cut + gate_off + 4 * ULP) * reach)


def softmax(site: Site, s_in: float) -> float:
    """
    SOFTMAX of 8 bits in floats: n + 5 operations (`internal/optimized/optimized_ops.h`, `Softmax`).

    The float scale has moved the exponents by 255 · s_in · 2^−24.
    """
    if site.output.dtype == "int16":
        return _softmax_16(site.input(0))
    return (site.input(0).shape[-1] + 5 + 2 * 255 * s_in) * ULP * site.reach


def _softmax_16(x: Tensor) -> float:
    """
    SOFTMAX of int16 by two tables of 512 lines (`internal/reference/softmax.h`, `SoftmaxInt16`).

    In LSB of 2^−15: an exponential e is off by half a step of 10/65535 of its input (2.5 · e), by
    half the error of a line over 10/512 (0.8 · e), and by up to 1.5 in its entries, whatever its
    size. Their sum, 1 or more, divides all; reciprocals and the last rounding add 2.
    """
    return (2.5 + 0.8) * 2 + 1.5 * (x.shape[-1] + 1) + 2


def log_softmax(site: Site, s_in: float) -> float:
    """LOG_SOFTMAX of 8 bits in floats (`internal/optimized/optimized_ops.h`, `LogSoftmax`)."""
    terms = site.reach + 2 * 256 * s_in / site.scale
    return (8 * terms + site.input(0).shape[-1] / site.scale) * ULP


def square_root(site: Site) -> float:
    """SQRT in floats, truncated (`elementwise.cc`, `SqrtEvalQuantized`)."""
    return 0.5 + 4 * ULP * site.reach


def reciprocal_root(site: Site, s_in: float) -> float | None:
    """
    RSQRT of int8: 2^20 / √v, rounded, times 1 / (√s_in · S) (`elementwise.cc`).

    The rounding is 2^−21 · √v ≤ 2^−21 · 16, relative; the root's Newton steps are 2^−20 off.
    """
    if site.output.dtype != "int8":
        return table_excess(site)
    real = 1 / (math.sqrt(s_in) * site.scale)
    return rescale_excess(real / 2**20, site.reach) + (2.0**-16 + 2 * ULP) * site.reach


def l2_normalized(site: Site) -> float:
    """
    L2_NORMALIZATION: codes times 128 / √(sum of squares), whose shift depends on the data.

    The double rounding is 1/4 at most (k ≥ 1); the root is 2^−20 off
    (`internal/reference/integer_ops/l2normalization.h`).
    """
    return 0.25 + 2.0**-18 * site.reach


# --- functions of int16 by a table of 512 lines: a bound by curvature would be far too wide for
# functions that bend only at one place, so the table is rebuilt and compared on every code

_STEPS = 512
_LOW, _HIGH = -32768, 32767


def table_excess(site: Site) -> float | None:
    """
    Return the error of int16 EXP, LOG, GELU and RSQRT beyond 1/2 LSB.

    Entries are moved towards the chord by half the error of its middle, and lines between them are
    rounded (`internal/common.h`, `LUTPopulateInt16`, `LUTLookup`). Two LSB are left for entries
    that float32 or a processor's own logarithm rounds the other way.
    """
    s_in = scale_of(site.input(0))
    function = _function(site)
    if s_in is None or function is None:
        return None
    codes = np.arange(_LOW, _HIGH + 1)
    table = _table(function, s_in, site.scale)
    # A code's seven low bits lie between two entries.
    place, within = 256 + (codes >> 7), codes & 0x7F
    computed = table[place] + (((table[place + 1] - table[place]) * within + 64) >> 7)
    exact = np.clip(function(codes * s_in) / site.scale, _LOW, _HIGH)
    off = np.abs(computed - exact)[codes > 0 if site.op.name in ("LOG", "RSQRT") else slice(None)]
    return max(float(off.max()) - 0.5, 0.0) + 2


def _table(
    function: Callable[[Floats], Floats], s_in: float, scale: float
) -> npt.NDArray[np.int64]:
    """Return the kernel's entries, one more than lines."""
    step = s_in * (_HIGH - _LOW) / _STEPS
    places = s_in * _LOW + step * np.arange(_STEPS + 1)
    entries = np.round(function(places) / scale)
    middles = np.round(function(places[:-1] + step / 2) / scale)
    chords = np.round((entries[1:] + entries[:-1]) / 2)
    entries[:-1] -= np.round((chords - middles) / 2)
    return np.clip(entries, _LOW, _HIGH).astype(np.int64)


def _function(site: Site) -> Callable[[Floats], Floats] | None:
    """Return the kernel's function, which saturates where it is undefined."""
    if site.op.name == "EXP":
        return np.exp
    if site.op.name == "GELU":
        if site.graph.option(site.op, "Approximate", False):
            inner = math.sqrt(2 / math.pi)
            return lambda x: 0.5 * x * (1 + np.tanh(inner * (x + 0.044715 * x**3)))
        from scipy.special import ndtr

        return lambda x: np.asarray(x * ndtr(x), np.float64)
    if site.op.name == "LOG":
        return lambda x: np.where(x > 0, np.log(np.maximum(x, 1e-30)), _LOW * site.scale)
    if site.op.name == "RSQRT":
        return lambda x: np.where(x > 0, np.maximum(x, 1e-30) ** -0.5, _HIGH * site.scale)
    return None
