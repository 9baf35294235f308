"""Compare outputs of ops that were run alone on two runtimes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.check.gpu_ops import (
    BY_ELEMENT,
    BY_EXPONENTIALS,
    GREATEST_HALF,
    HALF_UNIT,
    OVERFLOWN,
    STEPS,
    beyond_float16,
    float_error,
    subnormal_error,
)
from pytest_edgeq.errors import CopyError, UnrunnableError
from pytest_edgeq.localize.single_ops import OpGroup, SingleOps
from pytest_edgeq.names import GPU_KERNELS
from pytest_edgeq.numerics.target_machine import PRECISIONS, TargetMachine
from pytest_edgeq.runtimes.bounds import (
    float_bound,
    float_conditioning,
    float_reach,
    hybrid_position,
    rounding_bound,
)
from pytest_edgeq.runtimes.bounds.floats import reduction_length
from pytest_edgeq.runtimes.gpu_known import Explanation, known_defect
from pytest_edgeq.runtimes.workers.remote_worker import facts
from pytest_edgeq.tflite.boundary import code_range
from pytest_edgeq.tflite.constants import read_constant
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.op_dtypes import entry_of
from pytest_edgeq.tflite.roles import roles_of
from pytest_edgeq.tflite.subgraph import Op

Array = npt.NDArray[Any]

# Maximum of float32, which kernels that clamp return for infinity.
GREATEST = float(np.finfo(np.float32).max)
# Of Hoeffding's bound, P(share ≥ p + d) ≤ exp(−2nd²): once in a million by chance.
_CHANCE = math.log(1e6) / 2

_NEAR_TIES = "as rounding parts those near ties only"


@dataclass(slots=True, eq=False)
class Pair:
    """One output of an op that was run alone on two runtimes."""

    op: Op
    graph: OpGraph
    tensor: int
    names: tuple[str, str]  # of the runtime and of the base runtime
    is_float: bool  # whether differences are counted in units of float tolerance
    bound: float  # greatest difference of two sound kernels
    share: float = 1.0  # share of the codes within the range that may differ
    is_on_gpu: bool = False
    chosen: int | None = None  # axis of ARG_MAX and ARG_MIN, whose scores are compared
    unit: float = 1.0  # half a unit in the last place, as a multiple of float32's
    ends: tuple[int, int] | None = None
    worst: float = 0.0  # the greatest difference so far, in the unit of `bound`; `at` is its place
    worst_held: float = 0.0  # likewise, without values that overflow float16
    at: str = ""
    allowed: float = 0.0  # absolute float tolerance there; `difference` is the absolute difference
    difference: float = 0.0
    n_differ: int = 0
    n_codes: int = 0
    n_inside: int = 0
    n_moved: list[int] = field(default_factory=lambda: [0, 0])
    is_undefined: bool = False
    squares: list[float] = field(default_factory=lambda: [0.0, 0.0])  # signal, and its error
    factors: tuple[float, float, float] | None = None
    known: Explanation | None = None  # of a difference: a defect of the GPU engine
    range: Explanation | None = None  # likewise: values that float16 does not hold

    def update(self, sample: int, base: Array, actual: Array, values: Mapping[int, Array]) -> None:
        """Compare one sample; `values` are the op's tensors by index, for floats only."""
        self.n_codes += base.size
        if base.shape != actual.shape:
            self.worst, self.n_differ = math.inf, self.n_differ + base.size
            self.at = self._where(sample, "", list(actual.shape), list(base.shape))
            return
        if self.is_float and np.array_equal(base, actual, equal_nan=True):
            return  # NaN on both sides agrees; equal codes are still counted below
        if self.unit > 1:
            operands = [values[index] for index in self.op.inputs if index in values]
            n_terms = reduction_length(self.graph, self.op)
            self.range = self.range or beyond_float16(operands, base, actual, n_terms)
        if self.chosen is not None:
            if (base == actual).all():
                return
            base, actual = (self._scores(each, values) for each in (base, actual))
        data = hybrid_position(self.graph, self.op) if self.is_float else None
        if data is not None and not np.isfinite(values[self.op.inputs[data]]).all():
            self.is_undefined = True
            return
        one, two = base.astype(np.float64), actual.astype(np.float64)
        same = (base == actual) | (np.isnan(one) & np.isnan(two))
        if self.is_float:
            one, two = (np.clip(side, -GREATEST, GREATEST) for side in (one, two))
            same |= one == two
        with np.errstate(invalid="ignore"):
            steps = np.where(same, 0.0, np.abs(one - two))
        difference, limit = steps, np.zeros(steps.shape)
        if self.is_float:
            difference = np.where(np.isinf(actual) & ~same, math.inf, steps)
            noise, allowed = self._float_allowance(values)
            beyond_noise = ~(steps <= noise)
            limit += allowed
            if self.unit > 1:
                # Rounding does not explain values that are too large for float16.
                limit = np.where(np.abs(one) > GREATEST_HALF, OVERFLOWN * np.abs(one), limit)
            with np.errstate(divide="ignore", invalid="ignore"):
                steps = np.where(steps == 0, 0.0, steps / limit)
        else:
            beyond_noise = ~same
            # Integers beyond 2^53 may differ although their float64 values are equal.
            steps = np.where(same, 0.0, np.maximum(steps, 1.0))
        steps = np.where(np.isnan(steps), math.inf, steps)
        if self.unit > 1:
            self._add_squares(one, two)
            overflows = (np.abs(one) > GREATEST_HALF) & (two * np.sign(one) >= GREATEST_HALF)
            self.worst_held = max(self.worst_held, float(steps[~overflows].max(initial=0.0)))
        self.n_differ += int(np.count_nonzero(~same))
        # Float32 rounding may have one sign, by the order in which a kernel sums.
        inside = ~same & beyond_noise
        if self.ends is not None:
            inside = (base > self.ends[0]) & (base < self.ends[1])
        self.n_inside += int(np.count_nonzero(inside))
        self.n_moved[0] += int(np.count_nonzero(inside & (two < one)))
        self.n_moved[1] += int(np.count_nonzero(inside & (two > one)))
        most = float(steps.max(initial=0.0))
        if most > self.worst:
            index = np.unravel_index(int(steps.argmax()), steps.shape)
            self.worst, self.difference = most, float(difference[index])
            self.allowed = float(limit[index])
            place = f", index {list(map(int, index))}"
            self.at = self._where(sample, place, actual[index], base[index])

    def _add_squares(self, base: Array, actual: Array) -> None:
        """Add one sample to the SQNR; a value that is lost counts as an error of its size."""
        info = self.graph.tensor(self.op, self.tensor)
        signal = base if self.is_float else base - info.zero_points[0]
        error = np.abs(base - actual)
        self.squares[0] += float(np.nansum(np.square(signal)))
        self.squares[1] += float(np.nansum(np.square(np.where(np.isnan(error), signal, error))))

    @property
    def explanation(self) -> Explanation | None:
        """Why the op differs, where it is known."""
        return self.range if self.known is None or self.only_overflows else self.known

    @property
    def only_overflows(self) -> bool:
        """
        Whether the only difference is that values beyond float16 became infinite or its greatest.

        Masks of attention do so, and no output differs.
        """
        return self.unit > 1 and self.worst_held <= self.bound < self.worst

    def _scores(self, indices: Array, values: Mapping[int, Array]) -> Array:
        """Return the scores at chosen indices; infinity where there is none."""
        scores, axis = values[self.op.inputs[0]], self.chosen
        assert axis is not None, "only of a choice"
        wanted = np.expand_dims(indices.astype(np.int64), axis)
        length = scores.shape[axis]
        found = np.take_along_axis(scores, np.clip(wanted, 0, length - 1), axis)
        is_there = (wanted >= 0) & (wanted < length)
        return np.squeeze(np.where(is_there, found, np.float32(np.inf)), axis)

    def _float_allowance(self, values: Mapping[int, Array]) -> tuple[float | Array, float | Array]:
        """Return the tolerances of sound float kernels: for float32 rounding, and in total."""
        graph, op = self.graph, self.op
        data = hybrid_position(graph, op)
        if self.factors is None:
            weights = 0.0 if data is None else _weight_sum(graph, op)
            bound = float_bound(graph, op) + float_bound(graph, op, half=self.unit > 1)
            reach = float_reach(graph, op)
            if self.is_on_gpu and op.name in BY_EXPONENTIALS:
                reach = 1.0
            self.factors = bound, reach, weights
        bound, reach, weights = self.factors
        floats = [np.abs(v) for v in values.values() if np.issubdtype(v.dtype, np.floating)]
        greatest = max((float(v[v < GREATEST].max(initial=0.0)) for v in floats), default=0.0)
        given = [values[place] for place in op.inputs if place in values]
        conditioning = (1 + self.unit) * float_conditioning(op, given)
        scale: float | Array = max(greatest, reach)
        if self.is_on_gpu and op.name in BY_ELEMENT:
            scale = BY_ELEMENT[op.name](given, values[self.tensor])
        noise = (bound + conditioning) * scale
        if self.unit > 1:
            by_element = given if op.name in BY_ELEMENT else []
            noise = noise + subnormal_error(by_element, values[self.tensor])
        if data is None:
            return noise, noise
        # Each kernel rounds its input to codes by its own rule, by half a code at most.
        code = float(np.abs(values[op.inputs[data]]).max(initial=0.0)) / 127
        return noise, noise + code * weights

    @property
    def sqnr_db(self) -> float:
        """SQNR of the op by itself, in float16; infinite of all other ops."""
        signal, error = self.squares
        return 10 * math.log10(signal / error) if signal and error else math.inf

    def problem(self) -> str:
        """Return a text on the defect; empty if rounding explains it."""
        differ = f"{self.n_differ} of {self.n_codes} that differ"
        if not self.worst <= self.bound:
            if not self.bound:
                return f"expected equal values, got {differ}, by up to {self.worst:.3g} ({self.at})"
            what, got = f"codes at most {self.bound:g} apart", self.worst
            if self.is_float:
                what = f"values at most {self.allowed:.3g} apart, as float kernels round"
                got = self.difference
            return f"expected {what}, got {got:.3g} ({differ}; {self.at})"
        lower, higher = self.n_moved
        moved = max(self.n_moved) if self.is_float else sum(self.n_moved)
        if not _exceeds_chance(moved, self.n_inside * self.share, self.n_inside):
            return ""
        if self.is_float:
            what = "differences to go one way, as rounding is by chance"
            ways = f", {'lower' if lower > higher else 'higher'}"
        else:
            what = f"codes to differ, {_NEAR_TIES}"
            ways = f", {lower} of them lower and {higher} higher"
            if not (lower and higher):
                ways = f", all {'lower' if lower else 'higher'}"
        return (
            f"expected at most {self.share:.0%} of the {what}, got {moved} of {self.n_inside}"
            f"{ways} ({self.at})"
        )

    def _where(self, sample: int, place: str, actual: object, base: object) -> str:
        one, other = self.names
        return f"sample {sample}{place}: {one} {actual}, {other} {base}"


