"""
Run every runtime on the same samples and report differences beyond the rounding of kernels.

Kernels round differently, and the difference grows from layer to layer: end to end two sound
runtimes may differ by tens of LSB. So if outputs differ, each op is run alone on the inputs that it
has in the builtin kernels, and there a code may differ by one, and only if the real value is near a
tie (`op_pairs`).
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.check.gpu_ops import HALF_UNIT
from pytest_edgeq.check.op_pairs import (
    GREATEST,
    Pair,
    first_differing_op,
    make_pair,
    problem_together,
)
from pytest_edgeq.compare.file_health import runtime_findings
from pytest_edgeq.compare.quantized import QuantizedModel
from pytest_edgeq.compare.samples import Sample
from pytest_edgeq.errors import CopyError, CrashedError, UnrunnableError, grouped
from pytest_edgeq.localize.single_ops import SingleOps
from pytest_edgeq.numerics.arrays import contiguous
from pytest_edgeq.numerics.findings import NO_HARM, RUNTIMES_DIFFER, Finding, Harm, Place, text_of
from pytest_edgeq.runtimes.bounds.floats import reduction_length
from pytest_edgeq.runtimes.bounds.site import ULP
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.runtimes.runner import KEEPING
from pytest_edgeq.tflite.boundary import qparams
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.op_dtypes import entry_of
from pytest_edgeq.tflite.ops import KNOWN_WRONG
from pytest_edgeq.tflite.subgraph import Op

Array = npt.NDArray[Any]

SAMPLES = 4  # number of samples that the runtimes are compared on, to bound the cost
_MUST_RUN = "xnnpack"

# No device runs these kernels: they run one sample, and their refusals and differences are notes,
# not findings.
_UNSHIPPED = "reference"

# Rows of as many equal scores or more abort the process at a check of `softmax.h` (BUILTIN_REF,
# ai-edge-litert 2.3.0; 511 do not).
_SOFTMAX_ABORTS = 512

# Allowed distance of two runtimes, as a multiple of the builtin kernels' own error. |R − B| ≤ |R −
# f| + |B − f|: a runtime R that is at most three times as far from the reference f as the builtin
# kernels B are.
_ERROR_RATIO = 4

_SIGMAS = 3  # standard deviations that a sum of few squares may lie below its mean
_ALL = 5  # minimum number of ops that all differ, so that no kernel is to blame
_BETWEEN = (
    "no op by itself explains it, so it is what the runtime does between the ops: outputs that are "
    "not read anew, inputs that are not written, memory that two tensors share"
)

_STALE = (
    "the runtime did not compute this sample and returned what an earlier run had left in memory, "
    "or its outputs are not read anew"
)

# SQNR of an op by itself, in dB, below which it explains a loss of the outputs.
_EXPLAINS_DB = 30.0

# Half a unit in the last place of float16, relative: kernels may compute in half precision.
_FLOAT_UNIT = 2.0**-11


def compared_runtimes(quantized: QuantizedModel) -> tuple[str, ...]:
    """
    Return the runtimes that a model is run on, the session's own first.

    TensorFlow's is included only if it is the session's own: importing it takes longer than most
    checks, and no device runs its kernels.
    """
    found = ["xnnpack", "builtin", "reference"]
    if importlib.util.find_spec("ai_edge_litert.compiled_model") is not None:
        found.append("compiled")
    found += (*quantized.edge.runtimes.own, *quantized.edge.runtimes.check_targets)
    return tuple(dict.fromkeys((quantized.runtime, *found)))


@dataclass(frozen=True, slots=True)
class AgreementResult:
    """Result of the comparison of runtimes."""

    unable: tuple[UnrunnableError, ...]  # runtimes that cannot allocate or run the file, and why
    differences: tuple[Finding, ...]
    ran: tuple[str, ...]
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
        self._opened = {name: RuntimeResults(name, self._base, edge) for name in names}
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
            found = results.findings()
            if self._is_extra(results.name):
                self._notes += [each.title for each in found]
            else:
                differences += found
                self._notes += results.not_compared()
            self._notes += results.notes
        if self._ops is not None:
            self._ops.close()
        same = {each.text for each in self._unable}
        unable = [*self._unable, *(each for each in self._lacking if each.text in same)]
        self._notes += [
            f"not compared, as no device needs it or kernels lack an op: {text_of([each])}"
            for each in grouped(each for each in self._lacking if each.text not in same)
        ]
        ran = tuple(name for name in self._opened if not self._is_extra(name) and self._count)
        return AgreementResult(tuple(unable), tuple(differences), ran, tuple(self._notes))

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

    def _is_extra(self, name: str) -> bool:
        """Whether no device runs these kernels, and neither session nor comparison need them."""
        return name == _UNSHIPPED and name not in (self._quantized.runtime, self._base)

    def _compare_ops_again(self, results: RuntimeResults) -> None:
        """Compare the ops of a runtime on a second sample, which reveals stale results."""
        if results.ops_sample is None or self._ops is None or self._is_extra(results.name):
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
        is_minor = not is_fault and (error.runtime == _UNSHIPPED or error.is_lacking)
        (self._lacking if is_minor else self._unable).append(error)

    def _run_sample(self, inputs: Mapping[str, Array], reference: Sequence[Array] | None) -> None:
        """Run one sample on every runtime; errors are measured only with a reference."""
        codes: dict[str, Sequence[Array]] = {}
        for name in list(self._opened):
            if self._count and self._is_extra(name):
                continue
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
            if self._ops is None or not is_new or results.ops_sample is not None:
                continue
            # Ops of kernels that no device runs are compared only if outputs are far off.
            if not self._is_extra(name) or results.findings():
                results.ops_sample = index
                results.compare_ops(self._ops, inputs, index)

    def _repeat(self) -> list[Finding]:
        """Run the first sample again, after the others."""
        self._edge.restart()
        found = []
        for name, results in self._opened.items():
            if not results.first or self._is_extra(name):
                continue  # it did not run the first sample, as reported
            try:
                again = self._edge.runner(name).run(self._first)
            except UnrunnableError as error:
                self._refused(error)
                continue
            for border, one, two in zip(
                self._edge.signature.outputs, results.first, again, strict=True
            ):
                if share := _unrepeated(one, two):
                    cause = (
                        "the runtime gives what an earlier run left, or keeps something from run "
                        "to run: outputs that are not copied, a state that is not reset"
                    )
                    headline = (
                        f"runtime {name!r}: output {border.name!r}: expected sample 0 to give the "
                        f"same when it is run again, got {share}"
                    )
                    place = Place("runtime", name)
                    found.append(
                        Finding(
                            kind=RUNTIMES_DIFFER, place=place, headline=headline, causes=(cause,)
                        )
                    )
        return found


class RuntimeResults:
    """Results of one runtime, compared with a base runtime."""

    def __init__(self, name: str, base: str, edge: EdgeFile) -> None:
        self.name = name
        self._base, self._edge = base, edge
        self.first: Sequence[Array] = ()
        self.ops_sample: int | None = None
        self.stale_sample: int | None = None  # that has sample 0's outputs, which the base has not
        self.notes: list[str] = []
        self._runs_ops = True
        self._pairs: dict[tuple[int, int], Pair] = {}
        self._distances: dict[int, RuntimeDistance] = {}

    def add_distances(
        self, base: Sequence[Array], codes: Sequence[Array], reference: Sequence[Array]
    ) -> None:
        """Add the distance of both runtimes, and of the base from the reference."""
        values = (self._edge.decode(base), self._edge.decode(codes), reference)
        for position, each in enumerate(zip(*values, strict=True)):
            self._distances.setdefault(position, RuntimeDistance()).update(*each)

    def compare_ops(self, ops: SingleOps, inputs: Mapping[str, Array], index: int) -> None:
        """Compare every op with the base runtime, each run alone on the same inputs."""
        if not self._runs_ops:
            return
        runtimes, graph = self._edge.runtimes, self._edge.graph
        try:
            for group in ops.groups(inputs):
                made, kept = group.run(self.name), group.kept
                for op, tensor in group.cut.outputs:
                    pair = self._pairs.get((op.index, tensor))
                    if pair is None:
                        kernels = (
                            None if self.name in runtimes.own else runtimes.kernels_of(self.name)
                        )
                        names = (self.name, self._base)
                        pair = make_pair(graph, op, tensor, names, kernels=kernels)
                        self._pairs[op.index, tensor] = pair
                    places = (*op.inputs, *op.outputs) if pair.is_float else ()
                    values = {place: kept.tensor(place) for place in places if place >= 0}
                    pair.update(index, kept.tensor(tensor), made[op.index, tensor], values)
        except (CopyError, ValueError) as error:
            self._runs_ops = False
            is_refused = isinstance(error, CopyError)
            what = f"runtime {self.name!r} was" if is_refused else "runtimes were"
            self.notes.append(f"{what} not compared op by op: {error}")

    def findings(self) -> list[Finding]:
        """Return the findings on the runtime."""
        apart = self._outputs_apart()
        # What overflows float16 and moves no output is a mask.
        is_mask = bool(self._distances) and not apart
        wrong = [
            pair
            for pair in self._pairs.values()
            if pair.problem() and not (is_mask and pair.only_overflows)
        ]
        if wrong:
            known = all((self.name, pair.op.name) in KNOWN_WRONG for pair in wrong)
            return [] if known else [self._wrong_ops(wrong)]
        if any(pair.is_undefined for pair in self._pairs.values()):
            return []
        if together := problem_together(self._pairs.values()):
            cause = (
                "each op was run alone on both, on the same inputs: what stands between the file "
                "and the runtime changes what is read"
            )
            return [self._differs(together, cause, self._compare)]
        return apart

    def _outputs_apart(self) -> list[Finding]:
        """Return a finding for each output that is farther from the base than errors explain."""
        found = []
        for position, distance in self._distances.items():
            border = self._edge.signature.outputs[position]
            parameters = qparams(border.tensor)
            if parameters is not None:
                step = parameters[0]
            elif border.tensor.is_floating_point:
                step = _FLOAT_UNIT * distance.greatest
            else:
                continue  # the distance of classes or indices means nothing
            error = max(distance.likely_error, ULP * distance.greatest)
            limit = _ERROR_RATIO * error * self._precision + step
            if not distance.difference <= limit:
                text = (
                    f"output {border.name!r}: expected at most {limit:.3g} between them (rms: "
                    f"{_ERROR_RATIO} times what {self._base} is off torch, up to chance, and one "
                    f"step), got {distance.difference:.3g}"
                )
                found.append(self._differs(text, self._why_apart))
        if found and self.stale_sample is not None and self._least_db > _EXPLAINS_DB:
            text = f"expected other outputs of sample {self.stale_sample} than of sample 0, got "
            found.append(self._differs(f"{text}the same", _STALE))
        return found

    def not_compared(self) -> list[str]:
        """Return a note on the first op that quantizes NaN or infinity."""
        return [
            f"runtimes {self.name!r} and {self._base!r} were not compared at "
            f"{self._where(pair.op)} and behind it: its kernels quantize NaN or infinite values, "
            "each to codes of its own"
            for pair in self._pairs.values()
            if pair.is_undefined
        ][:1]

    def _where(self, op: Op) -> str:
        return entry_of(self._edge.graph, op, self._edge.modules).where

    @property
    def _why_apart(self) -> str:
        """Why outputs differ though no op by itself does: of float16, the op that it costs most."""
        if self._edge.runtimes.kernels_of(self.name) != "gpu":
            return _BETWEEN
        text = "float16 rounds every value and every sum to 11 bits"
        worst = min(self._pairs.values(), key=lambda pair: pair.sqnr_db, default=None)
        if worst is None or worst.sqnr_db == math.inf:
            return text
        n_terms = reduction_length(worst.graph, worst.op)
        sums = f", which sums {n_terms:,} terms," if n_terms > 1 else ""
        least = f"{self._where(worst.op)}{sums} has {worst.sqnr_db:.1f} dB by itself, the least"
        explains = worst.explanation is not None and worst.sqnr_db < _EXPLAINS_DB
        known = worst.explanation.cause if explains and worst.explanation else ""
        return "; ".join(filter(None, (text, f"{least} of all ops", known)))

    @property
    def _least_db(self) -> float:
        """The least SQNR of an op by itself."""
        return min((pair.sqnr_db for pair in self._pairs.values()), default=math.inf)

    @functools.cached_property
    def _precision(self) -> float:
        """
        How much farther from the reference the runtime may be than the base, by its precision.

        Float16 makes of each rounding of a float32 file one 2^13 times as large, and so of their
        sum. Of a quantized file the base has the errors of the quantization, beside which
        float16's are small.
        """
        graph = self._edge.graph
        tensors = (tensor for each in graph.subgraphs for tensor in each.tensors)
        is_half = self._edge.runtimes.kernels_of(self.name) == "gpu"
        is_quantized = any(tensor.is_quantized for tensor in tensors)
        return HALF_UNIT if is_half and not is_quantized else 1.0

    @property
    def _compare(self) -> str:
        return (
            f"compare both with torch: edgeq.compare(model, samples, runtime={self.name!r}) and "
            f"runtime={self._base!r}"
        )

    def _wrong_ops(self, wrong: Sequence[Pair]) -> Finding:
        first, *others = [f"{self._where(pair.op)}: {pair.problem()}" for pair in wrong]
        if len(wrong) == len(self._pairs) >= _ALL:
            text = f"all {len(wrong)} ops, each run alone, give something else: {first}"
            cause = (
                "it is no kernel, but what stands between the file and the runtime: the order or "
                "the dtype of buffers, what is read before it is written"
            )
            return self._differs(text, cause, self._compare)
        more = [f"  … and {len(others) - 4} more"] if len(others) > 4 else []
        cause, fix = wrong[0].explanation or (
            "each op was run alone on both, on the same inputs, so that nothing before it explains "
            "this: one of the two computes something else",
            self._compare,
        )
        text = f"{first} [{len(wrong)} of {len(self._pairs)} ops]"
        found = self._differs(text, cause, fix)
        return replace(
            found,
            place=found.place._replace(op=wrong[0].op.index),
            evidence=(*(f"  {each}" for each in others[:4]), *more),
        )

    def _differs(self, text: str, cause: str, fix: str = "") -> Finding:
        """Return the finding that this runtime differs from the base."""
        lost = [
            Harm.decibels(20 * math.log10(each.difference / each.likely_error))
            for each in self._distances.values()
            if each.difference > 0 and each.likely_error > 0
        ]
        return Finding(
            kind=RUNTIMES_DIFFER,
            place=Place("runtime", self.name),
            headline=f"runtimes {self.name!r} and {self._base!r}: {text}",
            harm=max(lost, default=NO_HARM),
            causes=(cause,),
            fix=fix,
        )


@dataclass(slots=True, eq=False)
class RuntimeDistance:
    """Distance of one output on two runtimes, and of the base from the reference."""

    _difference: float = 0.0
    _error: float = 0.0
    _n: int = 0
    greatest: float = 0.0

    def update(self, base: Array, actual: Array, reference: Array) -> None:
        """Add one sample."""
        one, two, real = (
            np.asarray(each, np.float64).ravel() for each in (base, actual, reference)
        )
        if one.size != two.size:
            self._difference = math.inf
            return
        # Kernels that clamp turn a mask of -inf into the least float.
        finite = np.isfinite(one) & np.isfinite(real) & (np.abs(one) < GREATEST)
        self._n += int(np.count_nonzero(finite))
        with np.errstate(invalid="ignore", over="ignore"):
            self._difference += float(np.square(two[finite] - one[finite]).sum())
            self._error += float(np.square(one[finite] - real[finite]).sum())
        self.greatest = max(self.greatest, float(np.abs(one[finite]).max(initial=0.0)))

    @property
    def difference(self) -> float:
        """Root mean square between the runtimes."""
        return math.sqrt(self._difference / max(self._n, 1))

    @property
    def likely_error(self) -> float:
        """Upper estimate of the root mean square between the base and the reference."""
        return math.sqrt(self._error / max(self._n, 1)) * self._slack

    @property
    def _slack(self) -> float:
        # Of few values the error may be small by chance: the sum of squares is assumed to lie three
        # standard deviations low (χ² by Wilson and Hilferty, 1931), which makes 9 times as much of
        # 4 values, and half as much again of 40. One or two values count as three.
        spread = 2 / (9 * max(self._n, 3))
        return float((1 - spread - _SIGMAS * math.sqrt(spread)) ** -1.5)


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
                    f"its kernels end the process at a SOFTMAX of {tensor.dtype} over "
                    f"{tensor.shape[-1]} values, should they be equal"
                )
    return ""


def _unrepeated(one: Array, two: Array) -> str:
    """Return how much of an output changes when run again; empty if nothing."""
    if one.shape != two.shape:
        return f"the shape {list(two.shape)} in place of {list(one.shape)}"
    limit = 0.0
    if one.dtype.kind == "f":
        limit = _FLOAT_UNIT * float(np.abs(one[np.isfinite(one)]).max(initial=0.0))
    with np.errstate(invalid="ignore"):
        same = (one == two) | (np.isnan(one) & np.isnan(two))
        same = same | (np.abs(one - two) <= limit) if limit else same
    n_other = one.size - int(np.count_nonzero(same))
    return f"{n_other} of {one.size} values that differ" if n_other else ""
