"""Constants that the file computes anew at each run, from constants alone."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence

import torch

from pytest_edgeq.localize.reference import ReferenceGraph
from pytest_edgeq.localize.views import best_view
from pytest_edgeq.localize.weights import constants_behind
from pytest_edgeq.tflite.graph import Op, OpGraph, Subgraph

__all__ = ["computed_from_constants", "precomputed_constants"]

Node = torch.fx.Node


def computed_from_constants(graph: OpGraph, ops: Sequence[Op]) -> set[int]:
    """The tensors that ops make of constants alone, of one subgraph, in order."""
    found: set[int] = set()
    for op in ops:
        inputs = [index for index in op.inputs if index >= 0]
        if inputs and all(i in found or graph.tensor(op, i).is_constant for i in inputs):
            found.update(op.outputs)
    return found


def precomputed_constants(
    graph: OpGraph,
    op: Op,
    reference: ReferenceGraph,
    given: Iterable[Node],
    read: Callable[[int], torch.Tensor],
    computed: Container[int],
) -> dict[Node, torch.Tensor]:
    """
    Constants of the reference as the file computes them for an op, where it does.

    A table of positions that is resized or looked up by constant indices is rounded at each step
    on its way; torch has it as it is. What is further from it than these steps round is left.

    Args:
        graph: The file.
        op: The op.
        reference: The torch graph.
        given: The nodes whose values the op takes.
        read: Gives a tensor of the file, dequantized.
        computed: What the file computes from constants alone.
    """
    subgraph = graph.subgraphs[op.subgraph]
    rounding = {index: _rounding(subgraph, index) for index in op.inputs if index in computed}
    found: dict[Node, torch.Tensor] = {}
    for index in (each for each, most in rounding.items() if most):
        file = read(index)
        for taken in constants_behind(reference, given):
            plain = reference.constant(taken.node, quantized=False)
            if not isinstance(plain, torch.Tensor) or not plain.is_floating_point():
                continue
            best = best_view(file, plain)
            if best is None or reference.is_rounded(taken.node):
                continue
            value = best[1].read(file)
            if float((value - plain).abs().max()) <= rounding[index]:
                found[taken.node] = value.to(plain.dtype)
    return found


def _rounding(subgraph: Subgraph, index: int) -> float:
    """By how much what is computed from constants is rounded on its way."""
    total, stack, seen = 0.0, [index], {index}
    while stack:
        each = stack.pop()
        tensor, maker = subgraph.tensors[each], subgraph.producer.get(each)
        if tensor.is_quantized and len(tensor.scales):
            total += float(tensor.scales.max()) / 2
        for above in () if maker is None else maker.inputs:
            if above >= 0 and above not in seen:
                seen.add(above)
                stack.append(above)
    # float32's own part, and that of a step that is exactly half of one.
    return total * (1 + 2.0**-10)
