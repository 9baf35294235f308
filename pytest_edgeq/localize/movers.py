"""Ops that only move what they take, and move it otherwise than torch does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from pytest_edgeq.localize.biases import INPUT_AT
from pytest_edgeq.localize.codes import clipped, is_near
from pytest_edgeq.localize.kernels import hybrid_position
from pytest_edgeq.localize.kinds import HEAVY, IDENTITIES, base_name
from pytest_edgeq.localize.matches import Match, typed, values_taken
from pytest_edgeq.localize.reference import ReferenceGraph
from pytest_edgeq.localize.views import distance
from pytest_edgeq.localize.weights import rounded_constants
from pytest_edgeq.tflite.graph import Op, OpGraph, Subgraph
from pytest_edgeq.tflite.roles import stored_constant

__all__ = ["mover_findings"]

Node = torch.fx.Node

_PADDED = ("conv1d", "conv2d", "convolution")

# Values that tell what they come from: as many as 4 bits hold.
_LEVELS = 16

# Ops that take a part.
_PARTS = {"SLICE", "STRIDED_SLICE", "SPLIT", "SPLIT_V", "GATHER", "UNPACK"}
_MOVERS = {*_PARTS, "TRANSPOSE", "RESHAPE", "PAD", "PADV2", "MIRROR_PAD", "REVERSE_V2"}


def mover_findings(
    graph: OpGraph,
    subgraph: int,
    matches: Mapping[int, Match],
    reference: ReferenceGraph,
    read: Callable[[int], torch.Tensor],
) -> dict[int, str]:
    """
    Tell of ops that move what they take otherwise than torch, by the products behind them.

    What is moved otherwise is no node's value, so that it stands in one group with the product that
    takes it, and that gives what torch does not. If it is what torch makes of the very values that
    the product read, those were laid out wrongly.

    Args:
        graph: The file.
        subgraph: Index of the subgraph.
        matches: What each matched tensor stands for.
        reference: The torch graph.
        read: Gives a tensor of the file, dequantized, for one sample.

    Returns:
        A sentence, by the index of the op.
    """
    whole = graph.subgraphs[subgraph]
    found: dict[int, str] = {}
    for match in matches.values():
        if not match.forced or match.op is None or match.op.name not in INPUT_AT:
            continue
        mover = _wrong_mover(whole, match.op)
        if mover is None or mover.index in found:
            continue
        if any(matches[index].forced for index in match.sources):
            continue
        part = mover.name in _PARTS
        product = _sound_product(graph, match, matches, reference, read, part=part)
        if product is not None:
            found[mover.index] = (
                f"it moves what it takes otherwise than torch: {match.op.name} #{match.op.index} "
                f"computes {product.name} rightly, but of something else; compare its axes, begin "
                "and sizes with torch"
            )
    return found


def _sound_product(
    graph: OpGraph,
    match: Match,
    matches: Mapping[int, Match],
    reference: ReferenceGraph,
    read: Callable[[int], torch.Tensor],
    *,
    part: bool,
) -> Node | None:
    """The product that an op rightly makes of what it reads, as its kernel lays that out."""
    op, last = match.op, match.last
    assert op is not None, "made by an op"
    given = {reading.node for index in match.sources for reading in matches[index].readings}
    products = [n for n in reference.between(last.node, given) if base_name(n) in HEAVY]
    varying = [n for each in products for n in each.all_input_nodes if reference.varies(n)]
    if len(products) != 1 or len(varying) != 1:
        return None
    (taken,) = varying
    values = values_taken(match.sources, matches, read)
    for each in reference.between(taken, set(values)):
        values[each] = reference.compute(each, values, quantized=True)
    if not isinstance(values.get(taken), torch.Tensor):
        return None
    index = op.inputs[INPUT_AT[op.name]]
    maker = graph.subgraphs[op.subgraph].producer.get(index)
    if maker is not None and maker.name in ("PAD", "PADV2") and base_name(products[0]) in _PADDED:
        # torch's call pads by itself.
        index = maker.inputs[0]
    seen = _as_read(op, read(index), tuple(values[taken].shape))
    if seen is None or torch.equal(seen, values[taken]):
        return None
    if not (part or torch.equal(*(each.flatten().sort().values for each in (seen, values[taken])))):
        # More has become of it than that it was turned.
        return None
    values = {taken: typed(taken, seen)}
    weights = rounded_constants(graph, op, reference, values)
    for each in reference.between(last.node, {taken}):
        if any(reference.varies(n) and n not in values for n in each.all_input_nodes):
            return None
        values[each] = reference.compute(each, values, quantized=True, weights=weights)
    tensor = graph.subgraphs[op.subgraph].tensors[match.tensor]
    value = clipped(tensor, values[last.node])
    if int(read(match.tensor).flatten().sort().values.diff().count_nonzero()) < _LEVELS:
        return None
    apart = distance(last.view.read(read(match.tensor)), value)
    hybrid = hybrid_position(graph, op) is not None
    return products[0] if is_near(apart, tensor, value, hybrid=hybrid) else None


def _as_read(op: Op, value: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor | None:
    """What a kernel reads, in torch's order; None where it is of another size."""
    if op.name == "FULLY_CONNECTED":
        fits = value.numel() == torch.Size(shape).numel() and value.shape[-1] == shape[-1]
        return value.reshape(shape) if fits else None
    if value.ndim != 4:
        return None
    turned = value.permute(0, 3, 1, 2)
    # Axes of 1 may stand elsewhere: those of what is 1-D in torch.
    alike = [n for n in turned.shape if n > 1] == [n for n in shape if n > 1]
    return turned.reshape(shape) if alike else None


def _wrong_mover(whole: Subgraph, op: Op) -> Op | None:
    """Of the ops that only move what a product takes, the one that may have moved it wrongly."""
    movers = list(_movers(whole, op.inputs[INPUT_AT[op.name]]))
    parts = [each for each in movers if each.name in _PARTS]
    # One that should have turned axes has the same sizes on both sides.
    flat = [each for each in movers if each.name == "RESHAPE" and _turns_sizes(whole, each)]
    turns = [each for each in movers if each.name in ("TRANSPOSE", "REVERSE_V2")]
    return next(iter([*parts, *flat, *turns]), None)


def _turns_sizes(whole: Subgraph, op: Op) -> bool:
    taken, made = (
        [size for size in whole.tensors[i].shape if size != 1]
        for i in (op.inputs[0], op.outputs[0])
    )
    return taken != made and sorted(taken) == sorted(made)


def _movers(whole: Subgraph, index: int) -> Iterator[Op]:
    """From a tensor upwards, as long as each takes one value and only moves it."""
    maker = whole.producer.get(index)
    while maker is not None and maker.name in _MOVERS | IDENTITIES:
        taken = [i for i in maker.inputs if i >= 0 and stored_constant(whole, i) is None]
        if len(taken) != 1:
            return
        if maker.name in _MOVERS:
            yield maker
        maker = whole.producer.get(taken[0])
