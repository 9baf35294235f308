"""
Functions of int16 that TFLite computes by a table of 512 lines.

A bound by curvature would be far too wide for functions that bend only at one place, so the
kernel's table is rebuilt and compared with the function, on every code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.runtimes.bounds.site import Site, option, scale_of

Floats = npt.NDArray[Any]

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
    entries = _whole(function(places), scale)
    middles = _whole(function(places[:-1] + step / 2), scale)
    chords = np.round((entries[1:] + entries[:-1]) / 2)
    entries[:-1] -= np.round((chords - middles) / 2)
    return np.clip(entries, _LOW, _HIGH).astype(np.int64)


def _whole(values: Floats, scale: float) -> Floats:
    return np.round(values / scale)


def _function(site: Site) -> Callable[[Floats], Floats] | None:
    """Return the kernel's function, which saturates where it is undefined."""
    if site.op.name == "EXP":
        return np.exp
    if site.op.name == "GELU":
        return _gelu_by_tanh if option(site.graph, site.op, "Approximate") else _gelu
    if site.op.name == "LOG":
        return lambda x: np.where(x > 0, np.log(np.maximum(x, 1e-30)), _LOW * site.scale)
    if site.op.name == "RSQRT":
        return lambda x: np.where(x > 0, np.maximum(x, 1e-30) ** -0.5, _HIGH * site.scale)
    return None


def _gelu(x: Floats) -> Floats:
    from scipy.special import ndtr

    return np.asarray(x * ndtr(x), np.float64)


def _gelu_by_tanh(x: Floats) -> Floats:
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return np.asarray(0.5 * x * (1 + np.tanh(inner)), np.float64)
