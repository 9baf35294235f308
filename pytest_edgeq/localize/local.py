"""Measure every op of a file on the values that it really took."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pytest_edgeq.localize.biases import SAME_SCALE, written_scale
from pytest_edgeq.localize.kernels import (
    HybridInput,
    float_bound,
    hybrid_position,
    rounding_bound,
)
from pytest_edgeq.localize.match import Match, Reading, code_limits, typed
from pytest_edgeq.localize.reference import Call, ReferenceGraph, laid_out
from pytest_edgeq.localize.stored import read_constant
from pytest_edgeq.localize.sums import Beside, Codes, Sums, in_channels_last
from pytest_edgeq.localize.tensors import Met, Tensors, plainly_strided
from pytest_edgeq.tflite.graph import Op, OpGraph, Tensor
from pytest_edgeq.tflite.roles import roles_of

__all__ = ["Measured", "Step", "make_steps"]

Node = torch.fx.Node

# Of an op whose kernel's arithmetic is not known here: one more rounding, of ½ LSB.
_UNKNOWN = 0.5


@dataclass(slots=True, eq=False)
class Measured:
    """
    What was measured of one op over all samples.

    Attributes:
        local_lsb: Greatest |code of the re-run reference − code of the file|.
        excess_lsb: Greatest distance of the unrounded reference from the code, beyond ½ LSB and the
            kernel's own bound. Of a float op: of the two values, beyond the bound, in units of it.
        signal: Sum of the squares of the float reference on the op's own inputs.
        noise: Sum of the squared differences from it.
        cumulative_lsb: Greatest difference from the float model, in LSB.
        cumulative_signal: Sum of the squares of the float model's values.
        cumulative_noise: Sum of the squared differences from them.
        elements: How many values were measured.
        low: How many codes are the least there is.
        high: How many are the greatest.
        beyond_low: How many of the float reference's values lie below what codes reach.
        beyond_high: How many lie above.
        smallest: The least value of the float reference.
        largest: The greatest.
        least: The least code met.
        greatest: The greatest code met.
        nonfinite: How many of the file's values are not finite.
        channel_noise: `noise` by channel, the node's second axis.
    """

    local_lsb: float = 0.0
    excess_lsb: float = -math.inf
    signal: float = 0.0
    noise: float = 0.0
    cumulative_lsb: float = 0.0
    cumulative_signal: float = 0.0
    cumulative_noise: float = 0.0
    elements: int = 0
    low: int = 0
    high: int = 0
    beyond_low: int = 0
    beyond_high: int = 0
    smallest: float = math.inf
    largest: float = -math.inf
    least: float = math.inf
    greatest: float = -math.inf
    nonfinite: int = 0
    channel_noise: npt.NDArray[np.float64] | None = None


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
        done: The tensors that no step behind this one asks for.
        calls: What is run, with its constants: as quantized or not, in float64 or not.
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
    done: tuple[int, ...] = ()
    calls: dict[tuple[bool, bool], list[Call]] = field(default_factory=dict)
    measured: Measured = field(default_factory=Measured)

    def measure(
        self, reference: ReferenceGraph, tensors: Tensors, whole: torch.Tensor
    ) -> Beside | None:
        """
        Run what one sample is held against.

        Args:
            reference: The torch graph.
            tensors: Of the file.
            whole: What the float model gives at the last node.

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
        if self.differs or self.hybrid is not None:
            floats = self._run(reference, tensors, quantized=False)
        made = tensors.at(index, self.reading, last=in_channels_last(floats))
        return Beside(made, floats, quantized, whole, self.limits, self.measured.local_lsb)

    def judge(
        self,
        beside: Beside | None,
        sums: Sums | None,
        reference: ReferenceGraph,
        tensors: Tensors,
    ) -> None:
        """
        Take one sample in.

        Args:
            beside: What `measure` gave.
            sums: Of it.
            reference: The torch graph.
            tensors: Of the file, with those that the step takes.
        """
        index = self.match.tensor
        met = tensors.met[index]
        if beside is None or sums is None:
            met.sums = self._handed_sums(tensors)
            self._add(met, tensors.at(index, self.reading).numel())
            beyond = -1.0 if self.limits is None else -0.5 - self._bound
            self.measured.excess_lsb = max(self.measured.excess_lsb, beyond)
            return
        met.sums = sums
        made = beside.made
        if not math.isfinite(sums.noise):
            self.measured.nonfinite += int(made.numel() - torch.isfinite(made).sum())
        self._add(met, made.numel())
        if self.limits is None:
            self._judge_floats(sums, made, beside.quantized, reference, tensors)
        else:
            self._judge_codes(sums, reference, tensors)

    def _is_handed_on(self, tensors: Tensors, whole: torch.Tensor) -> bool:
        """
        Whether a tensor holds its source's values in another way, one by one.

        All that is known of the source beside the float model is known of it, too, then, and there
        is nothing else to be off.
        """
        if self.handed_on is None:
            return False
        (source,) = self.sources
        met = tensors.met.get(source.tensor)
        if met is None or met.whole is not whole or met.view != self.handed_on.view:
            return False
        index = self.match.tensor
        theirs = self.handed_on.view.read(tensors.read(source.tensor, codes=True))
        ours = self.reading.view.read(tensors.read(index, codes=True))
        if in_channels_last(theirs) and ours.ndim == 4:
            # To turn codes and to hold them in order takes half as long as out of order.
            ours = ours.contiguous(memory_format=torch.channels_last)
        if not (ours.numpy() == theirs.numpy()).all():
            return False
        if self.limits is None and not np.isfinite(ours.numpy()).all():
            return False
        tensors.place(index, self.reading.node, tensors.at(source.tensor, self.handed_on))
        return True

    def _handed_sums(self, tensors: Tensors) -> Sums:
        source = tensors.met[self.sources[0].tensor]
        value = tensors.at(self.match.tensor, self.reading)
        return replace(
            source.sums,
            noise=0.0,
            channels=np.zeros(value.shape[1]) if value.ndim > 1 else None,
            signal=source.sums.own_signal,
            least=source.sums.lowest,
            greatest=source.sums.highest,
            below=0,
            above=0,
        )

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
        values: dict[Node, Any] = {}
        for index, readings in self.taken:
            seen = None
            if double or (self.hybrid is not None and quantized):
                seen = tensors.read(index, double=double)
                if self.hybrid is not None and quantized and seen.is_floating_point():
                    seen = torch.from_numpy(self.hybrid.input.seen(seen.numpy()))
            for reading in readings:
                if seen is None:
                    value = tensors.at(index, reading)
                else:
                    value = plainly_strided(reading.view.read(seen))
                values[reading.node] = typed(reading.node, value, double=double)
        if (quantized, double) not in self.calls:
            given = {*values, *self.nodes}
            self.calls[quantized, double] = [
                reference.call(
                    node, given, quantized=quantized, double=double, weights=self.weights
                )
                for node in self.nodes
            ]
        for call in self.calls[quantized, double]:
            values[call.node] = call.run(values)
        result: torch.Tensor = values[self.reading.node]
        return result

    def _add(self, met: Met, elements: int) -> None:
        measured, sums = self.measured, met.sums
        measured.elements += elements
        measured.noise += sums.noise
        measured.signal += sums.signal
        measured.cumulative_noise += sums.apart_noise
        measured.cumulative_signal += sums.apart_signal
        if sums.channels is not None:
            known = measured.channel_noise
            if known is not None and known.shape == sums.channels.shape:
                sums.channels += known
            measured.channel_noise = sums.channels
        if self.limits is None or not elements:
            return
        scale, zero_point = self.limits.scale, self.limits.zero_point
        apart = sums.apart / scale
        measured.cumulative_lsb = max(measured.cumulative_lsb, apart)
        measured.smallest = min(measured.smallest, sums.least)
        measured.largest = max(measured.largest, sums.greatest)
        measured.beyond_low += sums.below
        measured.beyond_high += sums.above
        lowest, highest = sums.lowest / scale, sums.highest / scale
        # A scale may be so wrong that float32 does not hold what codes stand for.
        if math.isfinite(lowest) and math.isfinite(highest):
            measured.least = min(measured.least, round(lowest) + zero_point)
            measured.greatest = max(measured.greatest, round(highest) + zero_point)
        measured.low += sums.low
        measured.high += sums.high

    def _judge_codes(self, sums: Sums, reference: ReferenceGraph, tensors: Tensors) -> None:
        assert self.limits is not None, "floats are judged otherwise"
        measured = self.measured
        off, steps = sums.off, sums.steps
        if off - 0.5 - self._bound > 0:
            # torch's own float32 rounding is a part of it: tell by float64.
            low, high, scale, zero_point = self.limits
            exact = self._run(reference, tensors, quantized=True, double=True)
            exact = (exact.double() / scale + zero_point).clamp(low, high)
            codes = self.reading.view.read(tensors.read(self.match.tensor, codes=True))
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
        size = max([sums.peak, *taken]) if quantized.numel() else 0.0
        # torch rounds as much as the kernel does.
        allowed, worst = 2 * self.bound * size, sums.off
        if not (made.is_floating_point() or made.dtype == torch.bool):
            # Whole numbers may be larger than those that float32 holds.
            worst = _greatest(made - quantized)
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

    def _tied(self, tensors: Tensors) -> float:
        """What inputs halfway between two codes of the kernel may change in a result."""
        assert self.hybrid is not None, "others quantize no input"
        taken = (tensors.read(source.tensor).numpy() for source in self.sources)
        return sum(map(self.hybrid.input.ties, taken)) * self.hybrid.greatest_weight


