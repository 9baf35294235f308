"""Measure every op of a file on the values that it really took."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from pytest_edgeq.localize.calls import straightened
from pytest_edgeq.localize.kernels import HybridInput
from pytest_edgeq.localize.kinds import base_name
from pytest_edgeq.localize.matches import Match, Reading, typed
from pytest_edgeq.localize.measured import Measured
from pytest_edgeq.localize.programs import Routine, in_a_row
from pytest_edgeq.localize.reference import ReferenceGraph
from pytest_edgeq.localize.sums import Beside, Codes, Ends, Sums, ends_of, in_channels_last
from pytest_edgeq.localize.tensors import Met, Tensors, plainly_strided
from pytest_edgeq.tflite.graph import Op

__all__ = ["Hybrid", "Step"]

Node = torch.fx.Node


@dataclass(frozen=True, slots=True, eq=False)
class Hybrid:
    """
    An op whose kernel rounds its own float input.

    Attributes:
        input: What it makes of that.
        bound: What its result may be off, relative, held against a sum in float32.
        exact_bound: The same, against one in float64.
        greatest_weight: The magnitude of its greatest weight; inf where it has none that is known.
    """

    input: HybridInput
    bound: float
    exact_bound: float
    greatest_weight: float


@dataclass(slots=True, eq=False)
class Step:
    """
    How one matched tensor is measured.

    Attributes:
        match: What it stands for.
        reading: Where it is measured: at the last of its nodes that its source can tell.
        op: The op that makes it.
        nodes: What is run, in order, from its sources to its last node.
        differs: Whether the quantized reference has other parameters here than the float one.
        hybrid: The op whose kernel rounds its own float input, if any.
        bound: What the kernel may be off beyond ½ LSB; of a float op relative; None where several
            ops round, one after the other.
        limits: What its codes stand for; None where it has no scale.
        sources: The matches of what it was made from.
        taken: By source, those of its nodes that are taken.
        weights: Quantized parameters, where the reference has none.
        handed_on: Of an op that only holds its source in another way, how that one is read.
        border: By how much the op pads what it holds, with zeros; in the order of torch's `pad`.
        own: Whether an op behind holds these values in another way, and takes their sums.
        spacing: Half of the greatest scale of a tensor with one a channel, which is read as floats.
        reach: What the bound of a float op is relative to at the least.
        done: The tensors that no step behind this one asks for.
        routines: What is run, with its constants, and the node that has the value at last: as
            quantized or not, in float64 or not.
        dtypes: What the values that are taken have in torch, in float64 or not.
        measured: Its errors so far, shared with the steps of the same tensor for other shapes.
        elements: How many values a sample has here.
    """

    match: Match
    reading: Reading
    op: Op
    nodes: list[Node]
    differs: bool
    hybrid: Hybrid | None
    bound: float | None
    limits: Codes | None
    sources: tuple[Match, ...]
    taken: tuple[tuple[int, tuple[Reading, ...]], ...]
    weights: Mapping[Node, torch.Tensor]
    handed_on: Reading | None
    border: tuple[int, ...]
    own: bool
    measured: Measured
    spacing: float = 0.0
    reach: float = 0.0
    done: tuple[int, ...] = ()
    routines: dict[tuple[bool, bool], tuple[Routine, Node]] = field(default_factory=dict)
    dtypes: dict[tuple[Node, bool], torch.dtype] = field(default_factory=dict)
    elements: int = field(init=False)

    def __post_init__(self) -> None:
        self.elements = math.prod(self.reading.view.shape)

    def measure(
        self, reference: ReferenceGraph, tensors: Tensors, whole: torch.Tensor
    ) -> Beside | None:
        """
        Run what a stack of samples is held against.

        Args:
            reference: The torch graph.
            tensors: Of the file.
            whole: What the float model gives at the last node, samples in a row.

        Returns:
            What is to be summed up; None of a tensor that is its source's in another way.
        """
        index = self.match.tensor
        handed_on = self._is_handed_on(tensors, whole)
        tensors.met[index] = Met(self.reading.view, whole)
        if handed_on:
            return None
        quantized = self._run(reference, tensors, quantized=True)
        floats = quantized
        if self.differs or self.hybrid is not None or self.spacing:
            floats = self._run(reference, tensors, quantized=False)
        made = tensors.at(index, self.reading, last=in_channels_last(floats))
        told = self._told(tensors, floats, whole)
        known = self.measured.local_lsb
        return Beside(made, floats, quantized, whole, self.limits, known, self.own, told)

    def judge(
        self,
        beside: Beside | None,
        sums: Sums | None,
        reference: ReferenceGraph,
        tensors: Tensors,
    ) -> None:
        """
        Take a stack of samples in.

        Args:
            beside: What `measure` gave.
            sums: Of it.
            reference: The torch graph.
            tensors: Of the file, with those that the step takes.
        """
        index = self.match.tensor
        met = tensors.met[index]
        if beside is None or sums is None:
            source = tensors.met[self.sources[0].tensor]
            met.ends = source.ends
            if self.border and self.limits is not None:
                met.ends = self._ends(tensors, self.limits)
            met.sums = self._handed_sums(source.sums, met.ends)
            if self.limits is None:
                tensors.keep_peak(index, met.sums.own_peak)
            self.measured.add(self.elements * tensors.count, met.sums, met.ends, self.limits)
            beyond = -1.0 if self.limits is None else -0.5 - self._bound
            self.measured.excess_lsb = max(self.measured.excess_lsb, beyond)
            return
        met.sums = sums
        made = beside.made
        if not math.isfinite(sums.noise):
            # What masks is infinite in torch, too.
            told = torch.isfinite(made) | (made == beside.quantized)
            self.measured.nonfinite += int(made.numel() - told.sum())
        if self.limits is not None and made.numel():
            met.ends = ends = self._ends(tensors, self.limits)
            sums.own_least, sums.own_greatest = map(self.limits.value, ends[:2])
        self.measured.add(self.elements * tensors.count, sums, met.ends, self.limits)
        if self.limits is None:
            tensors.keep_peak(index, sums.own_peak)
            self._judge_floats(sums, made, beside.quantized, reference, tensors)
        else:
            self._judge_codes(sums, reference, tensors)

    def _is_handed_on(self, tensors: Tensors, whole: torch.Tensor) -> bool:
        """
        Whether a tensor holds its source's values in another way, one by one, or padded by zeros.

        All that is known of the source beside the float model is known of it, too, then, and there
        is nothing else to be off.
        """
        if self.handed_on is None:
            return False
        (source,) = self.sources
        met = tensors.met.get(source.tensor)
        if met is None or met.view != self.handed_on.view:
            return False
        if met.whole is not whole and not self.border:
            return False
        index = self.match.tensor
        theirs = tensors.codes_at(source.tensor, self.handed_on.view)
        ours = tensors.codes_at(index, self.reading.view)
        if ours.ndim == 4 and (in_channels_last(theirs) or in_channels_last(ours)):
            # To turn codes and to hold them in order takes half as long as out of order.
            theirs = tensors.codes_at(source.tensor, self.handed_on.view, last=True)
            ours = tensors.codes_at(index, self.reading.view, last=True)
        if self.border:
            zero = 0 if self.limits is None else self.limits.zero_point
            theirs = torch.constant_pad_nd(theirs, self.border, zero)
        if not np.array_equal(ours.numpy(), theirs.numpy()):
            return False
        if self.limits is None and not np.isfinite(ours.numpy()).all():
            return False
        value = tensors.at(source.tensor, self.handed_on)
        if self.border:
            value = plainly_strided(torch.constant_pad_nd(value, self.border))
        tensors.place(index, self.reading.node, value)
        return True

    def _handed_sums(self, sums: Sums | None, ends: Ends | None) -> Sums:
        """What is known of values that the source has as well."""
        assert sums is not None, "sources are judged before what is made from them"
        shape = self.reading.view.shape
        least, greatest = math.inf, -math.inf
        if ends is not None and self.limits is not None:
            least, greatest = map(self.limits.value, ends[:2])
        return Sums(
            channels=np.zeros(shape[1]) if len(shape) > 1 else None,
            signal=sums.own_signal,
            least=least,
            greatest=greatest,
            own_signal=sums.own_signal,
            apart_noise=sums.apart_noise,
            apart_signal=sums.apart_signal,
            apart=sums.apart,
            own_least=sums.own_least,
            own_greatest=sums.own_greatest,
        )

    def _told(self, tensors: Tensors, floats: torch.Tensor, whole: torch.Tensor) -> Sums | None:
        """What is known of the source, where that is what it is held against."""
        if self.nodes or len(self.taken) != 1:
            return None
        ((index, readings),) = self.taken
        met = tensors.met.get(index)
        if met is None or met.whole is not whole or floats is not tensors.at(index, readings[-1]):
            return None
        return met.sums

    def _ends(self, tensors: Tensors, limits: Codes) -> Ends:
        return ends_of(tensors.read(self.match.tensor, codes=True).numpy(), limits)

    @property
    def _bound(self) -> float:
        return math.inf if self.bound is None else self.bound

    def _run(
        self,
        reference: ReferenceGraph,
        tensors: Tensors,
        *,
        quantized: bool,
        double: bool = False,
    ) -> torch.Tensor:
        values: dict[Node, torch.Tensor] = {}
        shapes: dict[Node, tuple[int, ...]] = {}
        hybrid = self.hybrid if quantized else None
        for index, readings in self.taken:
            seen = None
            if double or hybrid is not None:
                seen = tensors.read(index, double=double)
                if hybrid is not None and seen.is_floating_point():
                    met = tensors.met.get(index)
                    sums = None if met is None else met.sums
                    ends = None if sums is None else (sums.own_least, sums.own_greatest)
                    rounded, halves = hybrid.input.look(seen.numpy(), ends)
                    seen = torch.from_numpy(rounded)
                    tensors.met[self.match.tensor].halves[index] = halves
            for reading in readings:
                if seen is None:
                    value = tensors.at(index, reading)
                else:
                    value = plainly_strided(reading.view.read_together(seen))
                values[reading.node] = self._typed(reading.node, value, double=double)
                shapes[reading.node] = reading.view.shape
        routine, node = self._routine(reference, values, quantized=quantized, double=double)
        if node in values:
            result = values[node]
        elif tensors.count == 1:
            one = (v if shapes[each] else v.reshape(()) for each, v in values.items())
            (result,) = routine.run(*one)
            result = result if result.ndim else result.reshape(1)
        else:
            stacked = (v.reshape(tensors.count, *shapes[each]) for each, v in values.items())
            (result,) = map(in_a_row, routine.run_together(*stacked))
        if quantized and self.spacing:
            low, high = tensors.ends(self.match.tensor, self.reading)
            each = result.reshape(tensors.count, *self.reading.view.shape)
            result = in_a_row(each.clamp(low, high))
        return result

    def _typed(self, node: Node, value: torch.Tensor, *, double: bool) -> torch.Tensor:
        """`typed`, which is looked up once."""
        dtype = self.dtypes.get((node, double))
        if dtype is None:
            dtype = self.dtypes[node, double] = typed(node, value, double=double).dtype
        return value if value.dtype is dtype else value.to(dtype)

    def _routine(
        self,
        reference: ReferenceGraph,
        taken: Iterable[Node],
        *,
        quantized: bool,
        double: bool,
    ) -> tuple[Routine, Node]:
        """What is run, looked up once, and the node that has the value at last."""
        key = (quantized, double)
        if key not in self.routines:
            given = {*taken, *self.nodes}
            # What is kept here others read, who are no inference.
            with torch.inference_mode(mode=False), torch.no_grad():
                calls, held = straightened(
                    (
                        reference.call(
                            node, given, quantized=quantized, double=double, weights=self.weights
                        )
                        for node in self.nodes
                    ),
                    [self.reading.node],
                )
            last = held.get(self.reading.node, self.reading.node)
            self.routines[key] = Routine(list(taken), calls, [last]), last
        return self.routines[key]

    def _judge_codes(self, sums: Sums, reference: ReferenceGraph, tensors: Tensors) -> None:
        assert self.limits is not None, "floats are judged otherwise"
        measured = self.measured
        off, steps = sums.off, sums.steps
        if off - 0.5 - self._bound > 0:
            # torch's own float32 rounding is a part of it: tell by float64.
            low, high, scale, zero_point = self.limits
            exact = self._run(reference, tensors, quantized=True, double=True)
            exact = (exact.double() / scale + zero_point).clamp(low, high)
            codes = tensors.codes_at(self.match.tensor, self.reading.view)
            off = _greatest(exact - codes)
            # Nearer than halfway rounds to the code itself.
            steps = _greatest(exact.round() - codes) if off >= 0.5 else 0.0
        measured.excess_lsb = max(measured.excess_lsb, off - 0.5 - self._bound)
        measured.local_lsb = max(measured.local_lsb, steps)

    def _judge_floats(
        self,
        sums: Sums,
        made: torch.Tensor,
        quantized: torch.Tensor,
        reference: ReferenceGraph,
        tensors: Tensors,
    ) -> None:
        measured = self.measured
        if self.bound is None:
            return
        taken = [tensors.peak(source.tensor) for source in self.sources]
        size = max([sums.peak, self.reach, *taken]) if quantized.numel() else 0.0
        # torch rounds as much as the kernel does.
        allowed, worst = 2 * self.bound * size + self.spacing, sums.off
        if not (made.is_floating_point() or made.dtype == torch.bool):
            # Whole numbers may be larger than those that float32 holds.
            worst = _greatest(made - quantized)
            if worst and self._are_ranks():
                worst = self._apart_in_value(made, quantized, tensors, worst)
        if worst > allowed:
            rounding = self.bound * size
            tied = 0.0
            if self.hybrid is not None:
                allowed += (self.hybrid.exact_bound - 2 * self.hybrid.bound) * size
                tied = self._tied(tensors)
            # Whatever torch's own rounding is, ties are a part of it, and they explain it: there
            # is nothing that float64 would tell.
            if not (allowed <= rounding and worst + rounding <= allowed + tied):
                exact = self._run(reference, tensors, quantized=True, double=True)
                worst = _greatest(made.double() - exact.double())
            if worst > allowed:
                allowed += tied
        beyond = worst / allowed - 1 if allowed else (math.inf if worst else -1.0)
        measured.excess_lsb = max(measured.excess_lsb, beyond)

    def _are_ranks(self) -> bool:
        """Whether it holds the places of the greatest values along the last axis."""
        if self.op.name != "TOPK_V2" or {base_name(n) for n in self.nodes} != {"topk", "getitem"}:
            return False
        (largest,) = (node for node in self.nodes if base_name(node) == "topk")
        return largest.args[2:] in ((), (-1,))

    def _apart_in_value(
        self, made: torch.Tensor, wanted: torch.Tensor, tensors: Tensors, apart: float
    ) -> float:
        """
        Which of equal values comes first is no error: torch leaves it open, and codes are often so.

        Args:
            made: Places that the file gives.
            wanted: Those that torch gives.
            tensors: Of the file.
            apart: How far they are apart as numbers, which is given where one is there twice.
        """
        ((index, readings),) = self.taken
        given = tensors.at(index, readings[-1])
        if (made.sort(-1).values.diff() == 0).any():
            return apart
        chosen, other = (given.gather(-1, each.to(torch.int64)) for each in (made, wanted))
        return _greatest(chosen - other)

    def _tied(self, tensors: Tensors) -> float:
        """What inputs halfway between two codes of the kernel may change in a result."""
        assert self.hybrid is not None, "others quantize no input"
        halves = tensors.met[self.match.tensor].halves
        ties = (
            self.hybrid.input.ties(tensors.read(index).numpy(), each)
            for index, each in halves.items()
        )
        return sum(ties) * self.hybrid.greatest_weight


def _greatest(value: torch.Tensor) -> float:
    """Greatest magnitude; what is not finite is beyond every bound."""
    if not value.numel():
        return 0.0
    least, greatest = torch.aminmax(value)
    peak = max(-float(least), float(greatest))
    return peak if math.isfinite(peak) else math.inf
