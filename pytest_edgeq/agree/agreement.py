"""Every runtime on the same samples, and what differs."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.agree.alone import Alone
from pytest_edgeq.agree.lane import FLOAT_UNIT, Lane, equal
from pytest_edgeq.quantized import QuantizedModel
from pytest_edgeq.samples import Sample
from pytest_edgeq.tflite.edge import EdgeFile
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.runtimes import KEEPING
from pytest_edgeq.unrunnable import UnrunnableError, grouped

__all__ = ["SAMPLES", "Agreement", "AgreementResult", "installed_runtimes"]

# A user's test shows the user's line and the message, not how we came to it.
__tracebackhide__ = True

Array = npt.NDArray[Any]

SAMPLES = 4
"""How many samples the runtimes are held against each other on, to bound what it costs."""

_MUST_RUN = ("xnnpack", "builtin")

# No device runs these: what they alone refuse or give otherwise is told, and not held against the
# file.
_MAY_DIFFER = ("reference", "tensorflow")

# What a runtime lacks, and no fault of the file: these kernels have no such op, or CompiledModel
# takes no file of this kind (`tflite/refusals.py`).
_LACKS = re.compile(
    r"Didn't find op for builtin opcode|unresolved custom op|Failed to load model from|"
    r"Failed to register output|Insufficient buffer size|Failed to allocate tensors|"
    r"CompiledModel leaves memory unwritten|CompiledModel tells tensors apart by name|"
    r"must have all static dimensions|Dimensions must be positive"
)

# Rows of equal scores of as many values or more end the process at a check of `softmax.h`
# (BUILTIN_REF, ai-edge-litert 2.3.0; 511 do not).
_SOFTMAX_ABORTS = 512


def installed_runtimes(quantized: QuantizedModel) -> tuple[str, ...]:
    """Every runtime that the model can be run on here, the session's own first."""
    found = ["xnnpack", "builtin", "reference"]
    if importlib.util.find_spec("ai_edge_litert.compiled_model") is not None:
        found.append("compiled")
    if importlib.util.find_spec("tensorflow") is not None:
        found.append("tensorflow")
    found += quantized.edge.runtimes.own
    return tuple(dict.fromkeys((quantized.runtime, *found)))


@dataclass(frozen=True, slots=True)
class AgreementResult:
    """
    What holding the runtimes against each other gave.

    Attributes:
        unable: Runtimes that cannot allocate or run the file, and why.
        apart: How runtimes differ beyond rounding, or from run to run.
        notes: What could not be looked at, and why.
    """

    unable: tuple[UnrunnableError, ...]
    apart: tuple[str, ...]
    notes: tuple[str, ...]


