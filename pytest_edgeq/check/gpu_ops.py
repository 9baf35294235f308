"""Compare what LiteRT's GPU engine computes with the CPU: rounding, and the range of float16."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pytest_edgeq.check.op_pairs import GREATEST, Pair, Values, tolerances
from pytest_edgeq.check.runtime_results import FLOAT_UNIT, RuntimeResults
from pytest_edgeq.numerics.findings import Finding
from pytest_edgeq.runtimes.bounds import float_bound, float_conditioning, float_reach
from pytest_edgeq.runtimes.bounds.floats import float_error, reduction_length
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.runtimes.gpu_known import Explanation, known_defect
from pytest_edgeq.tflite.boundary import qparams
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.subgraph import Op

_Array = npt.NDArray[Any]

HALF_UNIT: Final = 2.0**13  # half a last place of float16, 2^-11, as a multiple of float32's
GREATEST_HALF: Final = float(np.finfo(np.float16).max)
LEAST_HALF: Final = float(np.finfo(np.float16).smallest_subnormal)
OVERFLOWN: Final = 2.0**-8  # relative error allowed of a value that is too large for float16
# Ops that the engine computes from e^x: near 0 its error is that of 1.
BY_EXPONENTIALS: Final = ("TANH", "ELU")


def _of_any(operands: Sequence[_Array], result: _Array) -> Any:
    """Return the greatest size of the operands and the result, by element."""
    return np.max([np.broadcast_to(np.abs(x), result.shape) for x in (*operands, result)], axis=0)


BY_ELEMENT: Final[dict[str, Callable[[Sequence[_Array], _Array], Any]]] = {
    **dict.fromkeys(
        ("ABS", "CEIL", "DIV", "FLOOR", "FLOOR_DIV", "MUL", "NEG", "ROUND", "RSQRT", "SIGN"),
        lambda operands, result: np.abs(result),
    ),
    **dict.fromkeys(("ADD", "MAXIMUM", "MINIMUM", "SUB"), _of_any),
    "SQRT": lambda operands, result: np.abs(result),
}
"""Sizes that the error of an elementwise op is relative to: a mask of -1e4 hides no other value."""


def _to_integer(x: _Array, scale: float = 1.0) -> tuple[_Array, _Array]:
    return np.abs(x - np.rint(x)), scale * np.abs(x)


def _to_each_other(x: _Array, y: _Array) -> tuple[_Array, _Array]:
    return np.abs(x - y), np.abs(x) + np.abs(y)


STEPS: Final[dict[str, Callable[..., tuple[_Array, _Array]]]] = {
    **dict.fromkeys(("CAST", "CEIL", "FLOOR"), _to_integer),
    **dict.fromkeys(("FLOOR_DIV", "FLOOR_MOD"), lambda x, y: _to_integer(x / y, 3.0)),
    "ROUND": lambda x: (np.abs(x - np.floor(x) - 0.5), np.abs(x)),
    "SIGN": lambda x: (np.abs(x), np.zeros(x.shape)),
    **dict.fromkeys(("EQUAL", "NOT_EQUAL", "GREATER", "GREATER_EQUAL"), _to_each_other),
    **dict.fromkeys(("LESS", "LESS_EQUAL", "ARG_MAX", "ARG_MIN"), _to_each_other),
}
"""Distances of operands to a step of the result, and sizes that their rounding is relative to."""


def subnormal_error(operands: Iterable[_Array], result: _Array) -> _Array:
    """Return the error of a result by operands that float16 rounds to multiples of its least."""
    error = np.full(result.shape, LEAST_HALF)
    for each in operands:
        with np.errstate(divide="ignore", invalid="ignore"):
            slope = np.abs(result / each)
        error += LEAST_HALF * np.where(np.isfinite(slope), slope, 0.0)
    return error


def beyond_float16(
    operands: Iterable[_Array], result: _Array, computed: _Array, n_terms: int
) -> Explanation | None:
    """
    Explain which values of an op overflow or underflow float16, if any do.

    `result` is in float32, `computed` in float16; one value of it sums `n_terms`.
    """
    broken = np.isfinite(result) & ~np.isfinite(computed)
    for each in (*operands, result):
        if not np.issubdtype(each.dtype, np.floating):
            continue
        is_beside = broken.any() and each.shape == broken.shape
        sizes = np.abs(each[broken] if is_beside else each)
        greatest = float(sizes[np.isfinite(sizes)].max(initial=0.0))
        if greatest > GREATEST_HALF:
            text = f"{greatest:,.6g} is above the greatest value of float16, {GREATEST_HALF:,.0f}"
            if each is result and n_terms > 1:
                most = int(n_terms * GREATEST_HALF / greatest)
                text += f"; sums of more than {most:,} terms of this size overflow"
            return Explanation(f"overflow: {text}", _SCALE_DOWN)
        if 0 < greatest < LEAST_HALF / 2:
            return Explanation(
                f"underflow: {greatest:.3g} is below the least value of float16, {LEAST_HALF:.3g}, "
                "and becomes 0",
                "use a larger epsilon, or scale the operands up in the model",
            )
    if broken.any():
        return Explanation(
            "overflow: a product or a partial sum is above the greatest value of float16, "
            f"{GREATEST_HALF:,.0f}, although the result is not",
            _SCALE_DOWN,
        )
    return None


_SCALE_DOWN: Final = "scale the operands down in the model, or use a mean in place of a sum"

_EXPLAINS_DB: Final = 30.0
"""SQNR of an op by itself, in dB, below which it explains a loss of the outputs."""


@dataclass(eq=False)
class GpuPair(Pair):
    """One output of an op that was run alone on a GPU and on a base runtime."""

    is_half: bool = False  # whether the GPU computes in float16
    known: Explanation | None = None  # of a difference: a defect of the engine
    range: Explanation | None = None  # likewise: values that float16 does not hold
    overflow: str = ""  # a value beyond float16 that became infinite or its greatest
    squares: list[float] = field(default_factory=lambda: [0.0, 0.0])  # signal, and its error

    def update(self, sample: int, base: _Array, actual: _Array, values: Values) -> None:
        """Compare one sample; `values` has the op's tensors by index, if it is needed."""
        if self.is_half and base.shape == actual.shape:
            operands = [values[index] for index in self.op.inputs if index in values]
            n_terms = reduction_length(self.graph, self.op)
            self.range = self.range or beyond_float16(operands, base, actual, n_terms)
            self._add_squares(base, actual)
            if self.needs_values:
                actual = np.where(self._is_near_step(operands, base, actual), base, actual)
            elif self.is_float:
                is_over = (np.abs(base) > GREATEST_HALF) & (actual * np.sign(base) >= GREATEST_HALF)
                if is_over.any():
                    first = tuple(np.argwhere(is_over)[0].tolist())
                    at = self._where(sample, f", index {list(first)}", actual[first], base[first])
                    self.overflow = self.overflow or f"expected values within float16, got {at}"
                actual = np.where(is_over, base, actual)
        Pair.update(self, sample, base, actual, values)

    def _is_near_step(self, operands: list[_Array], base: _Array, actual: _Array) -> Any:
        if self.op.name in ("ARG_MAX", "ARG_MIN"):
            scores, axis = operands
            operands = [_chosen(scores, each, axis.item()) for each in (base, actual)]
        with np.errstate(divide="ignore", invalid="ignore"):
            distance, size = STEPS[self.op.name](*(each.astype(np.float64) for each in operands))
            return distance <= FLOAT_UNIT * size + LEAST_HALF

    def _rounding(self, operands: list[_Array], values: Values, greatest: float) -> float | _Array:
        graph, op, result = self.graph, self.op, values[self.tensor]
        bound = float_bound(graph, op) + float_bound(graph, op, half=self.is_half)
        bound += (1 + (HALF_UNIT if self.is_half else 1)) * float_conditioning(op, operands)
        by_element = BY_ELEMENT.get(op.name)
        if by_element is not None:
            noise: _Array = bound * by_element(operands, result)
        else:
            reach = 1.0 if op.name in BY_EXPONENTIALS else float_reach(graph, op)
            noise = np.full(result.shape, bound * max(greatest, reach))
        if not self.is_half:
            return noise
        noise += subnormal_error(operands if by_element else [], result)
        # Rounding does not explain values that are too large for float16.
        size = np.abs(result)
        limit: _Array = np.where(size > GREATEST_HALF, OVERFLOWN * size, noise)
        return limit

    def _add_squares(self, base: _Array, actual: _Array) -> None:
        """Add to the SQNR, in which a value that is lost counts as an error of its size."""
        one, two = (np.clip(x.astype(np.float64), -GREATEST, GREATEST) for x in (base, actual))
        quantization = qparams(self.graph.tensor(self.op, self.tensor))
        signal, error = one - (quantization[1] if quantization else 0), np.abs(one - two)
        self.squares[0] += float(np.nansum(np.square(signal)))
        self.squares[1] += float(np.nansum(np.square(np.where(np.isnan(error), signal, error))))

    def problem(self) -> str:
        """Return a text on the defect; empty if rounding explains it."""
        return Pair.problem(self) or self.overflow

    @property
    def explanation(self) -> Explanation | None:
        """Why the op differs, where it is known."""
        return self.range if self.known is None or self.only_overflows else self.known

    @property
    def only_overflows(self) -> bool:
        """Whether overflow is the only difference: masks of attention do so, and no output."""
        return self.overflow != "" and not Pair.problem(self)

    @property
    def sqnr_db(self) -> float:
        """SQNR of the op by itself, in float16; infinite in float32."""
        signal, error = self.squares
        return 10 * math.log10(signal / error) if signal and error else math.inf


