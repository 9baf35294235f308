"""Run the references and the file side by side, sample by sample, and measure every stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from pytest_edgeq.numerics.comparison import Comparison, WorstSamples
from pytest_edgeq.numerics.errors import OutputSpec, StageAccumulator
from pytest_edgeq.numerics.health import (
    Finding,
    OutputHealth,
    check_bias,
    check_scales,
    overlap_finding,
)
from pytest_edgeq.quantized import QuantizedModel
from pytest_edgeq.reference import call_reference
from pytest_edgeq.samples import read_samples
from pytest_edgeq.tflite.boundary import code_range
from pytest_edgeq.tflite.edge import EdgeFile
from pytest_edgeq.tflite.graph import SignatureTensor
from pytest_edgeq.tflite.roles import roles_of
from pytest_edgeq.tflite.runtimes import check_runtime

__all__ = ["compare", "static_findings"]

# A user's test shows the user's line and the message, not how we came to it.
__tracebackhide__ = True

Arrays = list[np.ndarray[Any, Any]]


def compare(quantized: QuantizedModel, inputs: Iterable[Any], *, runtime: str) -> Comparison:
    """
    Measure the errors of every stage that the model's flow has.

    Args:
        quantized: The file and its references.
        inputs: Samples, read once, in order, one held at a time.
        runtime: Kernels that run the file (and a recipe flow's float file).

    Raises:
        ValueError: No sample, one that does not fit, no reference, or outputs that differ in
            number or shape.
        TypeError: A sample of another kind or dtype.
        RuntimeError: The kernels cannot allocate the file.
    """
    check_runtime(runtime)
    if quantized.float_model is None:
        raise ValueError(
            f"{quantized.name} has no reference to compare with: load it with "
            "edgeq.load(tflite, reference=model)"
        )
    borders = quantized.edge.signature.outputs
    specs = [_output_spec(border) for border in borders]
    sides = _sides(quantized)
    # Both sides of a conversion are float: there is no LSB.
    unscaled = [OutputSpec(spec.name) for spec in specs]
    stages = {name: StageAccumulator(unscaled if name == "conversion" else specs) for name in sides}
    health = [OutputHealth(spec) for spec in specs]
    worst = WorstSamples()
    overlap = count = 0
    names = quantized.input_names
    for sample in read_samples(inputs, quantized.spec, "evaluation"):
        arrays = sample.arrays()
        codes = quantized.edge.run(names, arrays, runtime)
        values = {
            "edge": quantized.edge.decode(codes),
            "float": _in_order(call_reference(quantized.float_model, sample), borders, quantized),
        }
        if quantized.simulated is not None:
            values["simulated"] = [v for _, v in call_reference(quantized.simulated, sample)]
        if quantized.float_edge is not None:
            values["float_tflite"] = _run_float(quantized.float_edge, names, arrays, runtime)
        for name, accumulator in stages.items():
            reference, actual = sides[name]
            sqnr_db = accumulator.update(values[reference], values[actual])
            if name == "total":
                worst.offer(count, sqnr_db, sample.clone)
        for watch, reference_value, edge_value, code in zip(
            health, values["float"], values["edge"], codes, strict=True
        ):
            watch.update(reference_value, edge_value, code)
        overlap += arrays in quantized.ledger
        count += 1
    findings = [finding for watch in health for finding in watch.findings()]
    met_again = overlap_finding(overlap, count)
    if met_again is not None:
        findings.append(met_again)
    results = {name: accumulator.result() for name, accumulator in stages.items()}
    return Comparison(
        name=quantized.name,
        flow=quantized.flow,
        runtime=runtime,
        health=(*findings, *static_findings(quantized.edge)),
        worst_samples=worst.result(),
        **results,
    )


_Sides = dict[str, tuple[str, str]]

# By what the flow has: which side of each stage is the reference, which the actual one.
_WITH_SIMULATED: _Sides = {
    "quantization": ("float", "simulated"),
    "lowering": ("simulated", "edge"),
    "total": ("float", "edge"),
}
_WITH_FLOAT_TFLITE: _Sides = {
    "conversion": ("float", "float_tflite"),
    "quantization": ("float_tflite", "edge"),
    "total": ("float", "edge"),
}
_WITHOUT_QUANTIZER: _Sides = {"conversion": ("float", "edge"), "total": ("float", "edge")}
_FILE_ALONE: _Sides = {"total": ("float", "edge")}


def _sides(quantized: QuantizedModel) -> _Sides:
    if quantized.simulated is not None:
        return _WITH_SIMULATED
    if quantized.float_edge is not None:
        return _WITH_FLOAT_TFLITE
    return _WITHOUT_QUANTIZER if quantized.flow == "float" else _FILE_ALONE


def _output_spec(border: SignatureTensor) -> OutputSpec:
    tensor = border.tensor
    if not tensor.is_quantized or len(tensor.scales) != 1:
        return OutputSpec(border.name)
    low, high = code_range(tensor.dtype)
    return OutputSpec(border.name, float(tensor.scales[0]), int(tensor.zero_points[0]), low, high)


def _run_float(
    edge: EdgeFile, names: Sequence[str], arrays: Sequence[np.ndarray[Any, Any]], runtime: str
) -> Arrays:
    return edge.decode(edge.run(names, arrays, runtime))


def _in_order(
    outputs: list[tuple[str | None, np.ndarray[Any, Any]]],
    borders: Sequence[SignatureTensor],
    quantized: QuantizedModel,
) -> Arrays:
    """The reference's outputs in the file's order: by name where both know the names."""
    if len(outputs) != len(borders):
        raise ValueError(
            f"{quantized.name}: the reference gives {len(outputs)} output(s) "
            f"{[name or list(value.shape) for name, value in outputs]}, the file {len(borders)}: "
            f"{[border.name for border in borders]}"
        )
    named = dict(outputs)
    wanted = [border.name for border in borders]
    if None not in named and set(named) == set(wanted):
        return [named[name] for name in wanted]
    return [value for _, value in outputs]


def static_findings(edge: EdgeFile) -> tuple[Finding, ...]:
    """What is wrong in the file itself: scales, zero points, biases."""
    findings: list[Finding] = []
    for entry, op in zip(edge.op_dtypes, edge.graph.ops, strict=True):
        roles = roles_of(edge.graph, op)
        for tensor in roles.outputs:
            findings += check_scales(
                f"the output of {entry.where}",
                tensor.scales,
                tensor.zero_points,
                activation=True,
                dtype=tensor.dtype,
            )
        for stored in roles.weights:
            findings += check_scales(
                f"the weight of {entry.where}",
                stored.tensor.scales,
                stored.tensor.zero_points,
                activation=False,
                dtype=stored.tensor.dtype,
            )
        for stored in roles.biases:
            if stored.tensor.dtype == "int32" and stored.tensor.is_constant:
                values = edge.graph.constant(stored.tensor).view(np.int32)
                findings += check_bias(f"the bias of {entry.where}", values)
    return tuple(dict.fromkeys(findings))
