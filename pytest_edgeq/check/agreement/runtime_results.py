"""Compare the results of one runtime with those of a base runtime."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.check.agreement.pair import GREATEST, Pair, make_pair, problem_together
from pytest_edgeq.errors import CopyError
from pytest_edgeq.localize.single_ops import OpGroup, SingleOps
from pytest_edgeq.numerics.findings import NO_HARM, RUNTIMES_DIFFER, Finding, Harm, Place
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.tflite.boundary import qparams
from pytest_edgeq.tflite.op_dtypes import entry_of
from pytest_edgeq.tflite.ops import KNOWN_WRONG
from pytest_edgeq.tflite.subgraph import Op

Array = npt.NDArray[Any]

# Allowed distance of two runtimes, as a multiple of the builtin kernels' own error. |R − B| ≤ |R −
# f| + |B − f|: a runtime R that is at most three times as far from the reference f as the builtin
# kernels B are.
_ERROR_RATIO = 4

_SIGMAS = 3
"""Standard deviations that a sum of few squares may lie below its mean."""

_NOTABLE = 1.5
"""Minimum factor for which a text says that a bound is wider because of few values."""

_ALL = 5
"""Minimum number of ops that all differ, so that no kernel is to blame."""

FLOAT_UNIT = 2.0**-11
"""Half a unit in the last place of float16, relative: kernels may compute in half precision."""


def equal(one: Array, two: Array) -> bool:
    """Whether two results are the same, NaN at the same places."""
    return np.array_equal(one, two, equal_nan=np.issubdtype(one.dtype, np.floating))


def _has_finite(values: Array) -> bool:
    return not np.issubdtype(values.dtype, np.floating) or bool(np.isfinite(values).any())


def _where(edge: EdgeFile, op: Op) -> str:
    return entry_of(edge.graph, op, edge.modules).where


@dataclass(slots=True, eq=False)
class RuntimeResults:
    """Results of one runtime, compared with a base runtime."""

    name: str
    first: Sequence[Array] = ()
    last: Sequence[Array] = ()
    stale: int | None = None
    ops_sample: int | None = None
    twins: set[str] = field(default_factory=set)
    runs_ops: bool = True
    pairs: dict[tuple[int, int], Pair] = field(default_factory=dict)
    distances: dict[int, RuntimeDistance] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add_distances(
        self,
        edge: EdgeFile,
        base: Sequence[Array],
        codes: Sequence[Array],
        reference: Sequence[Array],
    ) -> None:
        """Add the distance of both runtimes, and of the base from the reference."""
        values = (edge.decode(base), edge.decode(codes), reference)
        for position, each in enumerate(zip(*values, strict=True)):
            self.distances.setdefault(position, RuntimeDistance()).update(*each)

    def check_stale(self, index: int, codes: Sequence[Array], *, repeats: bool) -> None:
        """Record the first sample whose outputs, if finite, are those of the previous one."""
        is_same = bool(self.last) and all(map(equal, self.last, codes))
        if self.stale is None and is_same and not repeats and any(map(_has_finite, codes)):
            self.stale = index
        self.last = [code.copy() for code in codes]

    def compare_ops(self, ops: SingleOps, inputs: Mapping[str, Array], index: int) -> None:
        """Compare every op with the base runtime, each run alone on the same inputs."""
        if not self.runs_ops:
            return
        note = ""
        try:
            for group in ops.groups(inputs):
                self._compare_group(ops, group, index)
        except CopyError as error:
            note = f"runtime {self.name!r} was not compared op by op: {error}"
        except ValueError as error:
            note = f"runtimes were not compared op by op: {error}"
        if note:
            self.runs_ops = False
            self.notes.append(note)

    def _compare_group(self, ops: SingleOps, group: OpGroup, index: int) -> None:
        made, kept, runtimes = group.run(self.name), group.kept, ops.edge.runtimes
        for op, tensor in group.cut.outputs:
            pair = self.pairs.get((op.index, tensor))
            if pair is None:
                kernels = None if self.name in runtimes.own else runtimes.kernels_of(self.name)
                names = (self.name, ops.base)
                pair = make_pair(ops.edge.graph, op, tensor, names, kernels=kernels)
                self.pairs[op.index, tensor] = pair
            values = {
                place: kept.tensor(place)
                for place in (*op.inputs, *op.outputs)
                if place >= 0 and pair.is_float
            }
            pair.update(index, kept.tensor(tensor), made[op.index, tensor], values)

    def findings(self, base: str, edge: EdgeFile) -> list[Finding]:
        """Return the findings on the runtime."""
        wrong = [pair for pair in self.pairs.values() if pair.problem()]
        if wrong:
            known = all((self.name, pair.op.name) in KNOWN_WRONG for pair in wrong)
            return [] if known else [self._wrong_ops(wrong, base, edge)]
        if self._undefined:
            return []
        together = problem_together(self.pairs.values())
        if together:
            cause = (
                "each op was run alone on both, on the same inputs: what stands between the file "
                "and the runtime changes what is read"
            )
            return [self._differs(base, together, cause, self._compare(base))]
        found = []
        for position, distance in self.distances.items():
            border = edge.signature.outputs[position]
            tensor = border.tensor
            parameters = qparams(tensor)
            if parameters is not None:
                step = parameters[0]
            elif tensor.is_floating_point:
                step = FLOAT_UNIT * distance.greatest
            else:
                continue  # the distance of classes or indices means nothing
            limit = _ERROR_RATIO * distance.likely_error + step
            if not distance.difference <= limit:
                text = (
                    f"output {border.name!r}: expected at most {limit:.3g} between them (rms: "
                    f"{_ERROR_RATIO} times what {base} is off torch{distance.chance}, and one "
                    f"step), got {distance.difference:.3g}"
                )
                found.append(self._differs(base, text, self._why_between()))
        return found

    def not_compared(self, base: str, edge: EdgeFile) -> list[str]:
        """Return a note on the first op that quantizes NaN or infinity."""
        if not self._undefined:
            return []
        where = _where(edge, self._undefined[0].op)
        return [
            f"runtimes {self.name!r} and {base!r} were not compared at {where} and behind it: its "
            "kernels quantize NaN or infinite values, each to codes of its own"
        ]

    @property
    def _undefined(self) -> list[Pair]:
        return [pair for pair in self.pairs.values() if pair.is_undefined]

    def _why_between(self) -> str:
        if self.stale is not None:
            return (
                f"for sample {self.stale} it gave again, bit by bit, what it gave for sample "
                f"{self.stale - 1}: outputs that are not read anew, inputs that are not written"
            )
        return (
            "no op by itself explains it, so it is what the runtime does between the ops: memory "
            "that two tensors share, buffers that are not written"
        )

    def _wrong_ops(self, wrong: Sequence[Pair], base: str, edge: EdgeFile) -> Finding:
        texts = [f"{_where(edge, pair.op)}: {pair.problem()}" for pair in wrong]
        if len(wrong) == len(self.pairs) >= _ALL:
            return self._differs(
                base,
                f"all {len(wrong)} ops, each run alone, give something else: {texts[0]}",
                "it is no kernel, but what stands between the file and the runtime: the order or "
                "the dtype of buffers, what is read before it is written",
                self._compare(base),
            )
        first, *others = texts
        more = [f"  … and {len(others) - 4} more"] if len(others) > 4 else []
        found = self._differs(
            base,
            f"{first} [{len(wrong)} of {len(self.pairs)} ops]",
            "each op was run alone on both, on the same inputs, so that nothing before it "
            "explains this: one of the two computes something else",
            self._compare(base),
        )
        return replace(
            found,
            place=found.place._replace(op=wrong[0].op.index),
            evidence=(*(f"  {each}" for each in others[:4]), *more),
        )

    def _differs(self, base: str, text: str, cause: str, fix: str = "") -> Finding:
        """Return the finding that this runtime differs from the base."""
        lost = [
            Harm.decibels(20 * math.log10(each.difference / each.likely_error))
            for each in self.distances.values()
            if each.difference > 0 and each.likely_error > 0
        ]
        return Finding(
            kind=RUNTIMES_DIFFER,
            place=Place("runtime", self.name),
            headline=f"runtimes {self.name!r} and {base!r}: {text}",
            harm=max(lost, default=NO_HARM),
            causes=(cause,),
            fix=fix,
        )

    def _compare(self, base: str) -> str:
        return (
            f"compare both with torch: edgeq.compare(model, samples, runtime={self.name!r}) and "
            f"runtime={base!r}"
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
        """
        Upper estimate of the root mean square between the first runtime and the reference.

        Of few values it may be small by chance: the sum of squares is assumed to lie three standard
        deviations low (χ² by Wilson and Hilferty, 1931). Of 4 values that is 9 times as much, of 40
        half as much again.
        """
        return math.sqrt(self._error / max(self._n, 1)) * self._slack

    @property
    def chance(self) -> str:
        """A clause on this correction if it matters."""
        few = self._slack > _NOTABLE
        return f", of {self._n} values alone {self._slack:.2g} times as much" if few else ""

    @property
    def _slack(self) -> float:
        # One or two values are too few; they count as three.
        spread = 2 / (9 * max(self._n, 3))
        return float((1 - spread - _SIGMAS * math.sqrt(spread)) ** -1.5)
