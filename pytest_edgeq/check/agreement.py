"""
Run every runtime on the same samples and report differences beyond the rounding of kernels.

End to end two sound runtimes may differ by tens of LSB. So if outputs differ, each op is run alone
on the inputs that it has in the builtin kernels, where a code may differ by one, and only if the
real value is near a tie (`op_pairs`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.check.gpu_ops import GpuResults
from pytest_edgeq.check.op_pairs import first_differing_op
from pytest_edgeq.check.runtime_results import FLOAT_UNIT, RuntimeResults
from pytest_edgeq.compare.file_health import runtime_findings
from pytest_edgeq.compare.quantized import QuantizedModel
from pytest_edgeq.compare.samples import Sample
from pytest_edgeq.errors import CrashedError, UnrunnableError, grouped
from pytest_edgeq.localize.single_ops import SingleOps
from pytest_edgeq.names import GPU_KERNELS
from pytest_edgeq.numerics.arrays import contiguous
from pytest_edgeq.numerics.findings import RUNTIMES_DIFFER, Finding, Place, text_of
from pytest_edgeq.runtimes.runner import KEEPING
from pytest_edgeq.tflite.graph import OpGraph

Array = npt.NDArray[Any]

SAMPLES = 4  # number of samples that the runtimes are compared on, to bound the cost
_MUST_RUN = "xnnpack"

# Rows of as many equal scores or more abort the process at a check of `softmax.h` (BUILTIN_REF,
# ai-edge-litert 2.3.0; 511 do not).
_SOFTMAX_ABORTS = 512


def compared_runtimes(quantized: QuantizedModel) -> tuple[str, ...]:
    """
    Return the runtimes that a model is run on, the session's own first.

    No device runs TensorFlow's or the reference kernels: they are included only if they are the
    session's own.
    """
    found = ["xnnpack", "builtin"]
    if importlib.util.find_spec("ai_edge_litert.compiled_model") is not None:
        found.append("compiled")
    found += (*quantized.edge.runtimes.own, *quantized.edge.runtimes.check_targets)
    return tuple(dict.fromkeys((quantized.runtime, *found)))


@dataclass(frozen=True, slots=True)
class AgreementResult:
    """Result of the comparison of runtimes."""

    unable: tuple[UnrunnableError, ...]  # runtimes that cannot allocate or run the file, and why
    differences: tuple[Finding, ...]
    notes: tuple[str, ...]  # what could not be compared, and why


class Agreement:
    """Runs the first `SAMPLES` samples on every runtime and reports the differences."""

    def __init__(self, quantized: QuantizedModel) -> None:
        self._quantized = quantized
        edge = quantized.edge
        # Runs here must not advance the state of other runs.
        self._edge = edge = edge.clone() if edge.graph.is_stateful else edge
        self._count = 0
        self._first: Mapping[str, Array] = {}
        self._last: Mapping[str, Array] = {}
        self._is_varied = False
        self._unable: list[UnrunnableError] = []
        self._lacking: list[UnrunnableError] = []
        self._notes: list[str] = []
        names = [name for name in compared_runtimes(quantized) if self._can_open(name)]
        # The runtime that the others are compared with.
        self._base = next((name for name in (*KEEPING, *names) if name in names), "")
        self._opened: dict[str, RuntimeResults] = {}
        for name in names:
            kind = GpuResults if edge.runtimes.kernels_of(name) in GPU_KERNELS else RuntimeResults
            self._opened[name] = kind(name, self._base, edge)
        self._ops = SingleOps(edge, self._base) if self._base in KEEPING else None

    def update(self, sample: Sample, reference: Sequence[Array] | None) -> None:
        """Run one sample; samples after the first `SAMPLES` are ignored."""
        if self._count < SAMPLES and self._base:
            inputs = self._edge.encode(self._quantized.input_names, sample.arrays())
            self._run_sample(inputs, reference)

    @property
    def opened(self) -> frozenset[str]:
        """The runtimes that can run the file, as far as is known."""
        return frozenset(self._opened)

    def result(self) -> AgreementResult:
        """Return the findings and notes on all runtimes."""
        differences: list[Finding] = []
        if self._count and not self._is_varied:
            # Stale results need two different inputs to show.
            turned = {
                name: contiguous(value.reshape(-1)[::-1].reshape(value.shape))
                for name, value in self._first.items()
            }
            self._run_sample(turned, None)
        if self._count:
            differences += self._repeat()
            for results in self._opened.values():
                self._compare_ops_again(results)
                if results.name != self._quantized.runtime:  # whose comparison tells it
                    differences += runtime_findings(self._edge, results.name)
        self._note_kernels()
        for results in self._opened.values():
            differences += results.findings()
            self._notes += [*results.not_compared(), *results.notes]
        if self._ops is not None:
            self._ops.close()
        same = {each.text for each in self._unable}
        unable = [*self._unable, *(each for each in self._lacking if each.text in same)]
        self._notes += [
            f"not compared, as kernels lack an op: {text_of([each])}"
            for each in grouped(each for each in self._lacking if each.text not in same)
        ]
        return AgreementResult(tuple(unable), tuple(differences), tuple(self._notes))

    def _note_kernels(self) -> None:
        """Note each target whose outputs differ from the same kernels' on this machine."""
        for name, results in self._opened.items():
            twin = self._opened.get(self._edge.runtimes.kernels_of(name))
            if twin is None or twin is results or not results.first or not twin.first:
                continue
            if not _equal(results.first, twin.first):
                ops = self._ops or SingleOps(self._edge)
                text = first_differing_op(ops, twin.name, name, self._first)
                self._notes += [f"{twin.name} and {name}: {text}"] if text else []

    def _compare_ops_again(self, results: RuntimeResults) -> None:
        """Compare the ops of a runtime on a second sample, which reveals stale results."""
        if results.ops_sample is None or self._ops is None:
            return
        is_last = results.ops_sample == self._count - 1
        inputs, index = (self._first, 0) if is_last else (self._last, self._count - 1)
        results.compare_ops(self._ops, inputs, index)

    def _can_open(self, name: str) -> bool:
        is_reference = self._edge.runtimes.kernels_of(name) == "reference"
        if is_reference and (cause := _aborts(self._edge.graph)):
            self._notes.append(f"runtime {name!r} was not run: {cause}")
            return False
        try:
            self._edge.runner(name)
        except UnrunnableError as error:
            self._refused(error)
            return False
        return True

    def _refused(self, error: UnrunnableError) -> None:
        runtimes = self._edge.runtimes
        must_run = (self._quantized.runtime, _MUST_RUN, *runtimes.own, *runtimes.check_targets)
        is_fault = error.runtime in must_run or isinstance(error, CrashedError)
        is_minor = error.is_lacking and not is_fault
        (self._lacking if is_minor else self._unable).append(error)

    def _run_sample(self, inputs: Mapping[str, Array], reference: Sequence[Array] | None) -> None:
        """Run one sample on every runtime; errors are measured only with a reference."""
        codes: dict[str, Sequence[Array]] = {}
        for name in list(self._opened):
            try:
                codes[name] = self._edge.runner(name).run(inputs)
            except UnrunnableError as error:
                self._refused(error)
                del self._opened[name]
        self._last = {name: value.copy() for name, value in inputs.items()}
        self._first = self._first or self._last
        self._is_varied |= any(
            not np.array_equal(value, self._first[name]) for name, value in inputs.items()
        )
        index, self._count = self._count, self._count + 1
        if self._base not in codes:
            return
        expected = codes[self._base]
        known = [expected]
        for name, made in codes.items():
            results = self._opened[name]
            results.first = results.first if index else made
            base = self._opened[self._base]
            if index and _equal(made, results.first) and not _equal(expected, base.first):
                results.stale_sample = index
            if reference is not None and name != self._base:
                results.add_distances(expected, made, reference)
            # Of runtimes with equal results, the ops of one are compared.
            is_new = not any(_equal(each, made) for each in known)
            known.append(made)
            if self._ops is not None and is_new and results.ops_sample is None:
                results.ops_sample = index
                results.compare_ops(self._ops, inputs, index)

    def _repeat(self) -> list[Finding]:
        """Run the first sample again, after the others."""
        self._edge.restart()
        found = []
        for name, results in self._opened.items():
            if not results.first:
                continue  # it did not run the first sample, as reported
            try:
                again = self._edge.runner(name).run(self._first)
            except UnrunnableError as error:
                self._refused(error)
                continue
            for io_tensor, one, two in zip(
                self._edge.signature.outputs, results.first, again, strict=True
            ):
                if share := _unrepeated(one, two):
                    cause = (
                        "the runtime returns stale outputs or keeps state between runs: outputs "
                        "are not copied, or a state is not reset"
                    )
                    headline = (
                        f"runtime {name!r}: output {io_tensor.name!r}: expected sample 0 to give "
                        f"the same when it is run again, got {share}"
                    )
                    place = Place("runtime", name)
                    found.append(
                        Finding(
                            kind=RUNTIMES_DIFFER, place=place, headline=headline, causes=(cause,)
                        )
                    )
        return found


