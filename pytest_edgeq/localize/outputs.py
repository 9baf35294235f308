"""Whether the file gives at each output what torch gives there."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pytest_edgeq.localize.kinds import IDENTITIES, base_name, is_dequantize, is_quantize
from pytest_edgeq.localize.matches import Match, values_taken
from pytest_edgeq.localize.moves import MOVING
from pytest_edgeq.localize.reference import ReferenceGraph
from pytest_edgeq.localize.views import distance
from pytest_edgeq.reference import flatten_outputs, in_file_order
from pytest_edgeq.tflite.graph import SignatureTensor, Subgraph

__all__ = ["output_findings"]

Node = torch.fx.Node


def output_findings(
    module: torch.fx.GraphModule,
    reference: ReferenceGraph,
    fed: Sequence[Any],
    matches: Mapping[int, Match],
    borders: Sequence[SignatureTensor],
    subgraph: Subgraph,
    read: Callable[[int], torch.Tensor],
    *,
    turned: Container[str] = (),
) -> dict[int, str]:
    """
    Tell of outputs that another node stands for than torch gives there, or that lie otherwise.

    An op may compute what torch computes, and be wired to the wrong end: an output in the place of
    another, or of what comes before the last activation. Or it lays out what is right in another
    order than torch does.

    Args:
        module: As it was exported: it knows how the outputs are nested.
        reference: The torch graph that was matched.
        fed: A value for each of its placeholders.
        matches: What each tensor stands for.
        borders: The file's outputs, in order.
        subgraph: That of the file.
        read: Gives a tensor of the file, dequantized, for the sample of `fed`.
        turned: Names of outputs that the user knows to lie otherwise than torch's.

    Returns:
        A sentence, by the index of the op that makes the output.
    """
    nodes = _in_order(module, reference, [border.name for border in borders])
    found: dict[int, str] = {}
    for border, node in zip(borders, nodes, strict=True):
        if node is None:
            continue
        moved = _moved_otherwise(border, node, reference, matches, subgraph, read)
        if moved is not None and border.name not in turned:
            found[moved] = (
                f"the file's output {border.name!r} has torch's values in another order than "
                f"{_computing(node)} lays them out; compare what turns and reshapes them with torch"
            )
            continue
        match = matches.get(border.tensor.index)
        if match is None or match.op is None:
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


def _moved_otherwise(
    border: SignatureTensor,
    node: Node,
    reference: ReferenceGraph,
    matches: Mapping[int, Match],
    subgraph: Subgraph,
    read: Callable[[int], torch.Tensor],
) -> int | None:
    """The op that makes an output, where that is what torch moves there, moved otherwise."""
    index = border.tensor.index
    last = maker = subgraph.producer.get(index)
    while index not in matches and maker is not None and maker.name in IDENTITIES:
        index = maker.inputs[0]
        maker = subgraph.producer.get(index)
    if last is None or index not in matches:
        return None
    values = values_taken((index,), matches, read)
    between = reference.between(node, set(values))
    if not all(base_name(each) in MOVING for each in between):
        return None
    for each in between:
        values[each] = reference.compute(each, values, quantized=False)
    wanted, given = values[node], read(border.tensor.index)
    if given.shape != wanted.shape or not given.is_floating_point():
        return None
    # The same values, as far as a QUANTIZE between rounds them, and not in the same place.
    alike = distance(*(each.reshape(-1).sort().values for each in (given, wanted)))
    apart = distance(given, wanted)
    return last.index if apart > 10 * alike + 1e-5 * float(wanted.abs().max()) else None


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
