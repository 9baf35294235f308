"""Health checks that need no inference: scales, biases, samples met twice."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

from .findings import (
    BAD_SCALE,
    BIAS_AT_INT32_LIMIT,
    CALIBRATION_OVERLAP,
    UNCALIBRATED_ACTIVATION,
    Finding,
)
from .sums import Array

# Raw pixels are uint8 with just these parameters.
_CALIBRATED_DTYPES = ("int8", "int16")
_INT32 = np.iinfo(np.int32)


def check_scales(
    where: str, scales: Array, zero_points: Array, *, activation: bool, dtype: str
) -> list[Finding]:
    """
    Check the quantization parameters of one tensor.

    Args:
        where: what the tensor is called in the text.
        scales: its scales, one or one a channel; none: it is not quantized and there is no finding.
        zero_points: its zero points; none stand for zeros.
        activation: whether it is an activation, whose scale must come from calibration.
        dtype: its dtype, such as ``int8``.

    Returns:
        Findings of kind `bad_scale` and `uncalibrated_activation`.
    """
    values = np.asarray(scales, dtype=np.float64).ravel()
    if not values.size:
        return []
    found = []
    tiny = float(np.finfo(np.float32).tiny)
    defects = {
        "zero": values == 0,
        "subnormal": (values > 0) & (values < tiny),
        "negative": values < 0,
        "not finite": ~np.isfinite(values),
    }
    bad = np.logical_or.reduce(list(defects.values()))
    if bad.any():
        kinds = [name for name, mask in defects.items() if mask.any()]
        first = int(bad.argmax())
        found.append(
            Finding(
                BAD_SCALE,
                where,
                f"expected positive normal scales, got {' and '.join(kinds)} in "
                f"{np.count_nonzero(bad)} of {values.size} (the first at channel {first}: "
                f"{values[first]:.6g}); a channel without range, or never observed",
            )
        )
    never_set = bool((values == 1).all()) and not np.any(zero_points)
    if activation and dtype in _CALIBRATED_DTYPES and never_set:
        found.append(
            Finding(
                UNCALIBRATED_ACTIVATION,
                where,
                f"{dtype} activation with scale 1.0 and zero point 0: its observer saw no sample; "
                "calibrate with inputs that reach it",
            )
        )
    return found


def check_bias(where: str, values: Array) -> list[Finding]:
    """
    Check the codes of one bias for the limits of int32.

    Args:
        where: what the tensor is called in the text.
        values: its codes; a float bias has no limit and no finding.

    Returns:
        A finding of kind `bias_at_int32_limit`, or none.
    """
    values = np.asarray(values)
    if values.dtype.kind not in "iu":
        return []
    # Symmetric clamps end at -INT32_MAX.
    at_limit = int(np.count_nonzero(np.isin(values, [_INT32.min, -_INT32.max, _INT32.max])))
    if not at_limit:
        return []
    return [
        Finding(
            BIAS_AT_INT32_LIMIT,
            where,
            f"expected codes inside of int32, got {at_limit} of {values.size} at its limit: "
            "the bias is cut off because input scale × weight scale is too small for it",
        )
    ]


class SampleLedger:
    """
    Remembers samples by a digest of 16 bytes each, to know calibration samples when met again.

    A digest takes in number, dtype, shape and bytes of the arrays: 0 and 0.0 are two samples.
    """

    def __init__(self) -> None:
        self._digests: set[bytes] = set()
        # Of a few elements each: tells a new sample from the known ones without reading it whole.
        self._glances: set[bytes] = set()

    def add(self, arrays: Iterable[Array]) -> None:
        """Remember one sample."""
        known = [np.asarray(array) for array in arrays]
        self._glances.add(_digest(map(_glance, known)))
        self._digests.add(_digest(known))

    def __contains__(self, arrays: Iterable[Array]) -> bool:
        """Return whether the sample was added before."""
        asked = [np.asarray(array) for array in arrays]
        return _digest(map(_glance, asked)) in self._glances and _digest(asked) in self._digests

    def __len__(self) -> int:
        """Return the number of different samples."""
        return len(self._digests)


_GLANCE = 64
"""Elements of an array that are looked at first."""


def _glance(array: Array) -> Array:
    # Of one that is not contiguous, flat[...] copies the elements asked for alone.
    return np.asarray(array.flat[:: max(1, array.size // _GLANCE)])


def _digest(arrays: Iterable[Array]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}:".encode())
        digest.update(array.tobytes())
    return digest.digest()


def overlap_finding(n_overlap: int, n_total: int) -> Finding | None:
    """
    Return the finding for evaluated samples that the calibration had seen; None without any.

    Args:
        n_overlap: number of evaluated samples that the calibration had seen.
        n_total: number of evaluated samples.
    """
    if not n_overlap:
        return None
    return Finding(
        CALIBRATION_OVERLAP,
        "inputs",
        f"{n_overlap} of {n_total} evaluated samples were also used to calibrate: the errors look "
        "smaller than they are; evaluate on samples that the calibration has not seen",
    )
