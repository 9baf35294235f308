"""Parameters of a `.tflite` file, without a run: findings, and metadata for baselines."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from pytest_edgeq.errors import UnmatchedError, UnrunnableError, grouped
from pytest_edgeq.names import GPU_KERNELS, nearest
from pytest_edgeq.numerics.findings import (
    BLOCKING,
    PARTLY_ON_CPU,
    STATE_MISMATCH,
    UNSAFE_OP,
    USELESS,
    Finding,
    Place,
)
from pytest_edgeq.numerics.samples import SampleLedger
from pytest_edgeq.numerics.static_health import (
    check_bias,
    check_scales,
    has_default_parameters,
    uncalibrated_finding,
)
from pytest_edgeq.runtimes.delegation import delegation_of
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.runtimes.unsafe import unsafe_ops
from pytest_edgeq.tflite.boundary import qparams
from pytest_edgeq.tflite.conformance import violations_of
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.op_dtypes import OpDtypes
from pytest_edgeq.tflite.ops import CLAMPING, HOLDING, KEEPING_SCALE
from pytest_edgeq.tflite.roles import roles_of
from pytest_edgeq.tflite.subgraph import Op, Tensor
from pytest_edgeq.versions import loaded_torch


def static_findings(edge: EdgeFile) -> tuple[Finding, ...]:
    """Return the findings on scales, zero points and biases of a file."""
    findings: list[Finding] = []
    for signature in edge.graph.signatures:
        for io_tensor in signature.inputs:
            findings += check_scales(Place("input", io_tensor.name), io_tensor.tensor.scales)
    for entry, op in zip(edge.op_dtypes, edge.graph.ops, strict=True):
        roles = roles_of(edge.graph, op)
        for tensor in roles.outputs:
            findings += check_scales(_tensor("output", entry), tensor.scales)
        for stored in roles.weights:
            findings += check_scales(_tensor("weight", entry), stored.tensor.scales)
        for stored in roles.biases:
            if stored.tensor.dtype == "int32" and stored.tensor.is_constant:
                values = edge.graph.constant(stored.tensor).view(np.int32)
                findings += check_bias(_tensor("bias", entry), values)
        findings += _uncalibrated(edge.graph, op, entry)
    findings += [*conformance_findings(edge), *state_findings(edge)]
    return tuple(dict.fromkeys(findings))


def runtime_findings(edge: EdgeFile, runtime: str) -> tuple[Finding, ...]:
    """Return a finding if some ops of a file run on the CPU in a runtime on the GPU."""
    if edge.runtimes.kernels_of(runtime) not in GPU_KERNELS:
        return ()
    try:
        found = delegation_of(edge, runtime)
    except UnrunnableError as error:  # of a process that ended meanwhile
        return tuple(grouped([error]))
    if not (n_on_cpu := len(found.ops) - found.n_on_gpu):
        return ()
    _, *reasons = found.reasons
    return (
        Finding(
            kind=PARTLY_ON_CPU,
            place=Place("runtime", f"runtime {runtime!r}"),
            expected=f"all {len(edge.graph.ops)} ops on the GPU",
            got=f"{n_on_cpu} on the CPU",
            evidence=tuple(f"  {each}" for each in reasons),
            fix="replace the ops that LiteRT does not support on the GPU, or convert with a "
            "release that writes lower versions of them; "
            f"assert_delegated(model, {runtime!r}, allow=…) accepts ops on the CPU, edgeq.check "
            "does not",
        ),
    )


def conformance_findings(edge: EdgeFile, *, warnings: bool = False) -> tuple[Finding, ...]:
    """Return a finding for each op whose quantization TFLite's kernels do not support."""
    return tuple(
        each.finding(place=entry.place)
        for op, entry in zip(edge.graph.ops, edge.op_dtypes, strict=True)
        for each in violations_of(edge.graph, op)
        if each.is_warning is warnings
    )


def state_findings(edge: EdgeFile, states: Mapping[str, str] | None = None) -> tuple[Finding, ...]:
    """Return a finding for each state whose output and input differ in scale or zero point."""
    signatures = edge.graph.signatures
    outputs = [(each, io_tensor) for each in signatures for io_tensor in each.outputs]
    inputs = [(each, io_tensor) for each in signatures for io_tensor in each.inputs]
    for kind, io_tensors, names in (
        ("output", outputs, (states or {}).keys()),
        ("input", inputs, (states or {}).values()),
    ):
        known = [io_tensor.name for _, io_tensor in io_tensors]
        for name in names:
            if name not in known:
                raise UnmatchedError(
                    f"states: expected the name of an {kind}, got {name!r}{nearest(name, known)}"
                )
    found = []
    for (producer, output), (consumer, state) in itertools.product(outputs, inputs):
        is_state = output.name == state.name and producer is not consumer
        if states is not None:
            is_state = states.get(output.name) == state.name
        made, wanted = qparams(output.tensor), qparams(state.tensor)
        is_same_dtype = output.tensor.dtype == state.tensor.dtype
        if not (is_state and is_same_dtype and made and wanted) or made == wanted:
            continue
        found.append(
            Finding(
                kind=STATE_MISMATCH,
                place=Place("output", output.name),
                expected=f"of signature {producer.key!r} the scale and zero point of input "
                f"{state.name!r} of {consumer.key!r}, {wanted[0]:.6g} and {wanted[1]}",
                got=f"{made[0]:.6g} and {made[1]}",
                causes=(
                    "each signature was calibrated by itself, and codes that are handed on "
                    f"unchanged mean {wanted[0] / made[0]:.3g} × the values there",
                ),
                fix="calibrate both on the same states, keep them in float, or dequantize and "
                "quantize between the two calls",
                harm=USELESS,
            )
        )
    return tuple(found)


def _tensor(role: str, entry: OpDtypes) -> Place:
    return entry.place._replace(kind="tensor", name=f"the {role} of {entry.where}")


def _uncalibrated(graph: OpGraph, op: Op, entry: OpDtypes) -> list[Finding]:
    """Return a finding for an op with default parameters at its input and output."""
    if op.name in KEEPING_SCALE | HOLDING | CLAMPING:
        return []
    inputs, outputs = (
        [
            tensor
            for tensor in (graph.tensor(op, index) for index in indices if index >= 0)
            if not tensor.is_constant
            and has_default_parameters(tensor.scales, tensor.zero_points, tensor.dtype)
        ]
        for indices in (op.inputs, op.outputs)
    )
    if not inputs or not outputs:
        return []
    return [uncalibrated_finding(_tensor("output", entry), "which its input has, too")]


def unsafe_findings(edge: EdgeFile) -> tuple[Finding, ...]:
    """Return a finding for each op at which kernels abort or read foreign memory."""
    entries = {(entry.subgraph, entry.index): entry for entry in edge.op_dtypes}
    return tuple(
        Finding(
            kind=UNSAFE_OP, place=entries[op.subgraph, op.index].place, symptom=cause, harm=BLOCKING
        )
        for op, cause in unsafe_ops(edge.graph)
    )


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
