"""Every runtime on the same samples, and what differs."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.check.agreement.alone import Alone
from pytest_edgeq.check.agreement.kernels_apart import kernels_apart
from pytest_edgeq.check.agreement.runtime_results import FLOAT_UNIT, RuntimeResults, equal
from pytest_edgeq.compare.quantized import QuantizedModel
from pytest_edgeq.compare.samples import Sample
from pytest_edgeq.errors import CrashedError, UnrunnableError, grouped
from pytest_edgeq.numerics.arrays import contiguous
from pytest_edgeq.numerics.findings import RUNTIMES_DIFFER, Finding, Place, text_of
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.runtimes.runner import KEEPING
from pytest_edgeq.tflite.graph import OpGraph

Array = npt.NDArray[Any]

SAMPLES = 4
"""How many samples the runtimes are compared on, to bound what it costs."""

_MUST_RUN = "xnnpack"

# No device runs these kernels: they run one sample, and what they alone refuse or give otherwise is
# a note, and no finding.
_UNSHIPPED = "reference"

# Rows of equal scores of as many values or more end the process at a check of `softmax.h`
# (BUILTIN_REF, ai-edge-litert 2.3.0; 511 do not).
_SOFTMAX_ABORTS = 512


def compared_runtimes(quantized: QuantizedModel) -> tuple[str, ...]:
    """
    Return the runtimes that a model is run on, the session's own first.

    TensorFlow's only where it is the session's own: importing it takes longer than most checks, and
    no device runs its kernels.
    """
    found = ["xnnpack", "builtin", "reference"]
    if importlib.util.find_spec("ai_edge_litert.compiled_model") is not None:
        found.append("compiled")
    found += (*quantized.edge.runtimes.own, *quantized.edge.runtimes.check_targets)
    return tuple(dict.fromkeys((quantized.runtime, *found)))


@dataclass(frozen=True, slots=True)
class AgreementResult:
    """
    What holding the runtimes against each other gave.

    Attributes:
        unable: Runtimes that cannot allocate or run the file, and why.
        apart: How runtimes differ beyond rounding, or from run to run.
        ran: The runtimes that ran the samples, but for kernels that no device runs.
        notes: What could not be looked at, and why.
    """

    unable: tuple[UnrunnableError, ...]
    apart: tuple[Finding, ...]
    ran: tuple[str, ...]
    notes: tuple[str, ...]


class Agreement:
    """Runs the first `SAMPLES` samples on every runtime, and tells what differs."""

    def __init__(self, quantized: QuantizedModel) -> None:
        self._quantized = quantized
        edge = quantized.edge
        if edge.graph.is_stateful:
            # What runs here must not move on the state of what others run.
            key = edge.signature.key
            edge = EdgeFile(
                edge.graph,
                modules=edge.modules,
                threads=edge.threads,
                layout=edge.layout,
                runtimes=edge.runtimes,
                foreign=edge.foreign,
            )
            edge = edge if key is None else edge.at(key)
        self._edge = edge
        self._count = 0
        self._first: Mapping[str, Array] = {}
        self._last: Mapping[str, Array] = {}
        self._is_varied = False
        self._unable: list[UnrunnableError] = []
        self._lacking: list[UnrunnableError] = []
        self._unstable: list[Finding] = []
        self._notes: list[str] = []
        self._opened: dict[str, RuntimeResults] = {}
        for name in compared_runtimes(quantized):
            if self._opens(name):
                self._opened[name] = RuntimeResults(name, twins=set(self._opened))
        # What the others are held against.
        self._base = next(
            (name for name in (*KEEPING, *self._opened) if name in self._opened), None
        )
        self._alone = Alone(edge, self._base) if self._base in KEEPING else None

    def update(self, sample: Sample, reference: Sequence[Array] | None) -> None:
        """Take one sample in; those behind the first `SAMPLES` are left out."""
        if self._count >= SAMPLES or self._base is None:
            return
        inputs = self._edge.encode(self._quantized.input_names, sample.arrays())
        self._take(inputs, reference)

    @property
    def opened(self) -> frozenset[str]:
        """The runtimes that can run the file, as far as is known."""
        return frozenset(self._opened)

    def result(self) -> AgreementResult:
        """What was found."""
        if self._count and not self._is_varied:
            # Two different inputs are the least that stale results show on.
            self._take({name: _reversed(value) for name, value in self._first.items()}, None)
        if self._count:
            self._repeat()
            for results in self._opened.values():
                self._look_again(results)
        self._note_kernels()
        apart = self._unstable
        for results in self._opened.values():
            found = results.troubles(self._base or "", self._edge)
            if self._is_extra(results.name):
                self._notes += [each.title for each in found]
            else:
                apart += found
                self._notes += results.uncompared(self._base or "", self._edge)
            self._notes += results.notes
            if self._alone is not None:
                self._alone.close(results)
        same = {each.told for each in self._unable}
        self._unable += [each for each in self._lacking if each.told in same]
        self._lacking = [each for each in self._lacking if each.told not in same]
        self._notes += [
            f"not compared, as no device needs it or kernels lack an op: {text_of([each])}"
            for each in grouped(self._lacking)
        ]
        ran = tuple(name for name in self._opened if not self._is_extra(name) and self._count)
        return AgreementResult(tuple(self._unable), tuple(apart), ran, tuple(self._notes))

    def _note_kernels(self) -> None:
        """Note each target whose outputs differ from those of the same kernels on this machine."""
        runtimes = self._edge.runtimes
        for name, results in self._opened.items():
            twin = self._opened.get(runtimes.kernels_of(name))
            if twin is None or twin is results or not results.first or not twin.first:
                continue
            if all(map(equal, results.first, twin.first)):
                continue
            told = kernels_apart(self._edge, twin.name, name, self._first)
            self._notes += [f"{twin.name} and {name}: {told}"] if told else []

    def _is_extra(self, name: str) -> bool:
        """Whether no device runs these kernels, and the session and this comparison do not."""
        return name == _UNSHIPPED and name not in (self._quantized.runtime, self._base)

    def _look_again(self, results: RuntimeResults) -> None:
        """Run the ops of a runtime alone on a second sample: stale results show there."""
        if results.looked_at is None or self._alone is None or self._is_extra(results.name):
            return
        is_last = results.looked_at == self._count - 1
        inputs, index = (self._first, 0) if is_last else (self._last, self._count - 1)
        self._alone.look(results, inputs, index)

    def _opens(self, name: str) -> bool:
        is_reference = self._edge.runtimes.kernels_of(name) == "reference"
        cause = _aborts(self._edge.graph) if is_reference else ""
        if cause:
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
        must_run = (
            self._quantized.runtime,
            _MUST_RUN,
            *runtimes.own,
            *runtimes.check_targets,
        )
        is_fault = error.runtime in must_run or isinstance(error, CrashedError)
        told = not is_fault and (error.runtime == _UNSHIPPED or error.is_lacking)
        (self._lacking if told else self._unable).append(error)

    def _take(self, inputs: Mapping[str, Array], reference: Sequence[Array] | None) -> None:
        """Run one sample everywhere; without a reference nothing is said of the error."""
        codes: dict[str, Sequence[Array]] = {}
        for name in list(self._opened):
            if self._count and self._is_extra(name):
                continue
            try:
                codes[name] = self._edge.runner(name).run(inputs)
            except UnrunnableError as error:
                self._refused(error)
                del self._opened[name]
        if not self._count:
            self._first = {name: value.copy() for name, value in inputs.items()}
        self._last = {name: value.copy() for name, value in inputs.items()}
        self._is_varied |= any(
            not np.array_equal(value, self._first[name]) for name, value in inputs.items()
        )
        index, self._count = self._count, self._count + 1
        base = self._base
        if base not in codes:
            return
        last = self._opened[base].last
        repeats = bool(last) and all(map(equal, last, codes[base]))
        for name, made in codes.items():
            results = self._opened[name]
            if not index:
                results.first = made
            results.follow(index, made, repeats=repeats)
            if name == base:
                continue
            if reference is not None:
                results.watch(self._edge, codes[base], made, reference)
            results.twins = {
                twin
                for twin in results.twins
                if twin in codes and all(map(equal, codes[twin], made))
            }
            # Of runtimes that give the same bit by bit, the ops of one are looked at.
            is_new = results.looked_at is None and not results.twins
            if is_new and self._alone is not None and not all(map(equal, codes[base], made)):
                self._look(results, inputs, index)

    def _look(self, results: RuntimeResults, inputs: Mapping[str, Array], index: int) -> None:
        """Run the ops of a runtime alone; of kernels that no device runs if outputs are far off."""
        assert self._alone is not None, "callers have looked"
        if self._is_extra(results.name) and not results.troubles(self._base or "", self._edge):
            return
        results.looked_at = index
        self._alone.look(results, inputs, index)

    def _repeat(self) -> None:
        """Run the first sample again, behind the others."""
        self._edge.restart()
        for name, results in list(self._opened.items()):
            if not results.first or self._is_extra(name):
                continue  # where the first sample did not run on it, that was told
            try:
                again = self._edge.runner(name).run(self._first)
            except UnrunnableError as error:
                self._refused(error)
                continue
            for border, one, two in zip(
                self._edge.signature.outputs, results.first, again, strict=True
            ):
                share = _unrepeated(one, two)
                if share:
                    self._unstable.append(
                        Finding(
                            kind=RUNTIMES_DIFFER,
                            place=Place("runtime", name),
                            headline=f"runtime {name!r}: output {border.name!r}: expected sample 0 "
                            f"to give the same when it is run again, got {share}",
                            causes=(
                                "the runtime gives what an earlier run left, or keeps something "
                                "from run to run: outputs that are not copied, a state that is not "
                                "reset",
                            ),
                        )
                    )


def _aborts(graph: OpGraph) -> str:
    """Say why the reference kernels may end this process; nothing where they do not."""
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
    """How much of an output is another when run again; nothing where it is the same."""
    if one.shape != two.shape:
        return f"the shape {list(two.shape)} in place of {list(one.shape)}"
    if np.issubdtype(one.dtype, np.floating):
        limit = FLOAT_UNIT * float(np.abs(one[np.isfinite(one)]).max(initial=0.0))
        with np.errstate(invalid="ignore"):
            same = (one == two) | (np.isnan(one) & np.isnan(two)) | (np.abs(one - two) <= limit)
    else:
        same = one == two
    n_other = one.size - int(np.count_nonzero(same))
    return f"{n_other} of {one.size} values that differ" if n_other else ""


def _reversed(value: Array) -> Array:
    return contiguous(value.reshape(-1)[::-1].reshape(value.shape))
