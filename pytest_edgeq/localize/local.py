"""Measure every op of a file on the values that it really took."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from pytest_edgeq.localize.constants import (
    INPUT_AT,
    SAME_SCALE,
    input_scale_of,
    read_constant,
)
from pytest_edgeq.localize.kernels import float_bound, hybrid_input, hybrid_ties, rounding_bound
from pytest_edgeq.localize.match import Match, Reading, code_limits, typed
from pytest_edgeq.localize.reference import ReferenceGraph, laid_out
from pytest_edgeq.numerics.health import CLIPPED_LSB
from pytest_edgeq.tflite.graph import Op, OpGraph
from pytest_edgeq.tflite.roles import roles_of

__all__ = ["Measured", "Step", "make_steps"]

Node = torch.fx.Node
Read = Callable[..., torch.Tensor]

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
    channel_noise: torch.Tensor | None = None


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
        limits: Least and greatest code, scale and zero point; None where it has no scale.
        sources: The matches of what it was made from.
        taken: By source, those of its nodes that are taken.
        weights: Quantized parameters, where the reference has none.
    """

    match: Match
    reading: Reading
    op: Op
    nodes: list[Node]
    differs: bool
    hybrid: Op | None
    bound: float | None
    limits: tuple[int, int, float, int] | None
    sources: tuple[Match, ...]
    taken: tuple[tuple[int, tuple[Reading, ...]], ...]
    weights: Mapping[Node, torch.Tensor]
    measured: Measured = field(default_factory=Measured)

    def measure(self, reference: ReferenceGraph, read: Read, graph: OpGraph, whole: Any) -> None:
        """
        Take one sample in.

        Args:
            reference: The torch graph.
            read: `read(index, codes=False, double=False)` gives a tensor of the file.
            graph: The file.
            whole: What the float model gives at the last node.
        """
        made = self._file(read)
        quantized = self._run(reference, read, graph, quantized=True)
        floats = quantized
        if self.differs or self.hybrid is not None:
            floats = self._run(reference, read, graph, quantized=False)
        self._take(made, floats, whole)
        if self.limits is None:
            self._take_float(made, quantized, reference, read, graph)
        else:
            self._take_codes(quantized, reference, read, graph)

    def _file(self, read: Read, *, codes: bool = False) -> torch.Tensor:
        return self.reading.view.read(read(self.match.tensor, codes=codes))

    def _run(
        self,
        reference: ReferenceGraph,
        read: Read,
        graph: OpGraph,
        *,
        quantized: bool,
        double: bool = False,
    ) -> torch.Tensor:
        values: dict[Node, Any] = {}
        for tensor, readings in self.taken:
            taken = read(tensor, double=double)
            if self.hybrid is not None and quantized and taken.is_floating_point():
                seen = hybrid_input(graph, self.hybrid, taken.numpy())
                taken = taken if seen is None else torch.from_numpy(seen)
            for reading in readings:
                values[reading.node] = typed(reading.node, reading.view.read(taken), double=double)
        for node in self.nodes:
            values[node] = reference.compute(
                node, values, quantized=quantized, double=double, weights=self.weights
            )
        result: torch.Tensor = values[self.reading.node]
        return result

    def _take(self, made: torch.Tensor, floats: torch.Tensor, whole: torch.Tensor) -> None:
        measured = self.measured
        made = made.to(torch.float32)
        floats, whole = floats.to(torch.float32), whole.to(torch.float32)
        measured.elements += made.numel()
        noise = self._noise(made - floats)
        if not math.isfinite(noise):
            measured.nonfinite += int(made.numel() - torch.isfinite(made).sum())
        measured.noise += noise
        measured.signal += _squares(floats)
        apart = made - whole
        measured.cumulative_noise += _squares(apart)
        measured.cumulative_signal += _squares(whole)
        if self.limits is not None:
            low, high, scale, zero_point = self.limits
            measured.cumulative_lsb = max(measured.cumulative_lsb, _greatest(apart) / scale)
            least, greatest = _range(floats)
            measured.smallest = min(measured.smallest, least)
            measured.largest = max(measured.largest, greatest)
            # NaN is within no limits. Where all values are, there is nothing to count.
            if not least >= (floor := (low - zero_point - CLIPPED_LSB) * scale):
                measured.beyond_low += int((floats < floor).sum())
            if not greatest <= (ceiling := (high - zero_point + CLIPPED_LSB) * scale):
                measured.beyond_high += int((floats > ceiling).sum())

    def _noise(self, difference: torch.Tensor) -> float:
        """Sum of the squares, kept by channel as well where there are channels."""
        if difference.ndim < 2:
            return _squares(difference)
        axes = [axis for axis in range(difference.ndim) if axis != 1]
        by_channel = difference.double().square_().sum(dim=axes)
        total = _finite(float(by_channel.sum()))
        known = self.measured.channel_noise
        if known is not None and known.shape == by_channel.shape:
            by_channel += known
        self.measured.channel_noise = by_channel
        return total

    def _take_codes(
        self, quantized: torch.Tensor, reference: ReferenceGraph, read: Read, graph: OpGraph
    ) -> None:
        assert self.limits is not None
        measured = self.measured
        low, high, scale, zero_point = self.limits
        stored = read(self.match.tensor, codes=True)
        least, greatest = _range(stored)
        measured.least = min(measured.least, least)
        measured.greatest = max(measured.greatest, greatest)
        if least == low:
            measured.low += int((stored == low).sum())
        if greatest == high:
            measured.high += int((stored == high).sum())
        codes = self.reading.view.read(stored).to(torch.float32)
        exact = (quantized / scale).add_(zero_point).clamp_(low, high)
        bound = math.inf if self.bound is None else self.bound
        off = _greatest(exact - codes)
        if off - 0.5 - bound > 0:
            # torch's own float32 rounding is a part of it: tell by float64.
            exact = self._run(reference, read, graph, quantized=True, double=True)
            exact = (exact.double() / scale + zero_point).clamp(low, high)
            off = _greatest(exact - codes)
        measured.excess_lsb = max(measured.excess_lsb, off - 0.5 - bound)
        # Nearer than halfway rounds to the code itself.
        if off >= 0.5:
            measured.local_lsb = max(measured.local_lsb, _greatest(exact.round() - codes))

    def _take_float(
        self,
        made: torch.Tensor,
        quantized: torch.Tensor,
        reference: ReferenceGraph,
        read: Read,
        graph: OpGraph,
    ) -> None:
        measured = self.measured
        if self.bound is None:
            return
        taken = [_peak(read(source.tensor)) for source in self.sources]
        size = max([_peak(quantized), *taken]) if quantized.numel() else 0.0
        if made.dtype == torch.bool:
            # Truth values have no difference in torch.
            made, quantized = made.to(torch.float32), quantized.to(torch.float32)
        # torch rounds as much as the kernel does.
        allowed, worst = 2 * self.bound * size, _greatest(made - quantized)
        if worst > allowed:
            exact = self._run(reference, read, graph, quantized=True, double=True)
            worst = _greatest(made.double() - exact.double())
            if self.hybrid is not None:
                own = float_bound(graph, self.hybrid, exact=True) * size
                allowed += own - 2 * float_bound(graph, self.hybrid) * size
            if worst > allowed and self.hybrid is not None:
                allowed += self._tied(read, graph)
        beyond = worst / allowed - 1 if allowed else (math.inf if worst else -1.0)
        measured.excess_lsb = max(measured.excess_lsb, beyond)

    def _tied(self, read: Read, graph: OpGraph) -> float:
        """What inputs halfway between two codes of the kernel may change in a result."""
        assert self.hybrid is not None
        ties = sum(
            hybrid_ties(graph, self.hybrid, read(source.tensor).numpy()) for source in self.sources
        )
        stored = [each for each in roles_of(graph, self.hybrid).weights if each.tensor.is_constant]
        return ties * max(
            (
                float(np.abs(read_constant(graph, self.hybrid, each).floats).max())
                for each in stored
            ),
            default=math.inf,
        )


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
        limits = code_limits(tensor)
        sources = tuple(matches[index] for index in match.sources)
        given = {reading.node for source in sources for reading in source.readings}
        reading = match.last
        if match.same is not None:
            reading = [each for each in match.readings if each.node in given][-1]
        nodes = reference.between(reading.node, given)
        made_by = [subgraph.ops[index] for index in match.ops]
        bound = _bound(graph, made_by, op, match.tensor, limits is not None)
        hybrid = next((each for each in made_by if _is_hybrid(graph, each)), None)
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
        steps.append(
            Step(match, reading, op, nodes, differs, hybrid, bound, limits, sources, taken, weights)
        )
    return sorted(steps, key=lambda step: (step.op.index, step.match.tensor))


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
    roles = roles_of(graph, op)
    biases = [each for each in roles.biases if each.tensor.is_constant]
    weights = [each for each in roles.weights if each.tensor.is_constant]
    if len(biases) != 1 or len(weights) != 1 or op.name not in INPUT_AT:
        return 0.0
    taken, made = (graph.tensor(op, i) for i in (op.inputs[INPUT_AT[op.name]], op.outputs[0]))
    bias = read_constant(graph, op, biases[0])
    written = input_scale_of(bias, weights[0].tensor.scales)
    if written is None or len(taken.scales) != 1 or len(made.scales) != 1:
        return 0.0
    apart = abs(float(taken.scales[0]) / written - 1)
    if not 0 < apart <= SAME_SCALE:
        return 0.0
    return float(np.abs(bias.floats).max(initial=0.0)) * apart / float(made.scales[0])


def _is_hybrid(graph: OpGraph, op: Op) -> bool:
    from pytest_edgeq.localize.kernels.hybrid import hybrid_position

    return hybrid_position(graph, op) is not None


def _flat(value: torch.Tensor) -> torch.Tensor:
    """The elements in a row; without a copy where channels lie last in memory, too."""
    if value.ndim > 2 and not value.is_contiguous():
        value = value.permute(0, *range(2, value.ndim), 1)
    return value.reshape(-1)


def _range(value: torch.Tensor) -> tuple[float, float]:
    """The least and the greatest."""
    least, greatest = torch.aminmax(_flat(value))
    return float(least), float(greatest)


def _finite(total: float) -> float:
    return total if math.isfinite(total) else math.inf


def _squares(value: torch.Tensor) -> float:
    exact = _flat(value).double()
    return _finite(float(torch.dot(exact, exact)))


def _peak(value: torch.Tensor) -> float:
    """Greatest magnitude, NaN where there is one."""
    least, greatest = _range(value)
    return max(-least, greatest)


def _greatest(value: torch.Tensor) -> float:
    """Greatest magnitude; what is not finite is beyond every bound."""
    return _finite(_peak(value)) if value.numel() else 0.0
