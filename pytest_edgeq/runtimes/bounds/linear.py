"""
Errors of sums, products and other linear ops beyond one rounding, in LSB.

Paths are below `tflite/kernels/`. None means that the op is not quantized as the rule expects.
"""

from __future__ import annotations

import math

import numpy as np

from pytest_edgeq.runtimes.bounds.fixed import double_rounding, quantized_multiplier, rescale_excess
from pytest_edgeq.runtimes.bounds.floats import reduction_length
from pytest_edgeq.runtimes.bounds.site import (
    ULP,
    Site,
    magnitude,
    reach_of,
    scale_of,
)
from pytest_edgeq.tflite.ops import facts_of
from pytest_edgeq.tflite.roles import present


def joined(site: Site) -> float | None:
    """
    CONCATENATION copies codes: `concatenation.cc` demands equal scales for int8 and int16.

    uint8 is code · s/S − zp · s/S in floats, three roundings of terms that reach twice as far as
    the output's codes (`internal/optimized/optimized_ops.h`, `ConcatenationWithScaling`).
    """
    return 6 * ULP * 2 * site.reach if site.output.dtype == "uint8" else 0.0


def product(site: Site) -> float | None:
    """
    Sums of products, rescaled by s_in · s_w / S; the sum itself is exact.

    The rescaling rounds, and so does the bias, a multiple of s_in · s_w. The multiplier is computed
    in double for each channel, for uint8, BATCH_MATMUL and FULLY_CONNECTED with one scale in float
    (`kernel_util.cc`, `PopulateConvolutionQuantizationParams`, `GetQuantizedConvolutionMultipler`).
    16×8 with 64-bit sums is rescaled from int64 (`internal/reference/integer_ops/`: `conv.h`,
    `depthwise_conv.h`, `transpose_conv.h`, `fully_connected.h`; `internal/reference/`:
    `batch_matmul.h`); with a bias of 32 bits the file chooses, and the greater error counts here.
    """
    facts = facts_of(site.op.name)
    x, w = site.input(facts.inputs[0]), site.input(facts.weights[0])
    s_in = scale_of(x)
    if s_in is None or not len(w.scales):
        return None
    product = s_in * w.scales.astype(np.float64)
    real = product / site.scale
    excess = rescale_excess(real, site.reach) + ULP * site.reach
    if x.dtype == "int16":
        excess = max(excess, rescale_excess(real, site.reach, wide=True))
    # Dequantized weights and inputs are off by a unit each in float32.
    terms = reduction_length(site.graph, site.op) * reach_of(w) * reach_of(x)
    excess += 2 * ULP * terms * float(real.max())
    return excess + (0.5 * float(real.max()) if present(site.op, facts.biases) else 0.0)


def added(site: Site, first: float, second: float) -> float:
    """
    ADD and SUB: both sides are rescaled to 2 · max(s1, s2) / 2^20 (int16: 2^15), added, rescaled.

    Bringing a side there is a rescaling by at most 1/2, with its two roundings (`add.cc`, `sub.cc`,
    `Prepare`; `internal/reference/integer_ops/add.h`, `AddFunc`). int16 with scales that are powers
    of two shifts instead, which is closer.
    """
    sides = np.array([first, second], np.float64)
    common = 2 * float(sides.max())
    unit = common / 2 ** (15 if site.output.dtype == "int16" else 20)
    _, shift = quantized_multiplier(sides / common)
    sides_off = float(np.sum(0.5 + double_rounding(shift))) * unit / site.scale
    return sides_off + rescale_excess(unit / site.scale, site.reach) + 4 * ULP * magnitude(site)


def multiplied(site: Site, first: float, second: float) -> float:
    """MUL: codes multiplied, times s1 · s2 / S in float (`mul.cc`, `Prepare`)."""
    return rescale_excess(first * second / site.scale, site.reach) + 2 * ULP * site.reach


def divided(site: Site, first: float, second: float) -> float:
    """
    DIV: times the reciprocal of the divisor's code in 31 bits, some units of 2^−29 off.

    The quotient has 29 bits or more before it is shifted: its double rounding is below 2^−20
    (`internal/reference/div.h`, `DivElementwise`). The multiplier takes two float operations.
    """
    return 2.0**-20 + (2 * ULP + 2.0**-26) * site.reach


def rescaled(site: Site, s_in: float) -> float:
    """
    RELU and variants, ABS, QUANTIZE of codes: times s_in / S, computed in float or double.

    (`activations.cc`, `ReluPrepare`; `quantize.cc`, `Prepare`; `elementwise.cc`,
    `SetAbsOutputMultiplier`.) Bounds of the activation are rounded to codes, as r is.
    """
    return rescale_excess(s_in / site.scale, site.reach) + ULP * site.reach


def quantized(site: Site) -> float | None:
    """
    QUANTIZE: floats are divided by the scale, or multiplied by its inverse, and rounded.

    (`internal/optimized/optimized_ops.h`, `AffineQuantize`)
    """
    x = site.input(0)
    if x.is_floating_point:
        return 2 * ULP * site.reach
    s_in = scale_of(x)
    return None if s_in is None else rescaled(site, s_in)


