"""
Whether the runtimes that are installed give the same results, up to what kernels may round.

Kernels round differently, and from layer to layer it grows: end to end two sound runtimes may be
tens of LSB apart. So where outputs differ, each op is run alone on the inputs that the builtin
kernels gave it, and there a code may be one off, and only where the real value is near to a tie.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.localize.constants import read_constant
from pytest_edgeq.localize.kernels import float_bound, hybrid_position, rounding_bound
from pytest_edgeq.localize.kernels.floats import reduction_length
from pytest_edgeq.quantized import QuantizedModel
from pytest_edgeq.samples import Sample
from pytest_edgeq.tflite.boundary import code_range
from pytest_edgeq.tflite.cut import Cut, cut_ops
from pytest_edgeq.tflite.edge import EdgeFile
from pytest_edgeq.tflite.graph import Op, OpGraph
from pytest_edgeq.tflite.roles import roles_of
from pytest_edgeq.tflite.runtimes import KEEPING

__all__ = ["SAMPLES", "Agreement", "AgreementResult", "installed_runtimes"]

# A user's test shows the user's line and the message, not how we came to it.
__tracebackhide__ = True

Array = npt.NDArray[Any]

SAMPLES = 4
"""How many samples the runtimes are held against each other on, to bound what it costs."""

_MUST_RUN = ("xnnpack", "builtin")

# TensorFlow 2.21.0 computes an int8 BATCH_MATMUL wrongly, by up to 16 LSB seen, where the second
# operand has a zero point. No device runs its interpreter, so that is told and not held against the
# file.
_MAY_DIFFER = ("tensorflow",)

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

_ERROR_RATIO = 4
"""
How far two runtimes may be apart, in the builtin kernels' own error against the reference.

|R − B| ≤ |R − f| + |B − f|: a runtime R that is at most three times as far from the reference f as
the builtin kernels B are.
"""

_FLOAT_UNIT = 2.0**-11
"""Half a unit in the last place of float16, relative: kernels may compute in half precision."""

_FLOAT = "times what float kernels may be off"

_CHANCE = math.log(1e6) / 2
"""
Of Hoeffding's bound, P(share ≥ p + d) ≤ exp(−2nd²): once in a million by chance.
"""


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
        unable: Why runtimes cannot allocate or run the file, one text each.
        apart: How runtimes differ beyond rounding, or from run to run.
        notes: What could not be looked at, and why.
    """

    unable: tuple[str, ...]
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
        self._unable: list[str] = []
        self._unstable: list[str] = []
        self._notes: list[str] = []
        self._lanes: dict[str, _Lane] = {}
        for name in installed_runtimes(quantized):
            if self._opens(name):
                self._lanes[name] = _Lane(name)
        # What the others are held against.
        self._base = next((name for name in (*KEEPING, *self._lanes) if name in self._lanes), None)
        self._cut: Cut | None = None
        self._cut_edge: EdgeFile | None = None

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
                if lane.differs:
                    self._look_closer(lane, self._first, 0)
        apart = self._unstable
        for lane in self._lanes.values():
            found = lane.troubles(self._base or "", self._edge)
            if lane.name in _MAY_DIFFER and lane.name != self._quantized.runtime:
                self._notes += found
            else:
                apart += found
            self._notes += lane.notes
            if self._cut_edge is not None and lane.pairs:
                self._cut_edge.runner(lane.name).close()
        return AgreementResult(tuple(self._unable), tuple(apart), tuple(self._notes))

    def _opens(self, name: str) -> bool:
        cause = _aborts(self._edge.graph) if name == "reference" else ""
        if cause:
            self._notes.append(f"runtime 'reference' was not run: {cause}")
            return False
        try:
            self._edge.runner(name)
        except RuntimeError as error:
            self._refused(name, error)
            return False
        return True

    def _refused(self, name: str, error: RuntimeError) -> None:
        text = str(error)
        needed = name in (self._quantized.runtime, *_MUST_RUN, *self._edge.runtimes.own)
        if _LACKS.search(text) and not needed:
            self._notes.append(f"runtime {name!r} lacks what the file needs: {text}")
        else:
            self._unable.append(text)

    def _take(self, inputs: Mapping[str, Array], reference: Sequence[Array] | None) -> None:
        """Run one sample everywhere; without a reference nothing is said of the error."""
        codes: dict[str, Sequence[Array]] = {}
        for name in list(self._lanes):
            try:
                codes[name] = self._edge.runner(name).run(inputs)
            except RuntimeError as error:
                self._refused(name, error)
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
        for name, lane in self._lanes.items():
            if not index:
                lane.first = codes[name]
            if name == base:
                continue
            if reference is not None:
                lane.watch(self._edge, codes[base], codes[name], reference)
            if not all(map(_equal, codes[base], codes[name])):
                lane.differs = True
                self._look_closer(lane, inputs, index)

    def _look_closer(self, lane: _Lane, inputs: Mapping[str, Array], index: int) -> None:
        """Run each op alone, on what the kernels that the runtime is held against gave it."""
        if self._base not in KEEPING or not lane.runs_alone:
            return
        kept = self._edge.runner(self._base, keep=True)
        kept.run(inputs)
        if self._cut is None:
            try:
                self._cut = cut_ops(
                    self._edge.graph,
                    self._edge.signature.subgraph,
                    lambda index: kept.tensor(index).shape,
                )
            except ValueError as error:
                self._notes.append(f"runtimes were not compared op by op: {error}")
                lane.runs_alone = False
                return
            self._cut_edge = EdgeFile(
                self._cut.content, threads=self._edge.threads, runtimes=self._edge.runtimes
            )
        cut, alone = self._cut, self._cut_edge
        if alone is None or not cut.outputs:
            return
        given = {name: kept.tensor(tensor) for name, tensor in cut.inputs.items()}
        try:
            outputs = alone.runner(lane.name).run(given)
        except RuntimeError as error:
            lane.runs_alone = False
            lane.notes.append(
                f"runtime {lane.name!r} was not compared op by op, as it does not run the file in "
                f"which ops stand alone: {error}"
            )
            return
        for (op, tensor), actual in zip(cut.outputs, outputs, strict=True):
            pair = lane.pairs.get((op.index, tensor))
            if pair is None:
                own = lane.name in self._edge.runtimes.own
                pair = _make_pair(self._edge.graph, op, tensor, lane.name, self._base, own=own)
                lane.pairs[op.index, tensor] = pair
            values = {
                place: kept.tensor(place)
                for place in (*op.inputs, *op.outputs)
                if place >= 0 and pair.is_float
            }
            pair.update(index, kept.tensor(tensor), actual, values)

    def _repeat(self) -> None:
        """Run the first sample again, behind the others."""
        self._edge.restart()
        for name, lane in list(self._lanes.items()):
            if not lane.first:
                continue  # the first sample did not run on it, which was told
            try:
                again = self._edge.runner(name).run(self._first)
            except RuntimeError as error:
                self._refused(name, error)
                continue
            for border, one, two in zip(
                self._edge.signature.outputs, lane.first, again, strict=True
            ):
                share = _unrepeated(one, two)
                if share:
                    self._unstable.append(
                        f"runtime {name!r}: output {border.name!r}: expected what the first run of "
                        f"sample 0 gave, got {share} when it was run again behind others: the "
                        "runtime gives stale results, or keeps something from run to run"
                    )


