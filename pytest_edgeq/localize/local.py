"""Measure every op of a file on the values that it really took."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pytest_edgeq.localize.biases import SAME_SCALE, written_scale
from pytest_edgeq.localize.codes import code_limits
from pytest_edgeq.localize.kernels import (
    HybridInput,
    float_bound,
    hybrid_position,
    rounding_bound,
)
from pytest_edgeq.localize.kinds import base_name
from pytest_edgeq.localize.matches import Match, Reading, typed
from pytest_edgeq.localize.reference import Call, ReferenceGraph, laid_out, straightened
from pytest_edgeq.localize.scales import is_shared
from pytest_edgeq.localize.stored import read_constant
from pytest_edgeq.localize.sums import Beside, Codes, Sums, ends_of, in_channels_last
from pytest_edgeq.localize.tensors import Met, Tensors, plainly_strided
from pytest_edgeq.tflite.graph import Op, OpGraph, Tensor
from pytest_edgeq.tflite.roles import StoredTensor, roles_of

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
        nonfinite: How many of the file's values are not finite, and not so in torch.
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

    @property
    def rms(self) -> float:
        """Root mean square of the differences from the float reference; 0 without elements."""
        return math.sqrt(self.noise / max(self.elements, 1))


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
        spacing: Half of the greatest scale of a tensor with one a channel, which is read as floats.
        done: The tensors that no step behind this one asks for.
        calls: What is run, with its constants, and the node that has the value at last: as
            quantized or not, in float64 or not.
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
    spacing: float = 0.0
    done: tuple[int, ...] = ()
    calls: dict[tuple[bool, bool], tuple[list[Call], Node]] = field(default_factory=dict)
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
        if self.differs or self.hybrid is not None or self.spacing:
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
            source = tensors.met[self.sources[0].tensor]
            met.sums, met.ends = self._handed_sums(source), source.ends
            if self.limits is None:
                tensors.keep_peak(index, met.sums.own_peak)
            self._add(met, math.prod(self.reading.view.shape))
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
            met.ends = ends_of(tensors.read(index, codes=True).numpy(), self.limits)
        self._add(met, made.numel())
        if self.limits is None:
            tensors.keep_peak(index, sums.own_peak)
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
        theirs = tensors.codes_at(source.tensor, self.handed_on.view)
        ours = tensors.codes_at(index, self.reading.view)
        if ours.ndim == 4 and (in_channels_last(theirs) or in_channels_last(ours)):
            # To turn codes and to hold them in order takes half as long as out of order.
            theirs = tensors.codes_at(source.tensor, self.handed_on.view, last=True)
            ours = tensors.codes_at(index, self.reading.view, last=True)
        if not (ours.numpy() == theirs.numpy()).all():
            return False
        if self.limits is None and not np.isfinite(ours.numpy()).all():
            return False
        tensors.place(index, self.reading.node, tensors.at(source.tensor, self.handed_on))
        return True

    def _handed_sums(self, source: Met) -> Sums:
        shape = self.reading.view.shape
        least, greatest = math.inf, -math.inf
        if source.ends is not None and self.limits is not None:
            least, greatest = map(self.limits.value, source.ends[:2])
        sums = source.sums
        return Sums(
            channels=np.zeros(shape[1]) if len(shape) > 1 else None,
            signal=sums.own_signal,
            least=least,
            greatest=greatest,
            own_signal=sums.own_signal,
            apart_noise=sums.apart_noise,
            apart_signal=sums.apart_signal,
            apart=sums.apart,
            own_peak=sums.own_peak,
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
        hybrid = self.hybrid if quantized else None
        for index, readings in self.taken:
            seen = None
            if double or hybrid is not None:
                seen = tensors.read(index, double=double)
                if hybrid is not None and seen.is_floating_point():
                    rounded, halves = hybrid.input.look(seen.numpy())
                    seen = torch.from_numpy(rounded)
                    tensors.met[self.match.tensor].halves[index] = halves
            for reading in readings:
                if seen is None:
                    value = tensors.at(index, reading)
                else:
                    value = plainly_strided(reading.view.read(seen))
                values[reading.node] = typed(reading.node, value, double=double)
        calls, node = self._calls(reference, quantized=quantized, double=double)
        for call in calls:
            values[call.node] = call.run(values)
        result: torch.Tensor = values[node]
        if quantized and self.spacing:
            result = result.clamp(*tensors.ends(self.match.tensor, self.reading))
        return result

    def _calls(
        self, reference: ReferenceGraph, *, quantized: bool, double: bool
    ) -> tuple[list[Call], Node]:
        """What is run, looked up once, and the node that has the value at last."""
        key = (quantized, double)
        if key not in self.calls:
            given = {reading.node for _, readings in self.taken for reading in readings}
            given.update(self.nodes)
            # What is kept here others read, who are no inference.
            with torch.inference_mode(mode=False), torch.no_grad():
                calls, held = straightened(
                    reference.call(
                        node, given, quantized=quantized, double=double, weights=self.weights
                    )
                    for node in self.nodes
                )
            self.calls[key] = calls, held.get(self.reading.node, self.reading.node)
        return self.calls[key]

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
        ends = met.ends
        if self.limits is None or ends is None:
            return
        measured.cumulative_lsb = max(measured.cumulative_lsb, sums.apart / self.limits.scale)
        measured.smallest = min(measured.smallest, sums.least)
        measured.largest = max(measured.largest, sums.greatest)
        measured.beyond_low += sums.below
        measured.beyond_high += sums.above
        measured.least = min(measured.least, ends.least)
        measured.greatest = max(measured.greatest, ends.greatest)
        measured.low += ends.low
        measured.high += ends.high

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
        allowed, worst = 2 * self.bound * size + self.spacing, sums.off
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
        halves = tensors.met[self.match.tensor].halves
        ties = (
            self.hybrid.input.ties(tensors.read(index).numpy(), each)
            for index, each in halves.items()
        )
        return sum(ties) * self.hybrid.greatest_weight


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
        if bound is not None and limits is not None and len(made_by) == 1:
            bound += _number_slack(graph, op, nodes)
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
                float(tensor.scales.max()) / 2 if len(tensor.scales) > 1 else 0.0,
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

    Told of by `findings` where it is more than observers differ, and costs a bit.
    """
    scales, made = written_scale(graph, op), graph.tensor(op, op.outputs[0])
    if scales is None or len(made.scales) != 1:
        return 0.0
    apart = abs(scales[0] / scales[1] - 1)
    if not apart or (apart > SAME_SCALE and not is_shared(graph, op)):
        return 0.0
    (stored,) = (each for each in roles_of(graph, op).biases if each.tensor.is_constant)
    bias = read_constant(graph, op, stored).floats
    return float(np.abs(bias).max(initial=0.0)) * apart / float(made.scales[0])


