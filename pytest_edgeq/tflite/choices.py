"""Find the outputs of a file that hold a choice: labels, sorted boxes, masks of a comparison."""

from __future__ import annotations

from typing import NamedTuple

from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.op_facts import COMPARISONS, MOVING
from pytest_edgeq.tflite.subgraph import Op, Signature, Subgraph

_CHOOSING = COMPARISONS | {
    *("ARG_MAX", "ARG_MIN", "TOPK_V2", "NON_MAX_SUPPRESSION_V4", "NON_MAX_SUPPRESSION_V5"),
    "CUSTOM:TFLite_Detection_PostProcess",
}
"""Ops of which a small change of what they take may change the whole result, or nothing."""

_PICKING = MOVING | {
    *("SLICE", "STRIDED_SLICE", "SPLIT", "SPLIT_V", "UNPACK", "PACK", "CONCATENATION"),
    *("GATHER", "GATHER_ND", "ONE_HOT", "TILE", "BROADCAST_TO", "LOGICAL_AND", "LOGICAL_OR"),
    *("LOGICAL_NOT", "REVERSE_V2"),
}
"""Ops that hand on what was chosen, or pick by it."""

_WITH_CONSTANT = frozenset({"ADD", "SUB", "MUL", "DIV", "FLOOR_DIV", "FLOOR_MOD"})
"""Ops that hand it on if nothing else goes in but constants, or other choices."""


class Choice(NamedTuple):
    """
    What decides an output.

    Attributes:
        op: The op that chooses.
        scores: The tensor that it chooses by.
    """

    op: Op
    scores: int


def choices(graph: OpGraph, signature: Signature) -> dict[str, Choice]:
    """
    Return the outputs that hold a choice, by name, each with the nearest op that chooses.

    Between it and the output stand only ops that move, pick, compare or join what was chosen, so
    that two scores that are nearly equal may exchange whole elements of the output. The values of
    TOPK_V2 are no choice: of two that are nearly equal either is nearly right.
    """
    subgraph = graph.subgraphs[signature.subgraph]
    found = {
        border.name: _choice(graph, subgraph, border.tensor.index) for border in signature.outputs
    }
    return {name: choice for name, choice in found.items() if choice is not None}


def _choice(graph: OpGraph, subgraph: Subgraph, index: int) -> Choice | None:
    """Return what decides a tensor, walking from it against the direction of the data."""
    left, seen = [index], {index}
    while left:
        tensor = left.pop(0)
        op = subgraph.producer.get(tensor)
        if op is None:
            continue
        scores = 1 if op.name.startswith(("NON_MAX", "CUSTOM")) else 0
        if op.name in _CHOOSING and len(op.inputs) > scores:
            if op.name == "TOPK_V2" and tensor == op.outputs[0]:
                continue
            return Choice(op, op.inputs[scores])
        taken = [each for each in op.inputs if each >= 0 and not subgraph.tensors[each].is_constant]
        hands_on = op.name in _PICKING or (op.name in _WITH_CONSTANT and len(taken) == 1)
        left += [each for each in taken if hands_on and each not in seen]
        seen.update(taken)
    return None
