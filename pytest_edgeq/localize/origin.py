"""Compare a file with the flow's own: dtypes and parameters of outputs, constants."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.numerics.findings import WRONG_QPARAMS, Finding
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.tflite.boundary import qparams
from pytest_edgeq.tflite.constants import Constant, read_constant
from pytest_edgeq.tflite.differences import explain, pair_of
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.ops import QDQ
from pytest_edgeq.tflite.roles import StoredTensor, role_of
from pytest_edgeq.tflite.same import parameter_difference, unexpected_qparams
from pytest_edgeq.tflite.subgraph import Op


def _same_ops(edge: EdgeFile, origin: EdgeFile) -> Iterator[tuple[Op, Op]]:
    """Pair ops in order; yield nothing if ops except QUANTIZE and DEQUANTIZE differ."""
    ops, others = (list(each.subgraph.ops) for each in (edge, origin))
    if [op.name for op in ops] != [op.name for op in others]:
        ops, others = ([op for op in each if op.name not in QDQ] for each in (ops, others))
    if [op.name for op in ops] == [op.name for op in others]:
        yield from zip(ops, others, strict=True)


def left_in_float(edge: EdgeFile, origin: EdgeFile) -> dict[int, tuple[Finding, ...]]:
    """Return a finding for each float op that the flow's file quantizes."""
    found: dict[int, tuple[Finding, ...]] = {}
    for op, other in _same_ops(edge, origin):
        dtypes, wanted = (
            [each.graph.tensor(one, index).dtype for index in one.outputs if index >= 0]
            for each, one in ((edge, op), (origin, other))
        )
        if dtypes != wanted and set(dtypes) == {"float32"}:
            text = f"its output is float32, and {wanted[0]} in the flow's own file: left in float"
            found[op.index] = (op.wrong(text),)
    return found


def origin_findings(edge: EdgeFile, origin: EdgeFile) -> dict[int, tuple[Finding, ...]]:
    """
    Compare quantization parameters and constants with those of the flow's own file.

    Scales come from the calibration; without a simulated graph that file is their reference. If the
    ops differ there are no findings.
    """
    ours, theirs = (each.subgraph for each in (edge, origin))
    floats = left_in_float(edge, origin)
    found: dict[int, tuple[Finding, ...]] = {}
    for op, other in _same_ops(edge, origin):
        if op.index in floats:
            continue
        wrong = []
        # In a damaged file an op may have fewer outputs or operands: `same` reports that.
        for mine, its in zip(op.outputs, other.outputs, strict=False):
            if mine < 0 or its < 0:
                continue
            actual, wanted = qparams(ours.tensors[mine]), qparams(theirs.tensors[its])
            if actual is None or wanted is None:
                continue
            text = unexpected_qparams("its output", actual, wanted)
            wrong += [op.wrong(text, kind=WRONG_QPARAMS)] if text else []
        wrong += map(op.wrong, _changed_constants(edge.graph, op, origin.graph, other))
        if wrong:
            found[op.index] = tuple(wrong)
    return found


def _changed_constants(graph: OpGraph, op: Op, origin: OpGraph, other: Op) -> list[str]:
    wrong = []
    # Only common operands: `same` reports another number of them.
    for place, (mine, its) in enumerate(zip(op.inputs, other.inputs, strict=False)):
        if mine < 0 or its < 0:
            continue
        tensor, wanted = graph.tensor(op, mine), origin.tensor(other, its)
        if not tensor.is_constant or not wanted.is_constant or tensor.is_external:
            continue
        name = role_of(graph, op, mine) or f"constant operand {place}"
        if np.array_equal(graph.constant(tensor), origin.constant(wanted)):
            problem = parameter_difference(wanted, tensor)
            wrong += [f"its {name}: {problem}"] if problem else []
            continue
        ours = read_constant(graph, op, StoredTensor(tensor, False, tensor))
        how = _how(op, ours, read_constant(origin, other, StoredTensor(wanted, False, wanted)))
        wrong.append(f"its {name} is not the one that the flow wrote: {how}")
    return wrong


def _how(op: Op, ours: Constant, theirs: Constant) -> str:
    """Return how the values of a constant changed."""
    if ours.values.shape != theirs.values.shape:
        return f"expected shape {list(theirs.values.shape)}, got {list(ours.values.shape)}"
    if ours.dtype != theirs.dtype:
        return f"expected {theirs.dtype}, got {ours.dtype}"
    if np.array_equal(ours.values, theirs.values):
        return "it is stored in another way"
    target: npt.NDArray[Any] = theirs.values.astype(np.float64)
    if ours.zero_points is not None:
        target = target - ours.zero_points
    tolerance = 0.25 if ours.scales is not None else 0.0
    pair = pair_of(op.name, ours, target, tolerance, exact=True, reference="the flow")
    return explain(pair)
