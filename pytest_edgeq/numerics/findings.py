"""Kinds of findings, and the finding itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

NONFINITE = "nonfinite"
"""An output has NaN or infinite elements."""

CONSTANT_OUTPUT = "constant_output"
"""An output has one value in all elements of all samples, and the reference does not."""

ZERO_OUTPUT = "zero_output"
"""An output is zero in all elements of all samples."""

CLIPPED_OUTPUT = "clipped_output"
"""The reference lies outside of what the codes can say in many elements: the range is too small."""

SATURATED_OUTPUT = "saturated_output"
"""Many codes are at an end of the range though the reference lies well inside of it."""

CLIPPED_INPUT = "clipped_input"
"""Many elements of an input lie outside of what its codes can say: the range is too small."""

COARSE_INPUT = "coarse_input"
"""An input takes a few of its codes only: the range that it was calibrated with is too wide."""

BIAS_AT_INT32_LIMIT = "bias_at_int32_limit"
"""A bias did not fit int32 and was cut off."""

BAD_SCALE = "bad_scale"
"""A scale is zero, subnormal, negative or not finite."""

UNCALIBRATED_ACTIVATION = "uncalibrated_activation"
"""An activation has scale 1.0 and zero point 0: the observer that set them saw nothing."""

CALIBRATION_OVERLAP = "calibration_overlap"
"""Samples of the calibration are met again among those evaluated: the errors look too small."""

CALIBRATION_REPEATED = "calibration_repeated"
"""All samples of the calibration are one and the same: ranges hold no other."""

INPUT_KINDS = (CALIBRATION_REPEATED, CLIPPED_INPUT, COARSE_INPUT)
"""Of a calibration by other inputs: it spoils all that comes behind, and explains it."""

UNSAFE_OP = "unsafe_op"
"""The kernels abort at an op, or compute it from memory outside of its tensors."""

STATEFUL_REFERENCE = "stateful_reference"
"""The reference's forward changes its own buffers: outputs depend on the order of the samples."""


@dataclass(frozen=True, slots=True)
class Finding:
    """
    One thing that is wrong.

    Attributes:
        kind: one of the constants of this module.
        where: the output or tensor.
        message: what was seen and what to do.
    """

    kind: str
    where: str
    message: str

    def to_dict(self) -> dict[str, str]:
        """Return plain data with sorted keys."""
        return {"kind": self.kind, "message": self.message, "where": self.where}

    def __str__(self) -> str:
        """Return one line."""
        return f"{self.kind}: {self.where}: {self.message}"


def input_causes(findings: Iterable[Finding]) -> list[str]:
    """Say, a line each, which findings of inputs explain what is lost behind them."""
    return [f"cause: {each.where}: {each.message}" for each in findings if each.kind in INPUT_KINDS]
