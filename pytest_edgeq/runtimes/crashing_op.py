"""Find the op that ends the process, by running ops isolated."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pytest_edgeq.runtimes.engines import Opening
from pytest_edgeq.tflite.boundary import numpy_dtype
from pytest_edgeq.tflite.cut import Cut, cut_ops, first_op_that
from pytest_edgeq.tflite.op_dtypes import entry_of
from pytest_edgeq.tflite.subgraph import Op

_MOST_TRIALS: Final = 16
"""Files to try; by bisection this is enough for 2 ** 8 ops."""

_MOST_SECONDS: Final = 30.0

SECONDS_OF_A_TRIAL: Final = 5.0
"""Seconds after which ops count as hanging."""

Inputs = Mapping[str, npt.NDArray[Any]]


class _GivenUpError(Exception):
    """The search has reached its limits."""


def crashing_op_text(
    opening: Opening, step: str, inputs: Inputs, ends: Callable[[bytes, Inputs | None], bool]
) -> str:
    """Describe the op that ended the process, in one line or two."""
    graph, subgraph = opening.graph, opening.signature.subgraph
    tensors = graph.subgraphs[subgraph].tensors
    known = {b.tensor.index: inputs[b.name] for b in opening.signature.inputs if b.name in inputs}
    begun, trials = time.monotonic(), 0

    def shape_of(index: int) -> tuple[int, ...]:
        return known[index].shape if index in known else tensors[index].shape

    def value(index: int) -> npt.NDArray[Any]:
        if index in known:
            return known[index]
        return np.zeros(tensors[index].shape, numpy_dtype(tensors[index].dtype))

    def crashes(cut: Cut) -> bool:
        nonlocal trials
        seconds = time.monotonic() - begun
        if trials >= _MOST_TRIALS or seconds > _MOST_SECONDS:
            raise _GivenUpError(
                f"{trials} files with some of its ops were tried, in {seconds:.0f} s"
            )
        trials += 1
        feed = {name: value(index) for name, index in cut.inputs.items()}
        try:
            return ends(cut.content, feed if step == "run" else None)
        except Exception:  # the kernels refuse them, which ends no process
            return False

    def where(op: Op) -> str:
        return entry_of(graph, op, opening.modules).where

    try:
        op = first_op_that(graph, subgraph, crashes, shape_of)
        if op is not None:
            return f"op: {where(op)}"
        left_out = cut_ops(graph, subgraph, shape_of).left_out
    except _GivenUpError as error:
        return f"op: not found: {error}"
    except Exception as error:  # of a damaged file the graph need not make sense
        return f"op: not found: its ops cannot be cut out ({type(error).__name__}: {error})"[:150]
    text = "op: not found: its ops, cut out and run on zeros, end no process"
    if left_out:
        first, why = left_out[0]
        more = f" and {len(left_out) - 1} more" if len(left_out) > 1 else ""
        text += f"\n  not cut out: {where(first)}{more}: {why}"
    return text