class Agreement:
    """
    Runs the first `SAMPLES` samples on every runtime, and tells what differs.

    Args:
        quantized: The file and its references.
    """

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
            )
            edge = edge if key is None else edge.at(key)
        self._edge = edge
        self._count = 0
        self._first: Mapping[str, Array] = {}
        self._is_varied = False
        self._unable: list[UnrunnableError] = []
        self._lacking: list[UnrunnableError] = []
        self._unstable: list[str] = []
        self._notes: list[str] = []
        self._lanes: dict[str, Lane] = {}
        for name in installed_runtimes(quantized):
            if self._opens(name):
                self._lanes[name] = Lane(name)
        # What the others are held against.
        self._base = next((name for name in (*KEEPING, *self._lanes) if name in self._lanes), None)
        self._alone = Alone(edge, self._base) if self._base in KEEPING else None

    def update(self, sample: Sample, reference: Sequence[Array] | None) -> None:
        """
        Take one sample in; those behind the first `SAMPLES` are left out.

        Args:
            sample: What the model takes.
            reference: What torch gives for it, in the file's order of outputs; None where it cannot
                be told.
        """
        if self._count >= SAMPLES or self._base is None:
            return
        inputs = self._edge.encode(self._quantized.input_names, sample.arrays())
        self._take(inputs, reference)

    @property
    def opened(self) -> frozenset[str]:
        """The runtimes that can run the file, as far as is known."""
        return frozenset(self._lanes)

    def result(self) -> AgreementResult:
        """What was found."""
        if self._count and not self._is_varied:
            # Two different inputs are the least that stale results show on.
            self._take({name: _reversed(value) for name, value in self._first.items()}, None)
        if self._count:
            self._repeat()
            for lane in self._lanes.values():
                # Once more: a runtime that gives the first results again is right the first time.
                if lane.differs and self._alone is not None:
                    self._alone.look(lane, self._first, 0)
        apart = self._unstable
        for lane in self._lanes.values():
            found = lane.troubles(self._base or "", self._edge)
            if lane.name in _MAY_DIFFER and lane.name != self._quantized.runtime:
                self._notes += [text.splitlines()[0] for text in found]
            else:
                apart += found
            self._notes += lane.notes
            if self._alone is not None:
                self._alone.close(lane)
        same = {each.told for each in self._unable}
        self._unable += [each for each in self._lacking if each.told in same]
        self._lacking = [each for each in self._lacking if each.told not in same]
        self._notes += [
            f"not compared, as no device needs it or kernels lack an op: {text}"
            for text in grouped(self._lacking)
        ]
        return AgreementResult(tuple(self._unable), tuple(apart), tuple(self._notes))

    def _opens(self, name: str) -> bool:
        cause = _aborts(self._edge.graph) if name == "reference" else ""
        if cause:
            self._notes.append(f"runtime 'reference' was not run: {cause}")
            return False
        try:
            self._edge.runner(name)
        except UnrunnableError as error:
            self._refused(error)
            return False
        return True

    def _refused(self, error: UnrunnableError) -> None:
        must_run = (self._quantized.runtime, *_MUST_RUN, *self._edge.runtimes.own)
        told = error.runtime not in must_run and (
            error.runtime in _MAY_DIFFER or _LACKS.search(error.told)
        )
        (self._lacking if told else self._unable).append(error)

    def _take(self, inputs: Mapping[str, Array], reference: Sequence[Array] | None) -> None:
        """Run one sample everywhere; without a reference nothing is said of the error."""
        codes: dict[str, Sequence[Array]] = {}
        for name in list(self._lanes):
            try:
                codes[name] = self._edge.runner(name).run(inputs)
            except UnrunnableError as error:
                self._refused(error)
                del self._lanes[name]
        if not self._count:
            self._first = {name: value.copy() for name, value in inputs.items()}
        self._is_varied |= any(
            not np.array_equal(value, self._first[name]) for name, value in inputs.items()
        )
        index, self._count = self._count, self._count + 1
        base = self._base
        if base not in codes:
            return
        last = self._lanes[base].last
        repeats = bool(last) and all(map(equal, last, codes[base]))
        for name, lane in self._lanes.items():
            if not index:
                lane.first = codes[name]
            lane.follow(index, codes[name], repeats=repeats)
            if name == base:
                continue
            if reference is not None:
                lane.watch(self._edge, codes[base], codes[name], reference)
            if not all(map(equal, codes[base], codes[name])):
                lane.differs = True
                if self._alone is not None:
                    self._alone.look(lane, inputs, index)

    def _repeat(self) -> None:
        """Run the first sample again, behind the others."""
        self._edge.restart()
        for name, lane in list(self._lanes.items()):
            if not lane.first:
                continue  # the first sample did not run on it, which was told
            try:
                again = self._edge.runner(name).run(self._first)
            except UnrunnableError as error:
                self._refused(error)
                continue
            for border, one, two in zip(
                self._edge.signature.outputs, lane.first, again, strict=True
            ):
                share = _unrepeated(one, two)
                if share:
                    self._unstable.append(
                        f"runtime {name!r}: output {border.name!r}: expected sample 0 to give the "
                        f"same when it is run again, got {share}\n"
                        "  why: the runtime gives what an earlier run left, or keeps something "
                        "from run to run: outputs that are not copied, a state that is not reset"
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
    return np.ascontiguousarray(value.reshape(-1)[::-1].reshape(value.shape))