def _exceeds_chance(count: int, expected: float, n: int) -> bool:
    return count > expected + math.sqrt(_CHANCE * n)


def problem_together(pairs: Iterable[Pair]) -> str:
    """
    Return how far the codes of all ops differ; empty if rounding explains it.

    In a small model no single op has enough codes to reveal a runtime that shifts each by one.
    """
    judged = [pair for pair in pairs if not pair.is_float and pair.bound]
    lower, higher = (sum(pair.n_moved[way] for pair in judged) for way in (0, 1))
    n_inside = sum(pair.n_inside for pair in judged)
    expected = sum(pair.n_inside * pair.share for pair in judged)
    if not _exceeds_chance(lower + higher, expected, n_inside):
        return ""
    return (
        f"expected at most {expected / n_inside:.0%} of the codes of {len(judged)} ops to differ, "
        f"{_NEAR_TIES}, got {lower + higher} of {n_inside}, {lower} of them lower and {higher} "
        "higher"
    )


def make_pair(
    graph: OpGraph, op: Op, tensor: int, names: tuple[str, str], *, kernels: str | None
) -> Pair:
    """Return an empty comparison with the tolerance of two sound kernels."""
    info = graph.tensor(op, tensor)
    is_on_gpu = kernels in GPU_KERNELS
    unit = HALF_UNIT if kernels == "gpu" else 1.0
    explained = known_defect(graph, op) if is_on_gpu else None
    if info.is_floating_point:
        # The rounding of a quantized input has random signs, except those that the values of one
        # input share (59 % measured); errors of approximated functions may have one sign.
        share = 1.0 if hybrid_position(graph, op) is None else 0.75
        # In float16 an operand may lie on the other side of a step.
        bound = math.inf if unit > 1 and op.name in STEPS else 1.0
        pair = Pair(op, graph, tensor, names, True, bound, share, known=explained)
        pair.is_on_gpu, pair.unit = is_on_gpu, unit
        return pair
    if not info.is_quantized:
        if unit > 1 and (axis := _chosen_axis(graph, op)) is not None:
            pair = Pair(op, graph, tensor, names, True, 1.0, known=explained)
            pair.is_on_gpu, pair.unit, pair.chosen = True, unit, axis
            return pair
        # In float16 a comparison of near ties may have another result.
        bound = math.inf if unit > 1 and _has_float(graph, op) else 0.0
        return Pair(op, graph, tensor, names, False, bound, known=explained)
    # CompiledModel and TensorFlow run XNNPACK's kernels, too; a user's own may be the worst kind.
    kinds = ["reference", "xnnpack"] if kernels is None else []
    kinds += [kernels if kernels in ("builtin", "reference") else "xnnpack", names[1]]
    bounds = [
        rounding_bound(graph, op, output=op.outputs.index(tensor), runtime=kind) for kind in kinds
    ]
    known = [0.5 if bound is None else bound for bound in bounds]
    low_high = code_range(info.dtype)
    off = max(known[:-1]) + known[-1]
    if is_on_gpu:
        off += float_error(graph, op, tensor, half=unit > 1)
    if off == 0:
        return Pair(op, graph, tensor, names, False, 0.0, ends=low_high, known=explained)
    # Each code is within ½ LSB and its bound of the real value. Codes differ if that is nearer to a
    # tie than a bound, or on it: on the coarsest grid with ties, half of all values are on one.
    bound = float(math.floor(1 + off))
    share = 1.0 if unit > 1 else min(1.0, 0.5 + off)
    pair = Pair(op, graph, tensor, names, False, bound, share, ends=low_high, known=explained)
    pair.unit = unit
    return pair


