"""Compare outputs of ops that were run alone on two runtimes."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.errors import CopyError, UnrunnableError
from pytest_edgeq.localize.measured import peak
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
from pytest_edgeq.runtimes.workers.remote_worker import facts
from pytest_edgeq.tflite.boundary import code_range
from pytest_edgeq.tflite.constants import read_constant
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.op_dtypes import entry_of
from pytest_edgeq.tflite.roles import roles_of
from pytest_edgeq.tflite.subgraph import Op

Array = npt.NDArray[Any]
Values = Mapping[int, Array]

# Maximum of float32, which kernels that clamp return for infinity.
GREATEST = float(np.finfo(np.float32).max)
# Of Hoeffding's bound, P(share ≥ p + d) ≤ exp(−2nd²): once in a million by chance.
_CHANCE = math.log(1e6) / 2

_NEAR_TIES = "as rounding changes only codes near ties"


@dataclass(eq=False)
class Pair:
    """One output of an op that was run alone on two runtimes."""

    op: Op
    graph: OpGraph
    tensor: int
    names: tuple[str, str]  # of the runtime and of the base runtime
    is_float: bool  # whether differences are counted in units of float tolerance
    bound: float  # greatest difference of two sound kernels
    share: float = 1.0  # share of the codes within the range that may differ
    ends: tuple[int, int] | None = None
    worst: float = 0.0  # the greatest difference so far, in the unit of `bound`; `at` is its place
    at: str = ""
    allowed: float = 0.0  # absolute float tolerance there; `difference` is the absolute difference
    difference: float = 0.0
    n_differ: int = 0
    n_codes: int = 0
    n_inside: int = 0
    n_moved: list[int] = field(default_factory=lambda: [0, 0])
    is_undefined: bool = False
    needs_values: bool = False  # whether integers depend on the operands in float

    @functools.cached_property
    def coded_operand(self) -> int | None:
        """The float operand that the kernel quantizes, if it does so."""
        data = 0 if self.op.name == "QUANTIZE" else hybrid_position(self.graph, self.op)
        if data is None or not self.graph.tensor(self.op, self.op.inputs[data]).is_floating_point:
            return None
        return self.op.inputs[data]

    def update(self, sample: int, base: Array, actual: Array, values: Values) -> None:
        """Compare one sample; `values` has the op's tensors by index, if it is needed."""
        self.n_codes += base.size
        if base.shape != actual.shape:
            self.worst, self.n_differ = math.inf, self.n_differ + base.size
            self.at = self._where(sample, "", list(actual.shape), list(base.shape))
            return
        same = base == actual
        if self.is_float:
            same |= np.isnan(base) & np.isnan(actual)
            if same.all():
                return  # equal codes are still counted below
        coded = self.coded_operand
        if coded is not None and not (same.all() or (np.abs(values[coded]) < GREATEST).all()):
            self.is_undefined = True
            return
        one, two = base.astype(np.float64), actual.astype(np.float64)
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
            with np.errstate(divide="ignore", invalid="ignore"):
                steps = np.where(steps == 0, 0.0, steps / limit)
        else:
            beyond_noise = ~same
            # Integers beyond 2^53 may differ although their float64 values are equal.
            steps = np.where(same, 0.0, np.maximum(steps, 1.0))
        steps = np.where(np.isnan(steps), math.inf, steps)
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

    def _float_allowance(self, values: Values) -> tuple[float | Array, float | Array]:
        """Return the tolerances of sound float kernels: for float32 rounding, and in total."""
        graph, op = self.graph, self.op
        greatest = max(map(_peak, values.values()), default=0.0)
        noise = self._rounding([values[at] for at in op.inputs if at in values], values, greatest)
        data = hybrid_position(graph, op)
        if data is None:
            return noise, noise
        # Each kernel rounds its input to codes by its own rule, by half a code at most.
        code = float(np.abs(values[op.inputs[data]]).max(initial=0.0)) / 127
        return noise, noise + code * _weight_sum(graph, op)

    def _rounding(self, operands: list[Array], values: Values, greatest: float) -> float | Array:
        """Return the greatest difference by rounding; no value but infinity is above `greatest`."""
        bound = float_bound(self.graph, self.op) + float_conditioning(self.op, operands)
        return 2 * bound * max(greatest, float_reach(self.graph, self.op))

    def problem(self) -> str:
        """Return a text on the defect; empty if rounding explains it."""
        differ = f"{self.n_differ} of {self.n_codes} that differ"
        if not self.worst <= self.bound:
            if not self.bound:
                return f"expected equal values, got {differ}, by up to {self.worst:.3g} ({self.at})"
            what, got = f"codes that differ by at most {self.bound:g}", self.worst
            if self.is_float:
                what = f"values that differ by at most {self.allowed:.3g}, as float kernels round"
                got = self.difference
            return f"expected {what}, got {got:.3g} ({differ}; {self.at})"
        lower, higher = self.n_moved
        moved = max(self.n_moved) if self.is_float else sum(self.n_moved)
        if not _exceeds_chance(moved, self.n_inside * self.share, self.n_inside):
            return ""
        if self.is_float:
            what = "differences to have one sign, as rounding is random"
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


def tolerances(
    graph: OpGraph, op: Op, tensor: int, base: str, kernels: str | None, error: float = 0.0
) -> dict[str, Any]:
    """
    Return the fields of a `Pair` of two sound kernels, of a base runtime and of another one.

    `kernels` is None for a user's own runtime, which may be the worst kind; `error` is what it adds
    to the rounding of kernels, in LSB.
    """
    info = graph.tensor(op, tensor)
    if info.is_floating_point:
        # The rounding of a quantized input has random signs, except those that the values of one
        # input share (59 % measured); errors of approximated functions may have one sign.
        share = 1.0 if hybrid_position(graph, op) is None else 0.75
        return {"is_float": True, "bound": 1.0, "share": share}
    if not info.is_quantized:
        return {"is_float": False, "bound": 0.0}
    # CompiledModel and TensorFlow run XNNPACK's kernels, too.
    kinds = ["reference", "xnnpack"] if kernels is None else []
    kinds += [kernels if kernels in ("builtin", "reference") else "xnnpack", base]
    output = op.outputs.index(tensor)
    bounds = [rounding_bound(graph, op, output=output, runtime=kind) for kind in kinds]
    known = [0.5 if bound is None else bound for bound in bounds]
    off = max(known[:-1]) + known[-1] + error
    # Each code is within ½ LSB and its bound of the real value. Codes differ if that is nearer to a
    # tie than a bound, or on it: on the coarsest grid with ties, half of all values are on one.
    return {
        "is_float": False,
        "bound": math.floor(1 + off) if off else 0.0,
        "share": min(1.0, 0.5 + off) if off else 1.0,
        "ends": code_range(info.dtype),
    }


def _peak(values: Array) -> float:
    """Return the greatest magnitude of floats below `GREATEST`; 0 for integers."""
    greatest = peak(values)
    if greatest < GREATEST:
        return greatest
    return float(np.abs(values[np.abs(values) < GREATEST]).max(initial=0.0))


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
    same = "computes the same" if _difference(*codes) is None else "does not compute the same"
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
        return f"kernels of {' and '.join(releases)} round this op differently"
    with_avx2 = [machine for machine in machines if "AVX2" in machine.features]
    # Measured: without AVX2 (Nehalem, emulated) builtin computes ARM's codes, with it others.
    if kernels == {"builtin"} and len(with_avx2) == 1:
        return "x86 with AVX2 rounds this op differently"
    named = " and ".join(dict.fromkeys(machine.machine for machine in machines))
    return f"kernels of {named} round this op differently"