def _chosen(scores: _Array, indices: _Array, axis: int) -> _Array:
    """Return the scores at chosen indices; NaN where there is none."""
    wanted = np.expand_dims(indices.astype(np.int64), axis)
    length = scores.shape[axis]
    found = np.take_along_axis(scores, np.clip(wanted, 0, length - 1), axis)
    is_there = (wanted >= 0) & (wanted < length)
    return np.squeeze(np.where(is_there, found, np.nan), axis)


def _in_half(graph: OpGraph, op: Op, tensor: int) -> dict[str, Any]:
    """Return the fields of a pair that differ in float16."""
    info = graph.tensor(op, tensor)
    if info.is_quantized:
        return {"share": 1.0}
    if not any(graph.tensor(op, index).is_floating_point for index in op.inputs if index >= 0):
        return {}
    if op.name in STEPS and not (op.name == "CAST" and info.is_floating_point):
        return {"needs_values": True}
    # Indices of near ties may differ.
    return {} if info.is_floating_point else {"bound": math.inf}


class GpuResults(RuntimeResults):
    """Results of a GPU, compared with a base runtime."""

    def __init__(self, name: str, base: str, edge: EdgeFile) -> None:
        super().__init__(name, base, edge)
        self._is_half = edge.runtimes.kernels_of(name) == "gpu"
        tensors = (tensor for each in edge.graph.subgraphs for tensor in each.tensors)
        # Float16 makes of each rounding of a float32 file one 2^13 times as large, and so of their
        # sum. Of a quantized file the base has the errors of the quantization, beside which
        # float16's are small.
        if self._is_half and not any(tensor.is_quantized for tensor in tensors):
            self._precision = HALF_UNIT

    def _make_pair(self, op: Op, tensor: int) -> GpuPair:
        graph, is_half = self._edge.graph, self._is_half
        error = float_error(graph, op, tensor, half=is_half)
        fields = tolerances(graph, op, tensor, self._base, "xnnpack", error)
        fields |= _in_half(graph, op, tensor) if is_half else {}
        fields |= {"is_half": is_half, "known": known_defect(graph, op)}
        return GpuPair(op, graph, tensor, (self.name, self._base), **fields)

    def _wrong_pairs(self, on_outputs: Sequence[Finding]) -> list[Pair]:
        wrong = super()._wrong_pairs(on_outputs)
        if on_outputs or not self._distances:
            return wrong
        # What overflows float16 and moves no output is a mask.
        return [pair for pair in wrong if not (isinstance(pair, GpuPair) and pair.only_overflows)]

    def _explained(self, pair: Pair) -> tuple[str, str]:
        known = pair.explanation if isinstance(pair, GpuPair) else None
        return known or super()._explained(pair)

    def _costliest(self) -> GpuPair | None:
        """Return the op that float16 costs most, by itself."""
        pairs = [pair for pair in self._pairs.values() if isinstance(pair, GpuPair)]
        worst = min(pairs, key=lambda pair: pair.sqnr_db, default=None)
        return None if worst is None or worst.sqnr_db == math.inf else worst

    def _is_explained(self) -> bool:
        worst = self._costliest()
        return worst is not None and worst.sqnr_db <= _EXPLAINS_DB

    def _why_outputs_differ(self) -> str:
        if not self._is_half:
            return super()._why_outputs_differ()
        text = "float16 rounds every value and every sum to 11 bits"
        if (worst := self._costliest()) is None:
            return text
        n_terms = reduction_length(worst.graph, worst.op)
        sums = f", which sums {n_terms:,} terms," if n_terms > 1 else ""
        text += f"; {self._where(worst.op)}{sums} has {worst.sqnr_db:.1f} dB by itself, the least"
        known = worst.explanation if worst.sqnr_db < _EXPLAINS_DB else None
        return f"{text} of all ops{f'; {known.cause}' if known else ''}"
