"""Run a file and its references on samples, and accumulate errors and health."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pytest_edgeq import litert
from pytest_edgeq.compare.foreign import keras_output_names
from pytest_edgeq.compare.quantized import QuantizedModel
from pytest_edgeq.compare.reference import call_reference, in_file_order
from pytest_edgeq.compare.samples import Sample
from pytest_edgeq.numerics.comparison import PointSample, WorstSamples
from pytest_edgeq.numerics.error_sums import IOSpec, StageAccumulator
from pytest_edgeq.numerics.findings import Finding
from pytest_edgeq.numerics.health import InputHealth, OutputHealth
from pytest_edgeq.numerics.metrics import ONE_BIT_DB, Side, least_sqnr_db
from pytest_edgeq.numerics.samples import EvaluatedLedger, SampleLedger
from pytest_edgeq.numerics.static_health import UNKNOWN, Calibration
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.tflite.boundary import code_range, qparams
from pytest_edgeq.tflite.ends import choices, quantized_inputs, quantized_output
from pytest_edgeq.tflite.layout import mismatch_hint
from pytest_edgeq.tflite.subgraph import Tensor

if TYPE_CHECKING:
    import torch


Arrays = Sequence[np.ndarray[Any, Any]]


@dataclass(frozen=True, slots=True)
class SampleOutputs:
    """Outputs of one sample, in the file's order."""

    codes: Arrays  # the outputs of the file as stored
    values: Mapping[str, Arrays]  # the float outputs of each side, by the side's name


class SampleRunner:
    """A file and its references with interpreters of their own; not thread-safe."""

    def __init__(
        self,
        quantized: QuantizedModel,
        runtime: str,
        cores: contextlib.AbstractContextManager[object] | None = None,
    ) -> None:
        self._quantized, self._runtime = quantized, runtime
        self._cores = contextlib.nullcontext() if cores is None else cores
        self._edge, self._between = quantized.edge, float_file_between(quantized)
        self._simulated: torch.nn.Module | None = None
        self._is_named = False
        """Whether the reference names its outputs as the file does."""

    def clone(self, cores: contextlib.AbstractContextManager[object] | None = None) -> SampleRunner:
        """Return a runner of the same models with interpreters of its own."""
        other = SampleRunner(self._quantized.clone(), self._runtime, cores)
        other._simulated = self._simulated
        return other

    def prepare(self) -> None:
        """Compute the rounded weights of a quantized graph, which all samples share."""
        if self._simulated is None and self._quantized.simulated is not None:
            self._simulated = litert.copied_to_run(self._quantized.simulated)

    def run(self, sample: Sample, index: int) -> SampleOutputs:
        """Run one sample."""
        quantized, arrays = self._quantized, sample.arrays()
        codes = self._run(self._edge, arrays, index)
        wanted = [io_tensor.name for io_tensor in self._edge.signature.outputs]
        values: dict[str, Arrays] = {"edge": self._edge.decode(codes)}
        with self._cores:
            values["float"] = self.reference(sample, index)
            if not index and not self._is_named:
                check_order(quantized, values["float"], values["edge"])
            check_layout(quantized, values["float"], values["edge"])
            self.prepare()
            if self._simulated is not None:
                outputs = call_reference(self._simulated, sample)
                values["simulated"] = in_file_order(outputs, wanted, quantized.name)
        if self._between is not None:
            decoded = self._between.decode(self._run(self._between, arrays, index))
            names = [io_tensor.name for io_tensor in self._between.signature.outputs]
            outputs = list(zip(names, decoded, strict=True))
            values["float_tflite"] = in_file_order(outputs, wanted, quantized.name)
        return SampleOutputs(codes, values)

    def both(self, sample: Sample) -> tuple[Arrays, Arrays]:
        """Run the reference and the file, and return the outputs of both."""
        codes = self._run(self._edge, sample.arrays(), 0)
        return self.reference(sample, 0), self._edge.decode(codes)

    def reference(self, sample: Sample, index: int) -> Arrays:
        """Run only the reference, and return its outputs in the file's order."""
        reference, name = self._quantized.float_model, self._quantized.name
        assert reference is not None, "unreachable because a Comparer has checked"
        wanted = [io_tensor.name for io_tensor in self._edge.signature.outputs]
        aliases = keras_output_names(reference)
        try:
            outputs = call_reference(reference, sample)
        except RuntimeError as error:
            first = (str(error).splitlines() or [""])[0]
            raise RuntimeError(
                f"the reference of {name} fails on evaluation sample {index}: expected its "
                f"outputs, got {type(error).__name__}: {first}\n"
                f"cause: it is called with the inputs of the file, of shape "
                f"{', '.join(str(list(array.shape)) for array in sample.arrays())}; "
                "reference(sample) by itself fails the same way"
            ) from error
        self._is_named = set(wanted) in ({key for key, _ in outputs}, set(aliases))
        return in_file_order(outputs, wanted, name, aliases)

    def _run(self, edge: EdgeFile, arrays: Arrays, index: int) -> Arrays:
        try:
            return edge.run(self._quantized.input_names, arrays, self._runtime)
        except (TypeError, ValueError) as error:
            raise type(error)(f"evaluation sample {index}: {error}") from None