def _number_slack(graph: OpGraph, op: Op, nodes: Sequence[Node]) -> float:
    """
    What it moves an output, in LSB, that a number in torch's code is a code in the file.

    Constants that are tensors in torch are rounded for it as the file rounds them.
    """
    numbers = [(base_name(n), n.args[1]) for n in nodes if base_name(n) in _BY_NUMBERS]
    operands = [graph.tensor(op, index) for index in op.inputs[:2]]
    held = [each for each in operands if each.is_constant and math.prod(each.shape) == 1]
    taken = [code_limits(each) for each in operands if not each.is_constant]
    if op.name not in _TAKES_NUMBERS or len(numbers) != 1 or len(held) != 1 or not taken:
        return 0.0
    (name, number), limits = numbers[0], taken[0]
    if not isinstance(number, (int, float)) or not number or limits is None:
        return 0.0
    stored = read_constant(graph, op, StoredTensor(held[0], False, held[0]))
    wanted = 1 / number if name.startswith("div") and op.name == "MUL" else number
    # Signs are the op's: SUB takes off what torch adds the negative of.
    apart = abs(abs(float(stored.floats.flat[0])) - abs(wanted))
    if stored.scales is None or not apart <= float(stored.scales.max()) * (0.5 + 2.0**-10):
        return 0.0
    low, high, scale, point = limits
    reach = max(high - point, point - low) * scale if op.name == "MUL" else 1.0
    return apart * reach / float(graph.tensor(op, op.outputs[0]).scales[0])


_BY_NUMBERS = {"add", "add_", "sub", "sub_", "rsub", "mul", "mul_", "div", "div_"}
_TAKES_NUMBERS = ("ADD", "SUB", "MUL")


def _greatest(value: torch.Tensor) -> float:
    """Greatest magnitude; what is not finite is beyond every bound."""
    if not value.numel():
        return 0.0
    least, greatest = torch.aminmax(value)
    peak = max(-float(least), float(greatest))
    return peak if math.isfinite(peak) else math.inf