@dataclass(slots=True, eq=False)
class _Lane:
    """One runtime, held against another."""

    name: str
    first: Sequence[Array] = ()
    differs: bool = False
    runs_alone: bool = True
    pairs: dict[tuple[int, int], _Pair] = field(default_factory=dict)
    distances: dict[int, _Distance] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def watch(
        self,
        edge: EdgeFile,
        base: Sequence[Array],
        codes: Sequence[Array],
        reference: Sequence[Array],
    ) -> None:
        """Sum up how far the runtimes are apart, and how far the one is from the reference."""
        values = (edge.decode(base), edge.decode(codes), reference)
        for position, each in enumerate(zip(*values, strict=True)):
            self.distances.setdefault(position, _Distance()).update(*each)

    def troubles(self, base: str, edge: EdgeFile) -> list[str]:
        """What is wrong with the runtime."""
        wrong = [pair for pair in self.pairs.values() if pair.problem()]
        if wrong:
            return [self._ops_text(wrong, base, edge)]
        found = []
        for position, distance in self.distances.items():
            border = edge.signature.outputs[position]
            tensor = border.tensor
            if tensor.is_quantized and len(tensor.scales) == 1:
                step = float(tensor.scales[0])
            elif tensor.is_floating_point:
                step = _FLOAT_UNIT * distance.greatest
            else:
                continue  # a class or an index: how far it is off says nothing
            limit = _ERROR_RATIO * distance.error + step
            if not distance.apart <= limit:
                found.append(
                    f"runtimes {self.name!r} and {base!r}: output {border.name!r}: expected at "
                    f"most {limit:.3g} between them (rms: {_ERROR_RATIO} times what {base} is off "
                    f"torch, and one step), got {distance.apart:.3g}; no op by itself explains it, "
                    "so look at what the runtime does between the ops: memory that two tensors "
                    "share, buffers that are not written"
                )
        return found

    def _ops_text(self, wrong: Sequence[_Pair], base: str, edge: EdgeFile) -> str:
        where = {
            entry.index: entry.where
            for entry in edge.op_dtypes
            if entry.subgraph == edge.signature.subgraph
        }
        told = [f"{where[pair.op.index]}: {pair.problem()}" for pair in wrong]
        first, *others = told
        lines = [
            f"runtimes {self.name!r} and {base!r}: {first} ({len(wrong)} of {len(self.pairs)} ops "
            "that were run alone, each on the same inputs)"
        ]
        lines += [f"  {each}" for each in others[:4]]
        if len(others) > 4:
            lines.append(f"  … and {len(others) - 4} more")
        lines.append("  one of the two computes something else than the file says")
        return "\n".join(lines)