# Flows whose ranges are, or may be, averages over the samples; of a loaded file it is unknown.
AVERAGING = ("recipe", "prebuilt")


class InputWatches:
    """Health of every quantized input, over a part of the samples; mergeable."""

    def __init__(self, edge: EdgeFile, *, averaged: bool) -> None:
        self._watches = [
            InputHealth(_io_spec(io_tensor.name, tensor), averaged=averaged)
            for io_tensor, tensor in quantized_inputs(edge.graph, edge.signature)
        ]

    def update(self, edge: EdgeFile, input_names: Sequence[str], arrays: Arrays) -> None:
        """Add one sample."""
        inputs = edge.by_input_name(input_names, arrays) if self._watches else {}
        for watch in self._watches:
            values = inputs[watch.spec.name]
            if values.dtype.kind == "f":  # integers are codes already
                watch.update(values)

    def merge(self, other: InputWatches) -> None:
        """Add the samples of other watches of the same file."""
        for mine, theirs in zip(self._watches, other._watches, strict=True):
            mine.merge(theirs)

    @property
    def spans(self) -> dict[str, tuple[float, float]]:
        """Width of each input's range of codes, and of the observed values."""
        return {watch.spec.name: watch.span for watch in self._watches}

    def findings(self, calibration: Calibration = UNKNOWN) -> list[Finding]:
        """Return the findings on the inputs."""
        return [each for watch in self._watches for each in watch.findings(calibration)]


class Measurement:
    """Errors of every stage, and health, over a part of the samples; mergeable."""

    def __init__(
        self,
        edge: EdgeFile,
        input_names: Sequence[str],
        sides: Mapping[str, tuple[str, str]],
        *,
        averaged: bool,
        keeps_points: bool = False,
        ledger: SampleLedger | None = None,
    ) -> None:
        self._edge: EdgeFile | None = edge
        self._ledger = ledger  # of the calibration samples
        self._input_names = input_names
        specs = output_specs(edge)
        self._sides = sides
        # Both sides of a conversion are float: there is no LSB.
        unscaled = [IOSpec(spec.name, chosen=spec.chosen) for spec in specs]
        self._stages = {
            name: StageAccumulator(unscaled if name == "conversion" else specs)
            for name in self._sides
        }
        self._health = [OutputHealth(spec, averaged=averaged) for spec in specs]
        self._inputs = InputWatches(edge, averaged=averaged)
        self.worst = WorstSamples()
        self._points = {spec.name: PointSample() for spec in specs} if keeps_points else {}
        self.evaluated = EvaluatedLedger()
        self.overlap = 0  # how many samples are calibration samples
        # the least and the greatest finite value of each input
        self.ranges: list[tuple[float, float]] = []

    @classmethod
    def of(cls, quantized: QuantizedModel, *, keeps_points: bool = False) -> Measurement:
        """Return an empty measurement of a model and its references."""
        return cls(
            quantized.edge,
            quantized.input_names,
            sides_of(quantized),
            averaged=quantized.flow in AVERAGING,
            keeps_points=keeps_points,
            ledger=quantized.ledger,
        )

    def update(self, index: int, sample: Sample, outcome: SampleOutputs) -> None:
        """Add one sample."""
        arrays = sample.arrays()
        assert self._edge is not None, "unreachable because what was pickled is merged alone"
        sides = {name: list(map(Side, values)) for name, values in outcome.values.items()}
        for name, accumulator in self._stages.items():
            reference, actual = self._sides[name]
            sqnr_db = accumulator.update(sides[reference], sides[actual], index=index)
            if name == "total":
                self.worst.offer(index, sqnr_db, sample.clone)
        codes = self._edge.in_reference_layout(outcome.codes)
        for watch, reference_side, edge_side, code in zip(
            self._health, sides["float"], sides["edge"], codes, strict=True
        ):
            # Behind a DEQUANTIZE they are floats, from which the codes follow.
            watch.update(reference_side, edge_side, None if code.dtype.kind == "f" else code)
        for i, points in enumerate(self._points.values()):
            points.update(index, {side: values[i] for side, values in outcome.values.items()})
        self._inputs.update(self._edge, self._input_names, arrays)
        digest = self.evaluated.add(index, arrays)
        self.overlap += self._ledger is not None and self._ledger.knows(digest)
        self._widen([Side(array).ends for array in arrays])

    def _widen(self, ranges: Sequence[tuple[float, float]]) -> None:
        pairs = zip(self.ranges or ranges, ranges or self.ranges, strict=True)
        self.ranges = [(min(one[0], two[0]), max(one[1], two[1])) for one, two in pairs]

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what merging does not need."""
        return {**self.__dict__, "_edge": None, "_ledger": None}

    def merge(self, other: Measurement) -> None:
        """Add all samples of another measurement."""
        for name, accumulator in self._stages.items():
            accumulator.merge(other._stages[name])
        for watch, theirs in zip(self._health, other._health, strict=True):
            watch.merge(theirs)
        self._inputs.merge(other._inputs)
        for name, points in self._points.items():
            points.merge(other._points[name])
        self.worst.merge(other.worst)
        self.evaluated.merge(other.evaluated)
        self.overlap += other.overlap
        self._widen(other.ranges)

    def results(self) -> dict[str, Any]:
        """Return the errors of every stage and kept elements, by attribute of a `Comparison`."""
        stages: dict[str, Any] = {name: each.result() for name, each in self._stages.items()}
        return {**stages, "points": {name: each.result() for name, each in self._points.items()}}

    def findings(self, calibration: Calibration = UNKNOWN) -> list[Finding]:
        """Return the findings on inputs and outputs."""
        outputs = [each for watch in self._health for each in watch.findings(calibration)]
        return [*self._inputs.findings(calibration), *outputs]


def float_file_between(quantized: QuantizedModel) -> EdgeFile | None:
    """Return the float file between reference and file, unless it is the reference."""
    return None if quantized.is_float_file_reference else quantized.float_edge


def sides_of(quantized: QuantizedModel) -> dict[str, tuple[str, str]]:
    """Return the stages of the flow, each with its reference and its actual side."""
    stages = {"total": ("float", "edge")}
    if quantized.simulated is not None:
        before = {"quantization": ("float", "simulated"), "lowering": ("simulated", "edge")}
    elif quantized.is_float_file_reference:
        before = {"quantization": ("float", "edge")}
    elif quantized.float_edge is not None:
        before = {"conversion": ("float", "float_tflite"), "quantization": ("float_tflite", "edge")}
    else:
        before = {"conversion": ("float", "edge")} if quantized.flow == "float" else {}
    return before | stages


class ReorderedError(ValueError):
    """The outputs of a file are in another order than the reference's."""


