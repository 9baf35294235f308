"""Masks in front of a softmax whose range leaves too little of them, or of what they mask."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from pytest_edgeq.localize.codes import code_limits
from pytest_edgeq.tflite.graph import Op, Subgraph, Tensor
from pytest_edgeq.tflite.op_facts import MOVING

__all__ = ["MASKING", "masking_ops", "what_is_lost"]

# Shares that float32 adds to one another and to 1 without a trace: torch leaves such values out.
_NOTHING = 2.0**-24

# Half a step of a share in 8 bits, which any softmax may round away.
_LEAST_SHARE = 1 / 512

# A number that masks: what is so far below others gets `_NOTHING`.
MASKING = math.log(_NOTHING)

# Ratio of powers of one bit, 6.02 dB.
_BIT = 4.0

# Ops that put a mask to scores, or make it.
_PUTS = ("SELECT", "SELECT_V2", "ADD", "SUB", "MUL")

_WAY_OUT = "add a mask of −30 to the scores, as a sum has a range of its own, or leave it in float"


def masking_ops(whole: Subgraph) -> Iterator[list[Op]]:
    """By softmax, the ops that may put a mask to what it takes, in order."""
    for softmax in whole.ops:
        if softmax.name == "SOFTMAX":
            size = whole.tensors[softmax.inputs[0]].shape[-1:]
            ops = {op.index: op for op in _masking(whole, softmax.inputs[0])}
            alike = [i for i in ops if whole.tensors[ops[i].outputs[0]].shape[-1:] == size]
            yield [ops[i] for i in sorted(alike)]


def _masking(whole: Subgraph, index: int) -> Iterator[Op]:
    """The ops in front of a tensor that may put a mask to it, up to what makes the scores."""
    left, seen = [index], {index}
    while left:
        maker = whole.producer.get(left.pop())
        # Behind a TRANSPOSE another axis is the last one.
        if maker is None or maker.name == "TRANSPOSE":
            continue
        if maker.name in _PUTS:
            yield maker
        if maker.name in _PUTS or maker.name in MOVING:
            left += [each for each in maker.inputs if each not in seen]
            seen.update(maker.inputs)


def what_is_lost(
    wanted: torch.Tensor, file: torch.Tensor, tensor: Tensor, lowest: float
) -> str | None:
    """
    Say what becomes of a mask and of the scores.

    Args:
        wanted: What the op gives in float of what it took in the file, float64.
        file: What it gives in the file, dequantized, float64.
        tensor: Of the file.
        lowest: The least constant that is put to the scores.
    """
    # Where all of a row is masked no share is less than another: −inf gives NaN there.
    text = _is_flat(wanted, file, tensor, lowest) or _leaks(wanted, file)
    return None if text is None else text.replace("-", "−")


def _leaks(wanted: torch.Tensor, file: torch.Tensor) -> str | None:
    """Tell of a mask that masks nothing any more."""
    left_out = wanted.softmax(-1) < _NOTHING
    shares = file.softmax(-1).where(left_out, 0.0)
    most = int(shares.argmax())
    if not float(shares.max()) > _LEAST_SHARE:
        return None
    return (
        f"the mask is lost: {float(wanted.flatten()[most]):.3g} in torch is "
        f"{float(file.flatten()[most]):.3g} in the file, and what is masked keeps up to "
        f"{100 * float(shares.max()):.2g} % of what the softmax gives; {_WAY_OUT}"
    )


def _is_flat(wanted: torch.Tensor, file: torch.Tensor, tensor: Tensor, lowest: float) -> str | None:
    """Tell of scores of which a mask's range leaves nothing, though it is rounded as it must be."""
    limits = code_limits(tensor)
    if limits is None:
        return None
    _, high, step, zero_point = limits
    # Above, the range may cut. The kernel's own rounding is less than another half of a step.
    held = wanted.clamp(max=(high - zero_point) * step)
    if not float((file - held).abs().max()) <= step:
        return None
    shares, made = (each.softmax(-1).nan_to_num(0.0) for each in (wanted, file))
    signal, noise = float(shares.square().sum()), float((shares - made).square().sum())
    if not noise > signal / _BIT:
        return None
    return (
        f"the mask's {min(lowest, float(wanted.min())):.3g} takes the range: a step is {step:.3g}, "
        f"and of the scores the softmax gives {10 * math.log10(signal / noise):.1f} dB SQNR, not "
        "one bit; of a mask, −30 does as much; else leave that op in float"
    )
