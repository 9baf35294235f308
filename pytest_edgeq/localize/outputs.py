"""Whether the file gives at each output what torch gives there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pytest_edgeq.localize.match import Match
from pytest_edgeq.localize.reference import ReferenceGraph, is_dequantize, is_quantize
from pytest_edgeq.reference import flatten_outputs, in_file_order
from pytest_edgeq.tflite.graph import SignatureTensor

__all__ = ["output_findings"]

Node = torch.fx.Node


def output_findings(
    module: torch.fx.GraphModule,
    reference: ReferenceGraph,
    fed: Sequence[Any],
    matches: Mapping[int, Match],
    borders: Sequence[SignatureTensor],
) -> dict[int, str]:
    """
    Tell of outputs that another node stands for than torch gives there.

    An op may compute what torch computes, and be wired to the wrong end: an output in the place of
    another, or of what comes before the last activation.

    Args:
        module: As it was exported: it knows how the outputs are nested.
        reference: The torch graph that was matched.
        fed: A value for each of its placeholders.
        matches: What each tensor stands for.
        borders: The file's outputs, in order.

    Returns:
        A sentence, by the index of the op that makes the output.
    """
    nodes = _in_order(module, reference, [border.name for border in borders])
    found: dict[int, str] = {}
    for border, node in zip(borders, nodes, strict=True):
        match = matches.get(border.tensor.index)
        if match is None or match.op is None or node is None:
            continue
        given = {reading.node for reading in match.readings}
        if node in given or _gives_the_same(reference, fed, match.last.node, node):
            continue
        others = (other.name for other, each in zip(borders, nodes, strict=True) if each in given)
        other = next(others, None)
        what = _computing(match.last.node) if other is None else f"torch's output {other!r}"
        found[match.op.index] = (
            f"the file's output {border.name!r} is its result: expected {_computing(node)}, got "
            f"{what}; wire that output to the op that computes it"
        )
    return found


def _computing(node: Node) -> str:
    """The node that computes a value, in front of those that quantize it."""
    while is_quantize(node) or is_dequantize(node):
        node = node.all_input_nodes[0]
    return node.name


def _in_order(
    module: torch.fx.GraphModule, reference: ReferenceGraph, wanted: Sequence[str]
) -> list[Node | None]:
    """The node of each of the file's outputs; None for what is none of the graph's."""
    leaves = pytree.tree_leaves(reference.nodes[-1].args[0])
    spec = module.graph._codegen.pytree_info.out_spec  # type: ignore[attr-defined]
    places = pytree.tree_unflatten([torch.tensor(i) for i in range(len(leaves))], spec)
    order = in_file_order(flatten_outputs(places), wanted, "the exported model")
    found = [leaves[int(place)] for place in order]
    return [each if isinstance(each, Node) and reference.varies(each) else None for each in found]


def _gives_the_same(reference: ReferenceGraph, fed: Sequence[Any], one: Node, other: Node) -> bool:
    """Whether two nodes hold the same values, in whatever layout: a view, or equal by chance."""
    run = reference.program({one: 1, other: 1}).start(fed)
    ordered = sorted((one, other), key=reference.order)
    first, second = (torch.sort(run.take(n).reshape(-1).double()).values for n in ordered)
    if first.shape != second.shape:
        return False
    # What float32 rounds, relative to the largest.
    apart = float((first - second).abs().max()) if first.numel() else 0.0
    return apart <= 1e-5 * float(second.abs().max())
