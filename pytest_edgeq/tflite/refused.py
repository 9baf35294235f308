"""Which op of a file XNNPACK refuses, where it says no more than that it refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pytest_edgeq.tflite.cut import cut_ops
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.subgraph import Op


def refused_op(graph: OpGraph, subgraph: int, load: Callable[[bytes], object]) -> Op | None:
    """
    Find an op that XNNPACK refuses even where it stands alone, by halves of the file.

    Returns:
        The first such op; None where XNNPACK takes each op alone, or none can stand alone.
    """
    return first_failing(
        graph.subgraphs[subgraph].ops, lambda ops: _refuses(graph, subgraph, ops, load)
    )


def first_failing(ops: Sequence[Op], fails: Callable[[Sequence[Op]], bool]) -> Op | None:
    """Return the first op that fails even alone, by bisection; None where each passes alone."""
    is_known = fails(ops)
    if not is_known:
        return None
    while len(ops) > 1:
        half = ops[: len(ops) // 2]
        is_known = fails(half)
        ops = half if is_known else ops[len(half) :]
    return ops[0] if is_known or fails(ops) else None


def _refuses(
    graph: OpGraph, subgraph: int, ops: Sequence[Op], load: Callable[[bytes], object]
) -> bool:
    cut = cut_ops(graph, subgraph, wanted={op.index for op in ops})
    if not cut.outputs:
        return False
    try:
        load(cut.content)
    except (RuntimeError, ValueError):
        return True
    return False