def leaky(site: Site, s_in: float) -> float:
    """LEAKY_RELU: a multiplier above zero, one below (`activations.cc`, `LeakyReluPrepare`)."""
    slope = abs(float(site.graph.option(site.op, "Alpha", 0.0)))
    real = s_in / site.scale * np.array([1.0, slope] if slope else [1.0])
    return rescale_excess(real, site.reach) + 2 * ULP * site.reach


def parametric(site: Site, s_in: float, s_alpha: float) -> float:
    """PRELU: s_in / S above zero, s_in · s_alpha / S below (`activations.cc`, `PreluPrepare`)."""
    real = np.array([s_in, s_in * s_alpha]) / site.scale
    return rescale_excess(real, site.reach) + 2 * ULP * site.reach


def squared_difference(site: Site, first: float, second: float) -> float:
    """
    SQUARED_DIFFERENCE: both at u = 2 · max(s1, s2) / 2^7, their difference d squared, rescaled.

    Sides that are off by e in sum make d² off by 2de + e², and d² u² ≤ reach · S where it is not
    clipped (`squared_difference.cc`).
    """
    sides = np.array([first, second], np.float64)
    unit = 2 * float(sides.max()) / 2**7
    real = unit**2 / site.scale
    _, shift = quantized_multiplier(sides / (2 * float(sides.max())))
    off = float(np.sum(0.5 + double_rounding(shift)))
    difference = math.sqrt(2 * site.reach / real)
    return real * (2 * difference * off + off**2) + rescale_excess(real, 2 * site.reach)


def mean(site: Site, s_in: float) -> float:
    """
    MEAN: the exact sum of codes times s_in / (n · S).

    The general way divides the significand by n, truncating (`internal/reference/reduce.h`,
    `QuantizedMeanOrSum`). Over height and width of four dimensions that are kept, the multiplier is
    computed in floats, and the zero point, rescaled and rounded separately, adds up to another half
    (`internal/optimized/integer_ops/mean.h`).
    """
    x = site.input(0)
    n = reduction_length(site.graph, site.op)
    real = s_in / site.scale
    significand, shift = (int(value) for value in quantized_multiplier(real))
    power = min(n.bit_length() - 1, 31 + shift)
    stored = (significand << power) // n
    off = abs(math.ldexp(stored, shift - power - 31) * n / real - 1)
    excess = float(double_rounding(shift - power)) + off * site.reach + 4 * ULP * magnitude(site)
    if len(x.shape) == 4 and site.output.shape[1:3] == (1, 1):
        offset = float(x.zero_points[0]) * real
        offset_error = abs(offset - round(offset)) + 3 * ULP * abs(offset)
        planar = (
            rescale_excess(real / n, site.reach + abs(offset)) + 3 * ULP * site.reach + offset_error
        )
        excess = max(excess, planar)
    return excess


def summed(site: Site, s_in: float) -> float:
    """
    SUM: the exact sum of codes times s_in / S, minus their zero points.

    Six float operations, relative to the greater of the two (`internal/optimized/reduce.h`,
    `QuantizedMeanOrSum`).
    """
    x = site.input(0)
    n = reduction_length(site.graph, site.op)
    return 6 * ULP * (n * reach_of(x) * s_in / site.scale + site.reach)


def summed_whole(site: Site, s_in: float) -> float:
    """SUM of the reference kernels rescales the whole sum (`internal/reference/reduce.h`)."""
    return rescale_excess(s_in / site.scale, site.reach)


def averaged(site: Site, s_in: float) -> float:
    """AVERAGE_POOL_2D: the exact average of codes (`internal/optimized/integer_ops/pooling.h`)."""
    return 4 * ULP * magnitude(site)


def interpolated(site: Site, s_in: float) -> float | None:
    """
    RESIZE_BILINEAR between codes, with steps rounded to 2^−10 pixel, so that positions drift.

    A drift of δ makes an error of δ times the difference of two neighbours, at most all codes, in
    each direction (`internal/reference/resize_bilinear.h`, `ResizeBilinearInteger`). uint8 uses
    floats and truncates after adding 1/2.
    """
    x = site.input(0)
    if len(x.shape) != 4:
        return None
    if site.output.dtype == "uint8":
        return 64 * ULP * site.reach
    corners = bool(site.graph.option(site.op, "AlignCorners", False))
    centers = bool(site.graph.option(site.op, "HalfPixelCenters", False))
    span = 255 if site.output.dtype == "int8" else 65535
    return 4 * ULP * site.reach + span * sum(
        _drift(x.shape[axis], site.output.shape[axis], corners=corners, centers=centers)
        for axis in (1, 2)
    )


def _drift(before: int, after: int, *, corners: bool, centers: bool) -> float:
    """Return the greatest drift of a position along one axis, in pixels."""
    ends = corners and after > 1
    n_in, n_out = (before - 1, after - 1) if ends else (before, after)
    step = (1024 * n_in + n_out // 2) // n_out
    places = np.arange(after)
    stored = places * step + (step // 2 - 512 if centers else 0)
    real = (places + 0.5) * (n_in / n_out) - 0.5 if centers else places * (n_in / n_out)
    # Beyond the edge both use the pixel at the edge.
    off = np.clip(stored / 1024, 0, before - 1) - np.clip(real, 0, before - 1)
    return float(np.abs(off).max())
