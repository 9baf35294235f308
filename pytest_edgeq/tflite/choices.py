"""Find the outputs of a file that hold a choice, such as labels."""

from __future__ import annotations

from typing import NamedTuple

from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.ops import MOVING, facts_of
from pytest_edgeq.tflite.subgraph import Op, Signature, Subgraph


class Choice(NamedTuple):
    """The op that decides an output."""

    op: Op  # the op that chooses
    scores: int  # the tensor by which it chooses


def choices(graph: OpGraph, signature: Signature) -> dict[str, Choice]:
    """
    Return the outputs that hold a choice, each with the op that chooses.

    Only ops that move, pick, compare or join elements lie between that op and the output, so a
    small error of two nearly equal scores may exchange whole elements of the output. The values of
    TOPK_V2 are no choice: for two that are nearly equal, either is nearly right.
    """
    subgraph = graph.subgraphs[signature.subgraph]
    found = {
        io_tensor.name: _choice(graph, subgraph, io_tensor.tensor.index)
        for io_tensor in signature.outputs
    }
    return {name: choice for name, choice in found.items() if choice is not None}


def _choice(graph: OpGraph, subgraph: Subgraph, index: int) -> Choice | None:
    """Return the choice that decides a tensor, searching its producers."""
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
        operands = [
            each for each in op.inputs if each >= 0 and not subgraph.tensors[each].is_constant
        ]
        passes = facts.passes_choice == "always" or op.name in MOVING
        passes = passes or (facts.passes_choice == "alone" and len(operands) == 1)
        left += [each for each in operands if passes and each not in seen]
        seen.update(operands)
    return None