def _chosen_axis(graph: OpGraph, op: Op) -> int | None:
    """Return the axis along which an op chooses the greatest or least float."""
    if op.name not in ("ARG_MAX", "ARG_MIN") or not _has_float(graph, op):
        return None
    axis = graph.tensor(op, op.inputs[1])
    return int(graph.constant(axis)[:4].view("<i4")[0]) if axis.is_constant else None


def _has_float(graph: OpGraph, op: Op) -> bool:
    return any(graph.tensor(op, i).is_floating_point for i in op.inputs if i >= 0)


def _weight_sum(graph: OpGraph, op: Op) -> float:
    """Return the maximum of Σ|w| of one output value."""
    [weight] = roles_of(graph, op).weights
    greatest = float(np.abs(read_constant(graph, op, weight).floats).max(initial=0.0))
    return greatest * reduction_length(graph, op)


def first_differing_op(ops: SingleOps, one: str, other: str, inputs: Mapping[str, Array]) -> str:
    """Describe the first op whose codes differ when two runtimes run it alone, if any."""
    try:
        found = _first_difference(ops, one, other, inputs)
    except (UnrunnableError, CopyError, ValueError):  # the difference itself is already reported
        return ""
    if found is None:
        return ""
    group, op, tensor, (n_differ, n_codes, worst) = found
    edge, runtimes = ops.edge, ops.edge.runtimes
    kernels = {runtimes.kernels_of(each) for each in (one, other)}
    text = (
        f"{entry_of(edge.graph, op, edge.modules).where}, run alone on the same inputs, differs in "
        f"{n_differ} of {n_codes} codes, by up to {worst:.3g}:\n  "
        f"{_who(kernels, [runtimes.machine_of(each) for each in (one, other)])}"
    )
    if kernels == {"xnnpack"} or runtimes.target_of(one) is runtimes.target_of(other):
        return text
    names = [
        "xnnpack" if runtimes.target_of(each) is None or each in GPU_KERNELS else each.split(":")[0]
        for each in (one, other)
    ]
    codes = [group.run(name)[op.index, tensor] for name in names]
    same = "gives the same" if _difference(*codes) is None else "does not give the same"
    return f"{text}; XNNPACK {same} on both"