@dataclass(slots=True, eq=False)
class _Distance:
    """How far one output is apart on two runtimes, and from the reference on the first."""

    _apart: float = 0.0
    _error: float = 0.0
    _n: int = 0
    greatest: float = 0.0

    def update(self, base: Array, actual: Array, reference: Array) -> None:
        """Take one sample in."""
        one, two, real = (
            np.asarray(each, np.float64).ravel() for each in (base, actual, reference)
        )
        if one.size != two.size:
            self._apart = math.inf
            return
        finite = np.isfinite(one) & np.isfinite(real)
        self._n += int(np.count_nonzero(finite))
        with np.errstate(invalid="ignore", over="ignore"):
            self._apart += float(np.square(two[finite] - one[finite]).sum())
            self._error += float(np.square(one[finite] - real[finite]).sum())
        self.greatest = max(self.greatest, float(np.abs(one[finite]).max(initial=0.0)))

    @property
    def apart(self) -> float:
        """Root mean square between the runtimes."""
        return math.sqrt(self._apart / max(self._n, 1))

    @property
    def error(self) -> float:
        """Root mean square between the first one and the reference."""
        return math.sqrt(self._error / max(self._n, 1))


@dataclass(slots=True, eq=False)
class _Pair:
    """
    One output of an op that was run alone on two runtimes.

    Attributes:
        op: The op.
        unit: What a difference is counted in, for texts; empty for values that must be equal.
        bound: Greatest difference of two sound kernels: in codes; of floats in what `update` says
            that their arithmetic may be off.
        share: Of the codes within the range, how many may differ; of floats that differ, how many
            may be off the same way.
        ends: Least and greatest code.
    """

    op: Op
    graph: OpGraph
    tensor: int
    unit: str
    bound: float
    share: float = 1.0
    ends: tuple[int, int] | None = None
    worst: float = 0.0
    at: str = ""
    n_differ: int = 0
    n_codes: int = 0
    n_inside: int = 0
    n_moved: list[int] = field(default_factory=lambda: [0, 0])

    @property
    def is_float(self) -> bool:
        """Whether it is counted in what floats may be off."""
        return self.unit == _FLOAT

    def update(self, sample: int, base: Array, actual: Array, values: Mapping[int, Array]) -> None:
        """Take one sample in; `values` are the op's tensors by index, asked for floats only."""
        self.n_codes += base.size
        if base.shape != actual.shape:
            self.worst, self.n_differ = math.inf, self.n_differ + base.size
            self.at = f"sample {sample}: shape {list(base.shape)} and {list(actual.shape)}"
            return
        one, two = base.astype(np.float64), actual.astype(np.float64)
        same = (base == actual) | (np.isnan(one) & np.isnan(two))
        with np.errstate(invalid="ignore"):
            steps = np.where(same, 0.0, np.abs(one - two))
        if self.is_float:
            noise, allowed = _float_allowance(self.graph, self.op, values)
            beyond_noise = ~(steps <= noise)
            steps = steps / allowed if allowed > 0 else np.where(steps > 0, math.inf, 0.0)
        else:
            beyond_noise = ~same
            # Whole numbers beyond 2^53 may be apart and read the same.
            steps = np.where(same, 0.0, np.maximum(steps, 1.0))
        steps = np.where(np.isnan(steps), math.inf, steps)
        self.n_differ += int(np.count_nonzero(~same))
        # Float32's own rounding may well go one way, by the order in which a kernel sums.
        inside = ~same & beyond_noise
        if self.ends is not None:
            inside = (base > self.ends[0]) & (base < self.ends[1])
        self.n_inside += int(np.count_nonzero(inside))
        self.n_moved[0] += int(np.count_nonzero(inside & (two < one)))
        self.n_moved[1] += int(np.count_nonzero(inside & (two > one)))
        most = float(steps.max(initial=0.0))
        if most > self.worst:
            index = np.unravel_index(int(steps.argmax()), steps.shape)
            self.worst = most
            self.at = f"sample {sample}, index {list(map(int, index))}: {actual[index]} and "
            self.at += f"{base[index]}"

    def problem(self) -> str:
        """Say what is wrong; nothing where two sound kernels can differ like that."""
        if not self.worst <= self.bound:
            expected = f"at most {self.bound:g} {self.unit}" if self.unit else "equal values"
            return (
                f"expected {expected}, got {self.worst:.3g} ({self.n_differ} of {self.n_codes} "
                f"differ; {self.at})"
            )
        moved = max(self.n_moved) if self.is_float else sum(self.n_moved)
        if moved > self.n_inside * self.share + math.sqrt(_CHANCE * self.n_inside):
            return (
                "expected differences to go both ways, as rounding does"
                if self.is_float
                else f"expected codes to differ near ties, {self.share:.0%} of them at most"
            ) + f", got {moved} of {self.n_inside} {self._ways} ({self.at})"
        return ""

    @property
    def _ways(self) -> str:
        lower, higher = self.n_moved
        if lower and higher:
            return f"other, {lower} lower and {higher} higher"
        return "lower" if lower else "higher"


