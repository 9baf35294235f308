"""Quantization metadata stored with a baseline: changes that errors may not show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_edgeq.numerics.samples import SampleLedger
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.tflite.roles import roles_of
from pytest_edgeq.tflite.subgraph import Tensor
from pytest_edgeq.versions import loaded_torch


def build_of(
    edge: EdgeFile,
    ledger: SampleLedger,
    reference: object,
    inputs: Mapping[str, tuple[float, float]],
) -> dict[str, Any]:
    """Return the quantization metadata that a baseline stores with the errors."""
    scales, wide, asymmetric, shared = {}, [], [], []
    for entry, op in zip(edge.op_dtypes, edge.graph.ops, strict=True):
        roles = roles_of(edge.graph, op)
        taken, made = roles.inputs[:1], [t for t in roles.outputs[:1] if t.is_quantized]
        if made and len(made[0].scales) == 1:
            # 5 digits: a range is reported if it is twice as wide.
            scales[entry.where] = float(f"{float(made[0].scales[0]):.5g}")
            if made[0].dtype == "int16":
                wide.append(entry.where)
        if any(each.tensor.zero_points.any() for each in roles.weights):
            asymmetric.append(entry.where)
        if made and taken and taken[0].is_quantized and _same(taken[0], made[0]):
            shared.append(entry.where)
    return {
        "scales": scales,
        "int16": wide,
        "n_calibrated": len(ledger),
        "calibration": ledger.fingerprint,
        "weights": _weights_digest(reference),
        "asymmetric": asymmetric,
        "shared": shared,
        "inputs": {
            name: [float(f"{value:.4g}") for value in ends]
            for name, ends in inputs.items()
            if ends[0] <= ends[1]
        },
    }


def _weights_digest(reference: object) -> str:
    torch = loaded_torch()
    if torch is None or not isinstance(reference, torch.nn.Module):
        return ""
    from pytest_edgeq.litert.digest import UnhashableError, digest_of

    try:
        return digest_of(dict(reference.state_dict()))
    except UnhashableError:
        return ""


def _same(taken: Tensor, made: Tensor) -> bool:
    pairs = ((taken.scales, made.scales), (taken.zero_points, made.zero_points))
    return all(one.tobytes() == other.tobytes() for one, other in pairs)