def _first_difference(
    ops: SingleOps, one: str, other: str, inputs: Mapping[str, Array]
) -> tuple[OpGroup, Op, int, tuple[int, int, float]] | None:
    """Return the first op that differs, its group and output, and how far the output differs."""
    for group in ops.groups(inputs):
        outputs = [group.run(each) for each in (one, other)]
        for op, tensor in group.cut.outputs:
            if ops.edge.graph.tensor(op, tensor).is_floating_point:
                continue  # float32 rounds everywhere
            found = _difference(*(each[op.index, tensor] for each in outputs))
            if found is not None:
                return group, op, tensor, found
    return None


def _difference(mine: Array, theirs: Array) -> tuple[int, int, float] | None:
    """Return how many codes differ, of how many, and by how much."""
    if mine.shape != theirs.shape:
        return None  # not a rounding difference
    steps = np.abs(mine.astype(np.float64) - theirs.astype(np.float64))
    steps = np.where(np.isnan(steps), 0.0, steps)
    count = int(np.count_nonzero(steps))
    return (count, steps.size, float(steps.max())) if count else None


def _who(kernels: set[str], targets: list[TargetMachine | None]) -> str:
    """Return in words which kernels round differently: by GPU, release, AVX2 or machine."""
    if gpu := kernels.intersection(GPU_KERNELS):
        precisions = " and ".join(sorted(PRECISIONS[each] for each in gpu))
        return f"LiteRT's GPU engine computes this op in {precisions}, then rounds to codes"
    machines = [each or TargetMachine.of("", facts()) for each in targets]
    releases = list(dict.fromkeys(f"{each.package} {each.release}" for each in machines))
    if len(releases) > 1:
        return f"kernels of {' and '.join(releases)} round this op otherwise"
    with_avx2 = [machine for machine in machines if "AVX2" in machine.features]
    # Measured: without AVX2 (Nehalem, emulated) builtin computes ARM's codes, with it others.
    if kernels == {"builtin"} and len(with_avx2) == 1:
        return "x86 with AVX2 rounds this op otherwise"
    named = " and ".join(dict.fromkeys(machine.machine for machine in machines))
    return f"kernels of {named} round this op otherwise"
