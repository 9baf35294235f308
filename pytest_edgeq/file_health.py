"""Health of a `.tflite` file by itself: what its parameters tell without running it."""

from __future__ import annotations

import numpy as np

from pytest_edgeq.numerics.findings import UNSAFE_OP, Finding
from pytest_edgeq.numerics.health import check_bias, check_scales
from pytest_edgeq.tflite.edge import EdgeFile
from pytest_edgeq.tflite.roles import roles_of
from pytest_edgeq.tflite.subgraph import Tensor
from pytest_edgeq.tflite.unsafe import unsafe_ops

__all__ = ["static_findings", "unsafe_findings"]


def static_findings(edge: EdgeFile) -> tuple[Finding, ...]:
    """Return the findings on scales, zero points and biases of a file."""
    findings: list[Finding] = []
    for signature in edge.graph.signatures:
        for border in signature.inputs:
            findings += _scale_findings(f"the input {border.name!r}", border.tensor)
    for entry, op in zip(edge.op_dtypes, edge.graph.ops, strict=True):
        roles = roles_of(edge.graph, op)
        for tensor in roles.outputs:
            findings += _scale_findings(f"the output of {entry.where}", tensor)
        for stored in roles.weights:
            where = f"the weight of {entry.where}"
            findings += _scale_findings(where, stored.tensor, activation=False)
        for stored in roles.biases:
            if stored.tensor.dtype == "int32" and stored.tensor.is_constant:
                values = edge.graph.constant(stored.tensor).view(np.int32)
                findings += check_bias(f"the bias of {entry.where}", values)
    return tuple(dict.fromkeys(findings))


def _scale_findings(where: str, tensor: Tensor, *, activation: bool = True) -> list[Finding]:
    return check_scales(
        where, tensor.scales, tensor.zero_points, activation=activation, dtype=tensor.dtype
    )


def unsafe_findings(edge: EdgeFile) -> tuple[Finding, ...]:
    """Return a finding for each op that the kernels abort at, or compute from foreign memory."""
    where = {(entry.subgraph, entry.index): entry.where for entry in edge.op_dtypes}
    return tuple(
        Finding(UNSAFE_OP, where[op.subgraph, op.index], cause)
        for op, cause in unsafe_ops(edge.graph)
    )