def make_steps(
    graph: OpGraph,
    matches: dict[int, Match],
    reference: ReferenceGraph,
    weights_of: Callable[[Op, Iterable[Node]], Mapping[Node, torch.Tensor]],
) -> list[Step]:
    """Everything that is measured, in the order of the file."""
    steps = []
    for match in matches.values():
        op = match.op
        if op is None:
            continue
        subgraph = graph.subgraphs[op.subgraph]
        tensor = subgraph.tensors[match.tensor]
        limits = _limits(tensor)
        sources = tuple(matches[index] for index in match.sources)
        given = {reading.node for source in sources for reading in source.readings}
        reading = match.last
        if match.same is not None:
            reading = [each for each in match.readings if each.node in given][-1]
        nodes = reference.between(reading.node, given)
        made_by = [subgraph.ops[index] for index in match.ops]
        bound = _bound(graph, made_by, op, match.tensor, limits is not None)
        rounds = (each for each in made_by if hybrid_position(graph, each) is not None)
        hybrid = next((_hybrid(graph, each) for each in rounds), None)
        weights: dict[Node, torch.Tensor] = {}
        for each in made_by:
            for node, weight in weights_of(each, given).items():
                weights.setdefault(node, weight)
        used = {each for node in nodes for each in node.all_input_nodes}
        taken = tuple(
            (source.tensor, tuple(r for r in source.readings if r.node in {*used, reading.node}))
            for source in sources
        )
        weights = {node: laid_out(node, weight) for node, weight in weights.items() if node in used}
        rounded = (node for node in used if not reference.varies(node))
        differs = bool(weights) or any(map(reference.is_rounded, rounded))
        handed_on = None
        if not nodes and hybrid is None and len(sources) == 1:
            handed_on = _handed_on(tensor, subgraph.tensors[sources[0].tensor], taken[0][1])
        steps.append(
            Step(
                match,
                reading,
                op,
                nodes,
                differs,
                hybrid,
                bound,
                limits,
                sources,
                taken,
                weights,
                handed_on,
            )
        )
    steps.sort(key=lambda step: (step.op.index, step.match.tensor))
    asked_for: set[int] = set()
    for step in reversed(steps):
        last = {step.match.tensor, *(source.tensor for source in step.sources)} - asked_for
        step.done = tuple(last)
        asked_for |= last
    return steps


