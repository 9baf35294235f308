"""Compare one runtime with a base runtime: outputs, and each op by itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.check.op_pairs import GREATEST, Pair, problem_together, tolerances
from pytest_edgeq.errors import CopyError
from pytest_edgeq.localize.single_ops import SingleOps
from pytest_edgeq.numerics.findings import NO_HARM, RUNTIMES_DIFFER, Finding, Harm, Place
from pytest_edgeq.runtimes.bounds.site import ULP
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

_SIGMAS = 3  # standard deviations that a sum of few squares may lie below its mean
_ALL = 5  # minimum number of ops that all differ, so that no kernel is to blame

_STALE = (
    "the runtime did not compute this sample and returned what an earlier run had left in memory, "
    "or its outputs are not read again"
)

FLOAT_UNIT = 2.0**-11
"""Half a unit in the last place of float16, relative: kernels may compute in half precision."""


class RuntimeResults:
    """Results of one runtime, compared with a base runtime."""

    _precision = 1.0  # how much farther from the reference it may be than the base

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
        try:
            for group in ops.groups(inputs):
                made, kept = group.run(self.name), group.kept
                for op, tensor in group.cut.outputs:
                    if (op.index, tensor) not in self._pairs:
                        self._pairs[op.index, tensor] = self._make_pair(op, tensor)
                    pair = self._pairs[op.index, tensor]
                    is_needed = pair.is_float or pair.needs_values or pair.coded_operand is not None
                    places = (*op.inputs, *op.outputs) if is_needed else ()
                    values = {place: kept.tensor(place) for place in places if place >= 0}
                    pair.update(index, kept.tensor(tensor), made[op.index, tensor], values)
        except (CopyError, ValueError) as error:
            self._runs_ops = False
            is_refused = isinstance(error, CopyError)
            what = f"runtime {self.name!r} was" if is_refused else "runtimes were"
            self.notes.append(f"{what} not compared op by op: {error}")

    def _make_pair(self, op: Op, tensor: int) -> Pair:
        runtimes = self._edge.runtimes
        kernels = None if self.name in runtimes.own else runtimes.kernels_of(self.name)
        graph, names = self._edge.graph, (self.name, self._base)
        return Pair(op, graph, tensor, names, **tolerances(graph, op, tensor, self._base, kernels))

    def findings(self) -> list[Finding]:
        """Return the findings on the runtime."""
        differing = self._differing_outputs()
        if wrong := self._wrong_pairs(differing):
            known = all((self.name, pair.op.name) in KNOWN_WRONG for pair in wrong)
            return [] if known else [self._wrong_ops(wrong)]
        if any(pair.is_undefined for pair in self._pairs.values()):
            return []
        if together := problem_together(self._pairs.values()):
            cause = (
                "each op was run alone on both, on the same inputs: the runtime changes data "
                "between the file and the kernels"
            )
            return [self._differs(together, cause, self._compare)]
        return differing

    def _wrong_pairs(self, on_outputs: Sequence[Finding]) -> list[Pair]:
        """Return the outputs of ops that differ, with the findings on the file's outputs."""
        return [pair for pair in self._pairs.values() if pair.problem()]

    def _differing_outputs(self) -> list[Finding]:
        """Return a finding for each output that is farther from the base than errors explain."""
        found = []
        for position, distance in self._distances.items():
            io_tensor = self._edge.signature.outputs[position]
            parameters = qparams(io_tensor.tensor)
            if parameters is not None:
                step = parameters[0]
            elif io_tensor.tensor.is_floating_point:
                step = FLOAT_UNIT * distance.greatest
            else:
                continue  # the distance of classes or indices means nothing
            error = max(distance.likely_error, ULP * distance.greatest)
            limit = _ERROR_RATIO * error * self._precision + step
            if not distance.difference <= limit:
                text = (
                    f"output {io_tensor.name!r}: expected an RMS difference of at most {limit:.3g} "
                    f"({_ERROR_RATIO} × the likely error of {self._base}, plus one step), got "
                    f"{distance.difference:.3g}"
                )
                found.append(self._differs(text, self._why_outputs_differ()))
        if found and self.stale_sample is not None and not self._is_explained():
            text = f"expected other outputs of sample {self.stale_sample} than of sample 0, got "
            found.append(self._differs(f"{text}the same", _STALE))
        return found

    def not_compared(self) -> list[str]:
        """Return a note on the first op that quantizes NaN or infinity."""
        return [
            f"runtimes {self.name!r} and {self._base!r} were not compared from "
            f"{self._where(pair.op)} on: the two kernels quantize NaN or infinity to different "
            "codes"
            for pair in self._pairs.values()
            if pair.is_undefined
        ][:1]

    def _why_outputs_differ(self) -> str:
        """Return why outputs differ though no op by itself does."""
        return (
            "no single op explains it, so the runtime moves data wrongly between the ops: stale "
            "outputs, inputs that are not written, memory that two tensors share"
        )

    def _is_explained(self) -> bool:
        """Whether an op by itself explains a loss of the outputs."""
        return False

    def _explained(self, pair: Pair) -> tuple[str, str]:
        """Return why an op differs, and how to avoid it."""
        return (
            "each op was run alone on both, on the same inputs, so that nothing before it explains "
            "this: one of the two computes something else",
            self._compare,
        )

    def _where(self, op: Op) -> str:
        return entry_of(self._edge.graph, op, self._edge.modules).where

    @property
    def _compare(self) -> str:
        return (
            f"compare both with torch: edgeq.compare(model, samples, runtime={self.name!r}) and "
            f"runtime={self._base!r}"
        )

    def _wrong_ops(self, wrong: Sequence[Pair]) -> Finding:
        first, *others = [f"{self._where(pair.op)}: {pair.problem()}" for pair in wrong]
        if len(wrong) == len(self._pairs) >= _ALL:
            text = f"all {len(wrong)} ops differ when run alone: {first}"
            cause = (
                "not the kernels but the runtime's buffers are wrong: their order or dtype, or a "
                "read before the write"
            )
            return self._differs(text, cause, self._compare)
        more = [f"  … and {len(others) - 4} more"] if len(others) > 4 else []
        text = f"{first} [{len(wrong)} of {len(self._pairs)} ops]"
        found = self._differs(text, *self._explained(wrong[0]))
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
        # Of few values the error may be small by chance: the sum of squares is assumed to lie three
        # standard deviations low (χ² by Wilson and Hilferty, 1931), which makes 9 times as much of
        # 4 values, and half as much again of 40. One or two values count as three.
        spread = 2 / (9 * max(self._n, 3))
        slack: float = (1 - spread - _SIGMAS * math.sqrt(spread)) ** -1.5
        return math.sqrt(self._error / max(self._n, 1)) * slack
