"""Which op of a file XNNPACK refuses, where it says no more than that it refuses."""

from __future__ import annotations

from collections.abc import Callable

from pytest_edgeq.tflite.cut import cut_ops
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.subgraph import Op

__all__ = ["refused_op"]


def refused_op(graph: OpGraph, subgraph: int, load: Callable[[bytes], object]) -> Op | None:
    """
    Find an op that XNNPACK refuses even where it stands alone, by halves of the file.

    Args:
        graph: The file.
        subgraph: Index of the subgraph that holds the op.
        load: Has XNNPACK load a file, and raises RuntimeError or ValueError where it refuses.

    Returns:
        The first such op; None where XNNPACK takes each op alone, or none can stand alone.
    """
    ops = graph.subgraphs[subgraph].ops
    if not _refuses(graph, subgraph, ops, load):
        return None
    while len(ops) > 1:
        half = ops[: len(ops) // 2]
        ops = half if _refuses(graph, subgraph, half, load) else ops[len(half) :]
    return ops[0] if _refuses(graph, subgraph, ops, load) else None


def _refuses(
    graph: OpGraph, subgraph: int, ops: tuple[Op, ...], load: Callable[[bytes], object]
) -> bool:
    cut = cut_ops(graph, subgraph, wanted={op.index for op in ops})
    if not cut.outputs:
        return False
    try:
        load(cut.content)
    except (RuntimeError, ValueError):
        return True
    return False