def _limits(tensor: Tensor) -> Codes | None:
    limits = code_limits(tensor)
    return None if limits is None else Codes(*limits)


def _handed_on(tensor: Tensor, source: Tensor, readings: Sequence[Reading]) -> Reading | None:
    """How the source is read, where the tensor may hold the same codes with the same meaning."""
    alike = tensor.dtype == source.dtype and code_limits(tensor) == code_limits(source)
    return readings[0] if alike and len(readings) == 1 else None


def _hybrid(graph: OpGraph, op: Op) -> Hybrid:
    stored = [each for each in roles_of(graph, op).weights if each.tensor.is_constant]
    peaks = [float(np.abs(read_constant(graph, op, each).floats).max()) for each in stored]
    return Hybrid(
        HybridInput(graph, op),
        float_bound(graph, op),
        float_bound(graph, op, exact=True),
        max(peaks, default=math.inf),
    )


def _bound(
    graph: OpGraph, made_by: Sequence[Op], op: Op, tensor: int, has_codes: bool
) -> float | None:
    if not has_codes:
        return sum(float_bound(graph, each) for each in made_by)
    # What rounds between is carried on by what follows, by factors that are not known here.
    for each in made_by[:-1]:
        if graph.tensor(each, each.outputs[0]).is_quantized and rounding_bound(graph, each) != 0:
            return None
    bound = rounding_bound(graph, op, output=op.outputs.index(tensor))
    if bound is None:
        return _UNKNOWN
    return bound + sum(_bias_slack(graph, each) for each in made_by)


def _bias_slack(graph: OpGraph, op: Op) -> float:
    """
    What it moves an output, in LSB, that a bias was written by another input scale.

    Told of by `findings` where it is more than observers differ.
    """
    scales, made = written_scale(graph, op), graph.tensor(op, op.outputs[0])
    if scales is None or len(made.scales) != 1:
        return 0.0
    apart = abs(scales[0] / scales[1] - 1)
    if not 0 < apart <= SAME_SCALE:
        return 0.0
    (stored,) = (each for each in roles_of(graph, op).biases if each.tensor.is_constant)
    bias = read_constant(graph, op, stored).floats
    return float(np.abs(bias).max(initial=0.0)) * apart / float(made.scales[0])


def _greatest(value: torch.Tensor) -> float:
    """Greatest magnitude; what is not finite is beyond every bound."""
    if not value.numel():
        return 0.0
    least, greatest = torch.aminmax(value)
    peak = max(-float(least), float(greatest))
    return peak if math.isfinite(peak) else math.inf
