"""Masks in front of a softmax whose range leaves too little of them, or of what they mask."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from pytest_edgeq.localize.codes import clipped, code_limits
from pytest_edgeq.localize.kinds import IDENTITIES, VIEWS, base_name, is_dequantize, is_quantize
from pytest_edgeq.localize.matches import Match, values_taken
from pytest_edgeq.localize.reference import ReferenceGraph
from pytest_edgeq.localize.views import View
from pytest_edgeq.tflite.graph import Op, OpGraph, Subgraph, Tensor

__all__ = ["MASKING", "is_mask_cut", "mask_findings", "masking_ops", "what_is_lost"]

Node = torch.fx.Node

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
_PUT_BY = {
    *("where", "masked_fill", "masked_fill_", "add", "add_", "sub", "sub_", "rsub", "mul", "mul_"),
    *VIEWS,
}

_WAY_OUT = "add a mask of −30 to the scores, as a sum has a range of its own, or leave it in float"


def mask_findings(
    graph: OpGraph,
    subgraph: int,
    matches: Mapping[int, Match],
    reference: ReferenceGraph,
    read: Callable[[int], torch.Tensor],
) -> dict[int, str]:
    """
    Tell of ops that mask scores by a range that cuts the mask, or that only the mask is in.

    One that cuts −30 to −3 is off by no LSB of what it can say, and the outputs may hide it: what
    is masked is often alike. One that reaches −1e9 has all scores in one step, and the mask alone
    is nearly all that it gives. Both are told by the shares that a softmax makes of it.

    Args:
        graph: The file.
        subgraph: Index of the subgraph.
        matches: What each matched tensor stands for.
        reference: The torch graph.
        read: Gives a tensor of the file, dequantized, for one sample.

    Returns:
        A sentence, by the index of the first op of each mask that loses it.
    """
    whole = graph.subgraphs[subgraph]
    found: dict[int, str] = {}
    for ops in masking_ops(whole):
        for op in ops:
            index = op.outputs[0]
            match = matches.get(index)
            if match is None or match.same is not None:
                continue
            text = _lost(match, matches, reference, read, whole.tensors[index])
            if text is not None:
                found[op.index] = text
                break
    return found


def is_mask_cut(graph: OpGraph, op: Op, node: Node, reference: ReferenceGraph) -> bool:
    """
    Whether an op masks scores with less than torch does: what it cuts off is nothing to lose.

    Where it masks too little `mask_findings` tells.

    Args:
        graph: The file.
        op: The op.
        node: What its output stands for.
        reference: The torch graph.
    """
    whole = graph.subgraphs[op.subgraph]
    limits = code_limits(whole.tensors[op.outputs[0]])
    if limits is None or not any(op in ops for ops in masking_ops(whole)):
        return False
    low, _, scale, zero_point = limits
    return _lowest(node, reference) < min((low - zero_point) * scale, MASKING)


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
        if maker.name in _PUTS or maker.name in IDENTITIES:
            left += [each for each in maker.inputs if each not in seen]
            seen.update(maker.inputs)


def _lost(
    match: Match,
    matches: Mapping[int, Match],
    reference: ReferenceGraph,
    read: Callable[[int], torch.Tensor],
    tensor: Tensor,
) -> str | None:
    """Say what becomes of a mask and of the scores, held against torch's on what the op took."""
    node, view = match.last.node, match.last.view
    lowest = _lowest(node, reference)
    if lowest > MASKING:
        return None
    values = values_taken(match.sources, matches, read)
    for each in reference.between(node, set(values)):
        values[each] = reference.compute(each, values, quantized=False)
    file = read(match.tensor).double()
    wanted = _unread(view, values[node].double(), file)
    if not file.numel():
        return None
    return what_is_lost(wanted, file, tensor, lowest)


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
    step, held = limits[2], torch.minimum(wanted, clipped(tensor, wanted))
    # Above, the range may cut. The kernel's own rounding is less than another half of a step.
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


def _unread(view: View, value: torch.Tensor, file: torch.Tensor) -> torch.Tensor:
    """A node's value as the file lays it out."""
    axes = view.axes if view.axes is not None else tuple(range(file.ndim))
    turned = value.reshape([file.shape[axis] for axis in axes])
    return turned.permute([axes.index(axis) for axis in range(file.ndim)])


def _lowest(node: Node, reference: ReferenceGraph) -> float:
    """The least constant that torch puts to a value; inf where it puts none."""
    stack, seen, least = [node], {node}, math.inf
    while stack:
        each = stack.pop()
        if each.op != "call_function":
            continue
        if not (base_name(each) in _PUT_BY or is_quantize(each) or is_dequantize(each)):
            continue
        given = each.args if base_name(each) in _PUT_BY - VIEWS else each.args[:1]
        for argument in given:
            if isinstance(argument, Node) and reference.varies(argument):
                if argument not in seen:
                    seen.add(argument)
                    stack.append(argument)
                continue
            if isinstance(argument, Node):
                argument = reference.constant(argument, quantized=False)
            least = min(least, _least(argument))
    return least


def _least(value: Any) -> float:
    if isinstance(value, torch.Tensor):
        return float(value.min()) if value.is_floating_point() and value.numel() else math.inf
    return float(value) if isinstance(value, (int, float)) else math.inf
