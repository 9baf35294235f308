"""Find the outputs of a file that hold a choice: labels, sorted boxes, masks of a comparison."""

from __future__ import annotations

from typing import NamedTuple

from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.ops import MOVING, facts_of
from pytest_edgeq.tflite.subgraph import Op, Signature, Subgraph


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
        facts = facts_of(op.name)
        if facts.scores is not None and len(op.inputs) > facts.scores:
            if op.name == "TOPK_V2" and tensor == op.outputs[0]:
                continue
            return Choice(op, op.inputs[facts.scores])
        taken = [each for each in op.inputs if each >= 0 and not subgraph.tensors[each].is_constant]
        passes = facts.passes_choice == "always" or op.name in MOVING
        passes = passes or (facts.passes_choice == "alone" and len(taken) == 1)
        left += [each for each in taken if passes and each not in seen]
        seen.update(taken)
    return None