_MOST_ORDERED = 6  # outputs whose orders are tried


def check_order(quantized: QuantizedModel, reference: Arrays, edge: Arrays) -> None:
    """
    Check that unnamed outputs of a loaded file are in the reference's order.

    A ReorderedError needs exactly one order that fits: by value, or by shape alone if no order fits
    by value.
    """
    n = len(edge)
    if quantized.flow != "prebuilt" or not 1 < n <= _MOST_ORDERED:
        return
    alike = [[one.shape == two.shape for two in reference] for one in edge]
    # To one bit or better.
    near = [[least_sqnr_db([two], [one]) >= ONE_BIT_DB for two in reference] for one in edge]
    found = next((orders for fits in (near, alike) if (orders := _orders(fits))), [])
    if len(found) != 1 or found[0] == tuple(range(n)):
        return
    names = [io_tensor.name for io_tensor in quantized.edge.signature.outputs]
    pairs = ", ".join(
        f"the file's {names[here]!r} is the reference's {names[there]!r}"
        for here, there in enumerate(found[0])
        if here != there
    )
    raise ReorderedError(
        f"{quantized.name}: outputs are in another order: {pairs}\n"
        f"fix: let the reference return a dict by the file's names: {names}"
    )


def _orders(fits: Sequence[Sequence[bool]]) -> list[tuple[int, ...]]:
    orders = itertools.permutations(range(len(fits)))
    return [each for each in orders if all(fits[here][there] for here, there in enumerate(each))]


def check_layout(quantized: QuantizedModel, reference: Arrays, edge: Arrays) -> None:
    """Check that outputs have the shapes of the reference's."""
    io_tensors = quantized.edge.signature.outputs
    for io_tensor, expected, actual in zip(io_tensors, reference, edge, strict=True):
        if expected.shape == actual.shape:
            continue
        hint = mismatch_hint(expected.shape, actual.shape)
        if quantized.origin is not None:
            hint = ""  # the flow knows its own layout
        if not hint:
            hint = (
                "\ncause: the file was made from another model than the reference, or its last ops "
                "are others: an axis, a permutation, a slice"
            )
        elif quantized.edge.layouts.of(io_tensor) is not None:
            hint = "; layout= permuted it; without layout= it would fit"
        raise ValueError(
            f"{quantized.name}: output {io_tensor.name!r}: the reference returns shape "
            f"{list(expected.shape)}, the file {list(actual.shape)}{hint}"
        )


def output_specs(edge: EdgeFile) -> list[IOSpec]:
    """Return what a measurement needs of each output of a file."""
    graph, signature = edge.graph, edge.signature
    chosen = choices(graph, signature)
    return [
        _io_spec(each.name, quantized_output(graph, signature, each), chosen=each.name in chosen)
        for each in signature.outputs
    ]


def _io_spec(name: str, tensor: Tensor, *, chosen: bool = False) -> IOSpec:
    """Return name, scale, zero point and code range; only the name without one scale."""
    parameters = qparams(tensor)
    if parameters is None:
        return IOSpec(name, chosen=chosen)
    return IOSpec(name, *parameters, *code_range(tensor.dtype), chosen=chosen)
