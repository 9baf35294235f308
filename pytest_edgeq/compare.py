"""Run the references and the file side by side, sample by sample, and measure every stage."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from pytest_edgeq.build import build_of
from pytest_edgeq.foreign import is_keras, keras_output_names
from pytest_edgeq.numerics.comparison import Comparison, WorstSample, WorstSamples
from pytest_edgeq.numerics.errors import BorderSpec, StageAccumulator
from pytest_edgeq.numerics.health import (
    STATEFUL_REFERENCE,
    Finding,
    OutputHealth,
    check_bias,
    check_scales,
    overlap_finding,
    repeated_finding,
)
from pytest_edgeq.numerics.inputs import InputHealth
from pytest_edgeq.quantized import QuantizedModel
from pytest_edgeq.reference import call_reference, in_file_order, undisturbed
from pytest_edgeq.samples import Sample, read_samples
from pytest_edgeq.tflite.boundary import code_range
from pytest_edgeq.tflite.edge import EdgeFile
from pytest_edgeq.tflite.graph import Tensor
from pytest_edgeq.tflite.inputs import quantized_inputs
from pytest_edgeq.tflite.layout import mismatch_hint
from pytest_edgeq.tflite.roles import roles_of

__all__ = ["Comparer", "compare", "static_findings"]

# A user's test shows the user's line and the message, not how we came to it.
__tracebackhide__ = True

Arrays = Sequence[np.ndarray[Any, Any]]


def compare(
    quantized: QuantizedModel, inputs: Iterable[Any], *, runtime: str, localize_seconds: float = 0
) -> Comparison:
    """
    Measure the errors of every stage that the model's flow has.

    Args:
        quantized: The file and its references.
        inputs: Samples, read once, in order, one held at a time.
        runtime: Kernels that run the file (and a recipe flow's float file).
        localize_seconds: How long the comparison may look for the layer to blame when a check of it
            fails; 0 for not at all.

    Raises:
        ValueError: No sample, one that does not fit, no reference, or outputs that differ in
            number or shape.
        TypeError: A sample of another kind or dtype.
        RuntimeError: The kernels cannot allocate the file, or torch fails in the reference.
    """
    with Comparer(quantized, runtime, localize_seconds) as comparer:
        for sample in read_samples(inputs, quantized.spec, "evaluation"):
            comparer.update(sample)
    return comparer.result()


class Comparer:
    """
    Measures the errors of every stage, sample by sample.

    The samples are given inside of `with`, which leaves the reference's buffers as they were; the
    result is asked for behind it.

    Args:
        quantized: The file and its references.
        runtime: Kernels that run the file (and a recipe flow's float file).
        localize_seconds: As `compare` takes it.

    Raises:
        ValueError: No reference, or an unknown runtime.
    """

    def __init__(
        self, quantized: QuantizedModel, runtime: str, localize_seconds: float = 0
    ) -> None:
        quantized.edge.runtimes.check(runtime)
        if quantized.float_model is None:
            raise ValueError(
                f"{quantized.name} has no reference to compare with: load it with "
                "edgeq.load(tflite, reference=model)"
            )
        self._quantized = quantized
        self._runtime = runtime
        self._localize_seconds = localize_seconds
        specs = [_spec(each.name, each.tensor) for each in quantized.edge.signature.outputs]
        self._sides = _sides(quantized)
        # Both sides of a conversion are float: there is no LSB.
        unscaled = [BorderSpec(spec.name) for spec in specs]
        self._stages = {
            name: StageAccumulator(unscaled if name == "conversion" else specs)
            for name in self._sides
        }
        # ai-edge-quantizer calibrates by moving averages.
        # A loaded file does not say what it was calibrated by.
        averaged = quantized.flow in ("recipe", "prebuilt")
        self._health = [OutputHealth(spec, averaged=averaged) for spec in specs]
        edge = quantized.edge
        self._inputs = [
            (border.name, InputHealth(_spec(border.name, tensor), averaged=averaged))
            for border, tensor in quantized_inputs(edge.graph, edge.signature)
        ]
        self._worst = WorstSamples()
        self._overlap = self._count = 0
        self._digest = hashlib.sha256()
        self._open = contextlib.ExitStack()
        self._changed: Sequence[str] = ()

    def __enter__(self) -> Comparer:  # noqa: PYI034 # Self came with Python 3.11
        quantized = self._quantized
        for edge in (quantized.edge, quantized.float_edge):
            if edge is not None:
                edge.restart()
        assert quantized.float_model is not None, "unreachable because __init__ has looked"
        self._changed = self._open.enter_context(undisturbed(quantized.float_model, quantized.name))
        return self

    def __exit__(self, *raised: object) -> None:
        self._open.close()

    def update(self, sample: Sample) -> Arrays:
        """
        Measure one sample.

        Returns:
            What the reference gave, in the file's order of outputs.

        Raises:
            ValueError: The sample does not fit, or outputs differ in number or shape.
            TypeError: A sample of another kind or dtype.
            RuntimeError: The kernels cannot allocate the file, or torch fails in the reference.
        """
        quantized, runtime, index = self._quantized, self._runtime, self._count
        arrays = sample.arrays()
        codes = _run(quantized.edge, quantized, arrays, runtime, index)
        values = _values(quantized, sample, arrays, codes, runtime, index)
        for name, accumulator in self._stages.items():
            reference, actual = self._sides[name]
            sqnr_db = accumulator.update(values[reference], values[actual])
            if name == "total":
                self._worst.offer(index, sqnr_db, sample.clone)
        for watch, reference_value, edge_value, code in zip(
            self._health, values["float"], values["edge"], quantized.edge.turned(codes), strict=True
        ):
            watch.update(reference_value, edge_value, code)
        given = quantized.edge.by_border(quantized.input_names, arrays) if self._inputs else {}
        for border, input_watch in self._inputs:
            # Whole numbers are codes, as the file takes them.
            if given[border].dtype.kind == "f":
                input_watch.update(given[border])
        self._digest_sample(arrays)
        self._overlap += arrays in quantized.ledger
        self._count += 1
        return values["float"]

    def result(self) -> Comparison:
        """Give what was measured."""
        quantized = self._quantized
        findings = [finding for _, watch in self._inputs for finding in watch.findings()]
        findings += [finding for watch in self._health for finding in watch.findings()]
        met_again = overlap_finding(self._overlap, self._count, chance=quantized.ledger.chance)
        findings += [each for each in (met_again, repeated_finding(quantized.ledger)) if each]
        if self._changed:
            findings.append(_stateful(quantized.name, self._changed))
        results: dict[str, Any] = {
            name: accumulator.result() for name, accumulator in self._stages.items()
        }
        worst = self._worst.result()
        return Comparison(
            name=quantized.name,
            flow=quantized.flow,
            runtime=self._runtime,
            health=(*findings, *static_findings(quantized.edge)),
            worst_samples=worst,
            fingerprint=self._digest.hexdigest(),
            build=build_of(quantized.edge, n_calibrated=len(quantized.ledger)),
            explain=self._explanation(worst),
            **results,
        )

    def _digest_sample(self, arrays: Arrays) -> None:
        for name, array in zip(self._quantized.input_names, arrays, strict=True):
            # repr of the names, so that no two lists of inputs read the same.
            head = repr((self._count, name, array.dtype.str, array.shape))
            self._digest.update(head.encode())
            self._digest.update(np.ascontiguousarray(array).tobytes())

    def _explanation(self, worst: Sequence[WorstSample]) -> Callable[[], str] | None:
        quantized, seconds = self._quantized, self._localize_seconds
        if not seconds:
            return None

        def explain() -> str:
            from pytest_edgeq.localize.failure import explain

            return explain(quantized, [each.inputs for each in worst], seconds)

        return functools.cache(explain)


def _stateful(name: str, changed: Sequence[str]) -> Finding:
    return Finding(
        STATEFUL_REFERENCE,
        name,
        f"its forward changes the buffer {changed[0]!r} ({len(changed)} in all), so what a sample "
        "gives depends on those before it; the buffers were put back afterwards",
    )


def _run(
    edge: EdgeFile, quantized: QuantizedModel, arrays: Arrays, runtime: str, index: int
) -> Arrays:
    try:
        return edge.run(quantized.input_names, arrays, runtime)
    except (TypeError, ValueError) as error:
        raise type(error)(f"evaluation sample {index}: {error}") from None


def _values(
    quantized: QuantizedModel,
    sample: Sample,
    arrays: Arrays,
    codes: Arrays,
    runtime: str,
    index: int,
) -> dict[str, Arrays]:
    """What every side gives for one sample, each in the file's own order of outputs."""
    wanted = [border.name for border in quantized.edge.signature.outputs]
    reference = quantized.float_model
    assert reference is not None, "unreachable because compare has looked"
    aliases = keras_output_names(reference) if is_keras(reference) else ()
    try:
        outputs = call_reference(reference, sample)
    except RuntimeError as error:
        first = (str(error).splitlines() or [""])[0]
        raise RuntimeError(
            f"the reference of {quantized.name} fails on evaluation sample {index}: expected its "
            f"outputs, got {type(error).__name__}: {first}\n"
            f"why: it is given what the file takes, of shape "
            f"{', '.join(str(list(array.shape)) for array in arrays)}; reference(sample) by itself "
            "fails the same way"
        ) from error
    values: dict[str, Arrays] = {
        "edge": quantized.edge.decode(codes),
        "float": in_file_order(outputs, wanted, quantized.name, aliases),
    }
    check_layout(quantized, values["float"], values["edge"])
    if quantized.simulated is not None:
        outputs = call_reference(quantized.simulated, sample)
        values["simulated"] = in_file_order(outputs, wanted, quantized.name)
    between = quantized.float_edge
    if between is not None:
        decoded = between.decode(_run(between, quantized, arrays, runtime, index))
        names = [border.name for border in between.signature.outputs]
        outputs = list(zip(names, decoded, strict=True))
        values["float_tflite"] = in_file_order(outputs, wanted, quantized.name)
    return values


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


def _spec(name: str, tensor: Tensor) -> BorderSpec:
    if not tensor.is_quantized or len(tensor.scales) != 1:
        return BorderSpec(name)
    low, high = code_range(tensor.dtype)
    return BorderSpec(name, float(tensor.scales[0]), int(tensor.zero_points[0]), low, high)


def check_layout(quantized: QuantizedModel, reference: Arrays, edge: Arrays) -> None:
    borders = quantized.edge.signature.outputs
    for border, expected, actual in zip(borders, reference, edge, strict=True):
        if expected.shape == actual.shape:
            continue
        hint = mismatch_hint(expected.shape, actual.shape)
        if quantized.origin is not None:
            hint = ""  # the flow knows its own layout
        if not hint:
            hint = (
                "\nwhy: the file was made from another model than the reference, or its last ops "
                "are others: an axis, a permutation, a slice"
            )
        elif quantized.edge.layouts.of(border) is not None:
            hint = "; it was turned by layout=, and would fit as the file has it"
        raise ValueError(
            f"{quantized.name}: output {border.name!r}: the reference gives shape "
            f"{list(expected.shape)}, the file {list(actual.shape)}{hint}"
        )


def static_findings(edge: EdgeFile) -> tuple[Finding, ...]:
    """What is wrong in the file itself: scales, zero points, biases."""
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