def _equal(one: Sequence[Array], two: Sequence[Array]) -> bool:
    """Whether the outputs of two runs are equal, NaN at the same places."""
    return len(one) == len(two) and all(
        np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in zip(one, two, strict=True)
    )


def _aborts(graph: OpGraph) -> str:
    """Return why the reference kernels may abort this process; empty if they do not."""
    for op in graph.ops:
        if op.name == "SOFTMAX":
            tensor = graph.tensor(op, op.inputs[0])
            if tensor.dtype in ("int8", "uint8") and tensor.shape[-1] >= _SOFTMAX_ABORTS:
                return (
                    f"its kernels abort at a SOFTMAX of {tensor.dtype} over "
                    f"{tensor.shape[-1]} values if all are equal"
                )
    return ""


def _unrepeated(one: Array, two: Array) -> str:
    """Return how much of an output changes when run again; empty if nothing."""
    if one.shape != two.shape:
        return f"the shape {list(two.shape)} in place of {list(one.shape)}"
    limit = 0.0
    if one.dtype.kind == "f":
        limit = FLOAT_UNIT * float(np.abs(one[np.isfinite(one)]).max(initial=0.0))
    with np.errstate(invalid="ignore"):
        same = (one == two) | (np.isnan(one) & np.isnan(two))
        same = same | (np.abs(one - two) <= limit) if limit else same
    n_other = one.size - int(np.count_nonzero(same))
    return f"{n_other} of {one.size} values that differ" if n_other else ""