def _make_pair(graph: OpGraph, op: Op, tensor: int, runtime: str, base: str, *, own: bool) -> _Pair:
    """What two sound kernels may differ by at one output of an op."""
    info = graph.tensor(op, tensor)
    if info.is_floating_point:
        # Kernels that quantize their input are off by its rounding, whose signs are chance up to
        # what the values of one input share (59 % measured); others by that of functions, which may
        # well go one way.
        share = 1.0 if hybrid_position(graph, op) is None else 0.75
        return _Pair(op, graph, tensor, _FLOAT, 1.0, share)
    if not info.is_quantized:
        return _Pair(op, graph, tensor, "", 0.0)
    # CompiledModel and TensorFlow run XNNPACK's kernels, too; of a user's own the worst is taken.
    kinds = ["reference", "xnnpack"] if own else []
    kinds += [runtime if runtime in ("builtin", "reference") else "xnnpack", base]
    bounds = [
        rounding_bound(graph, op, output=op.outputs.index(tensor), runtime=kind) for kind in kinds
    ]
    known = [0.5 if bound is None else bound for bound in bounds]
    low_high = code_range(info.dtype)
    off = max(known[:-1]) + known[-1]
    if off == 0:
        return _Pair(op, graph, tensor, "LSB", 0.0, ends=low_high)
    # Each is within ½ LSB and its bound of the real value. Codes differ where that is nearer to a
    # tie than a bound, or on it: on the coarsest grid that has ties, half of all values are.
    return _Pair(
        op, graph, tensor, "LSB", float(math.floor(1 + off)), min(1.0, 0.5 + off), low_high
    )


def _float_allowance(graph: OpGraph, op: Op, values: Mapping[int, Array]) -> tuple[float, float]:
    """What two sound float kernels may differ by: by float32's rounding, and in all; absolute."""
    floats = [value for value in values.values() if np.issubdtype(value.dtype, np.floating)]
    greatest = max((float(np.abs(v[np.isfinite(v)]).max(initial=0.0)) for v in floats), default=0.0)
    allowance = noise = 2 * float_bound(graph, op) * greatest
    data = hybrid_position(graph, op)
    if data is not None:
        # Each kernel rounds its input to codes by its own rule, and is off by half a code at most.
        code = float(np.abs(values[op.inputs[data]]).max(initial=0.0)) / 127
        allowance += code * _weight_sum(graph, op)
    return noise, allowance


def _weight_sum(graph: OpGraph, op: Op) -> float:
    """The most that Σ|w| of one output value can be."""
    [weight] = roles_of(graph, op).weights
    greatest = float(np.abs(read_constant(graph, op, weight).floats).max(initial=0.0))
    return greatest * reduction_length(graph, op)


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


def _equal(one: Array, two: Array) -> bool:
    return np.array_equal(one, two, equal_nan=np.issubdtype(one.dtype, np.floating))


def _unrepeated(one: Array, two: Array) -> str:
    """How much of an output is another when run again; nothing where it is the same."""
    if one.shape != two.shape:
        return f"the shape {list(two.shape)} in place of {list(one.shape)}"
    if np.issubdtype(one.dtype, np.floating):
        limit = _FLOAT_UNIT * float(np.abs(one[np.isfinite(one)]).max(initial=0.0))
        with np.errstate(invalid="ignore"):
            same = (one == two) | (np.isnan(one) & np.isnan(two)) | (np.abs(one - two) <= limit)
    else:
        same = one == two
    n_other = one.size - int(np.count_nonzero(same))
    return f"{n_other} of {one.size} other values" if n_other else ""


def _reversed(value: Array) -> Array:
    return np.ascontiguousarray(value.reshape(-1)[::-1].reshape(value.shape))
