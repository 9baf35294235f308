"""
Additional rounding errors of XNNPACK's kernels, in LSB of the output.

From the sources of August 2026, `src/microparams-init.c` below XNNPACK's own folder. TFLite's
kernels run the ops that it does not support, so this adds to their bound.
"""

from __future__ import annotations

import math

import numpy as np

from pytest_edgeq.runtimes.bounds.site import ULP, Site, magnitude, option, reach_of, scale_of
from pytest_edgeq.tflite.subgraph import Tensor

_LEAKY = "LEAKY_RELU"


def xnnpack_excess(site: Site) -> float:
    """Return the error to add to the bound of TFLite's own kernels."""
    first = site.input(0)
    s_in = scale_of(first)
    if first is None or s_in is None or site.output.dtype == "int16":
        return 0.0
    if site.op.name in ("QUANTIZE", _LEAKY) and first.dtype == site.output.dtype:
        return _in_256ths(site, first, s_in / site.scale)
    if site.op.name in ("ADD", "SUB"):
        return _added(site)
    if site.op.name == "RESIZE_BILINEAR":
        # Shares of pixels in whole 1/2048, in two directions (`src/indirection.c`,
        # `xnn_indirection_init_resize_bilinear2d_hwc_q11`).
        return 2 * 2.0**-12 * 255 + 4 * ULP * magnitude(site)
    # Everything else is rescaled in floats: sum, scale, product and rounding are a unit each.
    return 6 * ULP * magnitude(site)


def _in_256ths(site: Site, first: Tensor, real: float) -> float:
    """
    Requantization and LEAKY_RELU multiply codes by a multiple of 1/256.

    (`xnn_init_qs8_cvt_scalar_params`, `xnn_init_qs8_lrelu_scalar_params`)
    """
    slope = abs(float(option(site.graph, site.op, "Alpha") or 0.0)) if site.op.name == _LEAKY else 0
    return max(
        _multiplier_excess(each, reach_of(first), site.reach) for each in (real, real * slope)
    )


def _multiplier_excess(real: float, input_reach: float, output_reach: float) -> float:
    """Return the error of rounding a multiplier, on codes of such ranges."""
    off = abs(round(256 * real) / 256 - real)
    return min(off * input_reach, off / real * output_reach) if real else 0.0


def _added(site: Site) -> float:
    """ADD and SUB multiply each side by 20 bits and an exponent (`xnn_init_qs8_add_…_params`)."""
    sides = [tensor for tensor in (site.input(0), site.input(1)) if tensor is not None]
    scales = [float(np.max(tensor.scales)) / site.scale for tensor in sides]
    unit = 2.0 ** (math.floor(math.log2(max(scales))) - 20)
    return 0.5 * unit * sum(reach_of(tensor) for tensor in sides) + 4 * ULP * magnitude(site)
