"""
Match the ops of a `.tflite` file to the torch nodes that they stand for.

The file is walked in its order on the values of one sample. What an op takes are tensors that are
matched already, so its own result is looked for among the nodes that can be computed from their
**actual** values: by value up to layout, within what rounding explains. So an error is met where it
is made and nowhere below. An op that is none of them alone waits for those behind it: together they
stand for one node (a normalisation, an attention, a convolution with its padding). Where nothing is
near, because the op is wrong, the kind of op, the module and the shape decide, and the nearest of
what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch.fx.node import map_arg

from pytest_edgeq.localize.alike import Chooser, Near, changes_nothing
from pytest_edgeq.localize.behind import Wholes
from pytest_edgeq.localize.codes import channel_ends, clipped, is_near
from pytest_edgeq.localize.kinds import (
    ACTIVATIONS,
    CLAMPS,
    HEAVY_OPS,
    IDENTITIES,
    TWINS,
    base_name,
    fits,
    is_dequantize,
    is_quantize,
    kin,
)
from pytest_edgeq.localize.matches import Match, Reading, module_of, typed
from pytest_edgeq.localize.reference import (
    Reached,
    ReferenceGraph,
)
from pytest_edgeq.localize.views import View, best_view, distance
from pytest_edgeq.tflite.graph import Op, OpGraph, Tensor
from pytest_edgeq.tflite.roles import stored_constant

__all__ = ["Matcher"]

Node = torch.fx.Node


@dataclass(slots=True)
class _Pending:
    """What an unmatched tensor was made from."""

    sources: tuple[int, ...]
    ops: tuple[int, ...]


@dataclass(slots=True)
class _State:
    matches: dict[int, Match] = field(default_factory=dict)
    pending: dict[int, _Pending] = field(default_factory=dict)


class Matcher:
    """
    Matches one subgraph against one torch graph.

    Attributes:
        broken: Ops whose result has another size than that of the node that they stand for, with a
            sentence; nothing behind them is matched.

    Args:
        graph: The file.
        subgraph: Index of the subgraph.
        reference: The torch graph.
        values: Gives a tensor's value for the sample by its index, as floats.
        inputs: Each input tensor's index with its placeholder and that one's value.
        module_of: The torch module path of an op, None where it cannot be told.
        weights: Gives the weights that an op should compute with, by the constant nodes behind
            the values that it takes.
        starts: Constants of which the file computes others, with the nodes that they stand for.
        computed: What the file computes from constants alone.
    """

    def __init__(
        self,
        graph: OpGraph,
        subgraph: int,
        reference: ReferenceGraph,
        values: Callable[[int], torch.Tensor],
        inputs: Mapping[int, tuple[Node, torch.Tensor]],
        module_of: Callable[[Op], str | None],
        weights: Callable[[Op, Iterable[Node]], Mapping[Node, torch.Tensor]],
        starts: Mapping[int, Mapping[Node, View]] = MappingProxyType({}),
        computed: Container[int] = (),
    ) -> None:
        self._starts = starts
        self._anew = computed
        self._subgraph = graph.subgraphs[subgraph]
        self._reference = reference
        self._values = values
        self._module_of = module_of
        self._weights = weights
        self._chooser = Chooser(self._subgraph, reference, values, module_of)
        self._reached: dict[tuple[tuple[int, ...], int, int], list[Reached]] = {}
        self._wholes = Wholes(self._subgraph, reference, values)
        self._inputs = inputs
        self.broken: dict[int, str] = {}

    def run(self) -> dict[int, Match]:
        """Every matched tensor."""
        state = _State()
        for index, (node, value) in self._inputs.items():
            file = self._values(index)
            turned = _channels_last(file, value) if file.shape != value.shape else []
            found = best_view(file, value.to(torch.float32), turned)
            if found is not None:
                state.matches[index] = self._wholes.of(index, None, [Reading(node, found[1])])
        for index, nodes in self._starts.items():
            wholes = [self._wholes.of(index, None, [Reading(*each)]) for each in nodes.items()]
            readings = {each.node: each for whole in wholes for each in whole.readings}
            ordered = sorted(readings.values(), key=lambda each: self._reference.order(each.node))
            state.matches[index] = Match(index, None, tuple(ordered))
        start, forced = 0, 0
        while True:
            for op in self._subgraph.ops[start:]:
                self._walk(op, state)
            dead = self._dead(state)
            chosen = self._force(dead, state) if forced < _FORCED else None
            if chosen is None:
                return state.matches
            forced += 1
            start = chosen + 1
            for op in self._subgraph.ops[start:]:
                for index in op.outputs:
                    state.matches.pop(index, None)
                    state.pending.pop(index, None)

    def _walk(self, op: Op, state: _State) -> None:
        sources, ops = self._sources(op, state)
        if not sources:
            return
        for index in op.outputs:
            if index < 0:
                continue
            match = None
            if op.name in IDENTITIES:
                match = self._identity(op, index, state)
            if match is None:
                match = self._by_value(op, index, sources, ops, state)
            if match is None and not self._broken_behind(ops):
                match = self._at_once(op, index, _Pending(sources, ops), state)
            if match is not None:
                state.matches[index] = match
            else:
                state.pending[index] = _Pending(sources, ops)

    def _sources(self, op: Op, state: _State) -> tuple[tuple[int, ...], tuple[int, ...]]:
        sources: dict[int, None] = {}
        ops: dict[int, None] = {}
        for index in op.inputs:
            if index in self._starts and op.outputs[0] not in self._anew:
                # A constant as any other one.
                continue
            if index in state.matches:
                sources[index] = None
            elif index in state.pending:
                sources.update(dict.fromkeys(state.pending[index].sources))
                ops.update(dict.fromkeys(state.pending[index].ops))
        ops[op.index] = None
        return tuple(sources), tuple(sorted(ops))

    def _identity(self, op: Op, index: int, state: _State) -> Match | None:
        """Match what holds the same values in another way to the same nodes."""
        taken = [i for i in op.inputs if i in state.matches]
        if len(taken) != 1:
            return None
        before = state.matches[taken[0]]
        file = self._values(index)
        if file.numel() != self._values(taken[0]).numel():
            return None
        # Values that are all alike tell no layout: labels do.
        labels = torch.arange(file.numel()).reshape(self._values(taken[0]).shape)
        moved = self._moved(op, labels).reshape(file.shape)
        given = self._values(taken[0])
        if op.name == "QUANTIZE" and len(self._tensor(index).scales) > 1:
            given = given.clamp(*channel_ends(self._tensor(index)))
        readings = []
        # A constant is not measured: what only holds one is told with what takes that.
        for reading in (each for each in before.readings if self._reference.varies(each.node)):
            value = clipped(self._tensor(index), reading.view.read(given))
            laid_out = best_view(moved, reading.view.read(labels))
            preferred = [laid_out[1]] if laid_out is not None and not laid_out[0] else []
            found = best_view(file, value, preferred)
            if found is None or not is_near(found[0], self._tensor(index), value):
                continue
            readings.append(Reading(reading.node, found[1]))
        if not readings:
            return None
        match = self._wholes.of(index, op, readings)
        return replace(match, sources=(taken[0],), ops=(op.index,), same=taken[0])

    def _moved(self, op: Op, labels: torch.Tensor) -> torch.Tensor:
        """What an op that only holds its input in another way does to it."""
        if op.name != "TRANSPOSE":
            return labels
        axes = self._tensor(op.inputs[1])
        if not axes.is_constant:
            return labels
        return labels.permute(self._values(axes.index).tolist())

    def _by_value(
        self, op: Op, index: int, sources: tuple[int, ...], ops: tuple[int, ...], state: _State
    ) -> Match | None:
        file = self._values(index)
        heavy, hybrid, noise = self._heavy(ops), self._is_hybrid(op), self._noise(op)
        near: list[Near] = []
        for reached in self._candidates(op, sources, heavy, state):
            if not isinstance(reached.value, torch.Tensor) or (heavy and not reached.heavy):
                continue
            if reached.value.numel() != file.numel():
                continue
            value = clipped(self._tensor(index), reached.value)
            kept = self._kept_view(op, ops, reached, state)
            if kept is not None:
                found: tuple[float, View] | None = (distance(kept.read(file), value), kept)
            else:
                found = best_view(file, value, self._laid_out(op, file, value, sources, state))
            if found and is_near(found[0], self._tensor(index), value, hybrid=hybrid, noise=noise):
                near.append((found[0], reached, found[1]))
        if not near:
            return None
        chosen, near = self._chooser.choose(op, index, near, sources, ops, state.matches)
        _, reached, view = chosen
        match = self._wholes.of(index, op, [Reading(reached.node, view)])
        match = self._with_doubles(match, reached.node, [(e[1].node, e[2]) for e in near])
        return replace(match, sources=sources, ops=ops)

    def _noise(self, op: Op) -> float:
        """What float32 leaves of a mean that is 0: that of what a normalisation gives, say."""
        if op.name != "MEAN":
            return 0.0
        return 2.0**-22 * float(self._values(op.inputs[0]).abs().max())

    def _with_doubles(self, match: Match, chosen: Node, near: Iterable[tuple[Node, View]]) -> Match:
        """
        Take in other nodes that make the same of the same values, quantized on the way or not.

        So a mean is there twice, quantized for its own sake and not in a variance.
        """
        readings = {reading.node: reading for reading in match.readings}
        for node, view in near:
            if node not in readings and _is_same_call(node, chosen):
                others = self._wholes.of(match.tensor, match.op, [Reading(node, view)]).readings
                readings |= {each.node: each for each in others}
        if len(readings) == len(match.readings) or any(base_name(n) in CLAMPS for n in readings):
            return match
        ordered = sorted(readings.values(), key=lambda each: self._reference.order(each.node))
        return replace(match, readings=tuple(ordered))

    def _kept_view(
        self, op: Op, ops: tuple[int, ...], reached: Reached, state: _State
    ) -> View | None:
        """
        How what an elementwise op gives must read: as what it takes does.

        Where a constant makes most of a value (a mask), it may be nearer when turned.
        """
        if op.name not in _ELEMENTWISE or ops != (op.index,):
            return None
        node, shape = self._reference.computing(reached.node), tuple(reached.value.shape)
        file = self._tensor(op.outputs[0]).shape
        views = {
            reading.view
            for index in op.inputs
            if index in state.matches and self._tensor(index).shape == file
            for reading in state.matches[index].readings
            if reading.node in node.all_input_nodes and reading.view.shape == shape
        }
        return views.pop() if len(views) == 1 else None

    def _candidates(
        self, op: Op, sources: tuple[int, ...], heavy: int, state: _State
    ) -> list[Reached]:
        """What can be computed from all of the sources."""
        # With weights of its own, what is behind it is this op's alone.
        constants = any(stored_constant(self._subgraph, i) is not None for i in op.inputs)
        key = (sources, heavy, op.index if constants and op.name not in IDENTITIES else -1)
        if key not in self._reached:
            given: dict[Node, Any] = {}
            bits: dict[Node, int] = {}
            for position, source in enumerate(sources):
                file = self._values(source)
                for reading in state.matches[source].readings:
                    given[reading.node] = typed(reading.node, reading.view.read(file))
                    bits[reading.node] = bits.get(reading.node, 0) | 1 << position
            weights = self._weights(op, given) if key[2] >= 0 else {}
            # A constant may only look like what torch computes others of.
            own = [i for i, each in enumerate(sources) if each not in self._starts]
            every = sum(1 << i for i in own or range(len(sources)))
            while len(self._reached) >= _KEPT:
                del self._reached[next(iter(self._reached))]
            self._reached[key] = [
                reached
                for reached in self._reference.reach(given, bits, heavy, weights)
                if reached.sources & every == every
            ]
        return self._reached[key]

    def _heavy(self, ops: Iterable[int]) -> int:
        return sum(self._subgraph.ops[index].name in HEAVY_OPS for index in ops)

    def _laid_out(
        self,
        op: Op,
        file: torch.Tensor,
        value: torch.Tensor,
        sources: Sequence[int],
        state: _State,
    ) -> list[View]:
        """The layout that the op always has, or those of its sources as far as they fit."""
        if op.name in _CHANNELS_LAST:
            return _channels_last(file, value)
        views = []
        for source in sources:
            axes = state.matches[source].last.view.axes
            if axes is None or len(axes) != file.ndim:
                continue
            if _long(file.shape[axis] for axis in axes) == _long(value.shape):
                views.append(View(axes, tuple(value.shape)))
        return views

    def _tensor(self, index: int) -> Tensor:
        return self._subgraph.tensors[index]

    def _is_hybrid(self, op: Op) -> bool:
        """Whether the kernel rounds its own input: float activations on integer weights."""
        return op.name in HEAVY_OPS and any(
            i >= 0 and self._tensor(i).is_quantized for i in op.inputs[1:2]
        )

    def _dead(self, state: _State) -> list[Op]:
        """Ops whose result reaches no matched tensor."""
        covered = {index for match in state.matches.values() for index in match.ops}
        return [
            op
            for op in self._subgraph.ops
            if op.index not in covered and any(index in state.pending for index in op.outputs)
        ]

    def _force(self, dead: Sequence[Op], state: _State) -> int | None:
        """Match the first op that can be told by its kind; gives its index."""
        for op in dead:
            for index in op.outputs:
                pending = state.pending.get(index)
                if pending is None:
                    continue
                match = self._by_kind(op, index, pending, state)
                if match is not None:
                    del state.pending[index]
                    state.matches[index] = match
                    return op.index
        return None

    def _at_once(self, op: Op, index: int, pending: _Pending, state: _State) -> Match | None:
        """Match what stands for one node alone: what gives something else is no part of more."""
        if op.name in HEAVY_OPS or op.name in _WHOLE:
            return self._by_kind(op, index, pending, state)
        twins, relatives = TWINS.get(op.name, ()), kin(op.name)
        if not (twins or relatives) or pending.ops != (op.index,):
            return None
        taken = {reading.node for i in pending.sources for reading in state.matches[i].readings}
        users = {user for node in taken for user in node.users} - taken
        # Where nothing else is made of what it takes, or nothing of both, it is what this node is.
        alone = len(pending.sources) > 1 or len(users) == 1
        for reached in self._candidates(op, pending.sources, 0, state):
            varying = [n for n in reached.node.all_input_nodes if self._reference.varies(n)]
            before = (
                n.all_input_nodes if changes_nothing(self._reference, n) else () for n in varying
            )
            if not all(
                n in taken or not taken.isdisjoint(each)
                for n, each in zip(varying, before, strict=True)
            ):
                continue
            if base_name(reached.node) in twins:
                return self._by_kind(op, index, pending, state)
            if alone and base_name(reached.node) in relatives:
                return self._by_kind(op, index, pending, state, base_name(reached.node))
        return None

    def _broken_behind(self, ops: Iterable[int]) -> bool:
        """Whether one of these ops gives another shape than torch: nothing is to be held to it."""
        return any(index in self.broken for index in ops)

    def _by_kind(
        self, op: Op, index: int, pending: _Pending, state: _State, relative: str = ""
    ) -> Match | None:
        if op.name in IDENTITIES or self._broken_behind(pending.ops):
            return None
        file, heavy = self._values(index), self._heavy(pending.ops)
        module = self._module_of(op)
        best: tuple[tuple[Any, ...], Reached, View] | None = None
        others: list[Reached] = []
        for reached in self._candidates(op, pending.sources, heavy, state):
            value = reached.value
            if not isinstance(value, torch.Tensor) or reached.heavy != heavy:
                continue
            kind = self._reference.kind(reached.node)
            if not (fits(op.name, kind) or kind == relative):
                continue
            if value.numel() != file.numel():
                others.append(reached)
                continue
            # Values that are wrong tell no layout: it is that of what the op takes, if it fits.
            kept = self._kept_view(op, pending.ops, reached, state)
            laid_out = [kept] if kept else self._laid_out(op, file, value, pending.sources, state)
            found = best_view(file, clipped(self._tensor(index), value), laid_out)
            if found is None:
                continue
            if laid_out:
                found = (distance(laid_out[0].read(file), value), laid_out[0])
            elsewhere = module is not None and module_of(reached.node) != module
            rank = (elsewhere, found[0], self._reference.order(reached.node))
            if best is None or rank < best[0]:
                best = (rank, reached, found[1])
        if best is None:
            if (
                others
                and not self._consumed_as_part(index, pending)
                and self._is_alone(op, pending, state)
            ):
                self.broken[op.index] = (
                    f"its output is {list(file.shape)}, where {others[0].node.name} gives "
                    f"{list(others[0].value.shape)}"
                )
            return None
        _, reached, view = best
        match = self._wholes.of(index, op, [Reading(reached.node, view)])
        return replace(match, sources=pending.sources, ops=pending.ops, forced=True)

    def _is_alone(self, op: Op, pending: _Pending, state: _State) -> bool:
        """Whether all that an op takes is sound: else what stands before it has another shape."""
        before = (self._subgraph.ops[i] for i in pending.ops if i != op.index)
        return all(each.name in _IN_FRONT for each in before) and not any(
            state.matches[index].forced for index in pending.sources
        )

    def _consumed_as_part(self, index: int, pending: _Pending) -> bool:
        """Whether the op may be one of several that make a node together, such as a group's."""
        ops = self._subgraph.ops
        split = any(ops[i].name in ("SPLIT", "SPLIT_V", "SLICE", "GATHER") for i in pending.ops)
        takers = self._subgraph.consumers[index]
        joined = any(op.name in ("CONCATENATION", "PACK") for op in takers)
        return split or joined


# Sets of candidates whose values are kept for the next ops, which often take the same.
_KEPT = 4

# Ops whose kernels hold channels last.
_CHANNELS_LAST = {
    *("CONV_2D", "DEPTHWISE_CONV_2D", "TRANSPOSE_CONV", "MAX_POOL_2D", "AVERAGE_POOL_2D"),
    *("RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR"),
}

# Ops that leave every element where it is.
_ELEMENTWISE = {
    *("ADD", "SUB", "MUL", "DIV", "MAXIMUM", "MINIMUM", "SQUARED_DIFFERENCE", *ACTIVATIONS),
    *("LOGISTIC", "TANH", "EXP", "SQRT", "RSQRT", "ABS", "NEG", "ELU", "GELU", "HARD_SWISH"),
    *("LEAKY_RELU", "PRELU", "LOG", "SIN", "COS", "SQUARE"),
}

# Ops that stand for one node alone. One that gives something else is wrong, not a part of more.
_WHOLE = {
    *("MAX_POOL_2D", "AVERAGE_POOL_2D", "CONCATENATION", "SOFTMAX", "EMBEDDING_LOOKUP"),
    *("RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR"),
}

# Ops that only lay out what another one takes.
_IN_FRONT = {*IDENTITIES, "PAD", "PADV2"}

# Further forced matches than this show that the two are different models.
_FORCED = 24


def _channels_last(file: torch.Tensor, value: torch.Tensor) -> list[View]:
    """How images with channels last read as torch has them, where they fit."""
    if file.ndim != 4:
        return []
    view = View((0, 3, 1, 2), tuple(value.shape))
    fits = _long(file.shape[axis] for axis in (0, 3, 1, 2)) == _long(value.shape)
    return [view] if fits else []


def _is_same_call(one: Node, other: Node) -> bool:
    """Whether two nodes compute the same of the same, up to quantize nodes in front."""
    if one.op != "call_function" or one.target != other.target or is_quantize(one):
        return False
    if is_dequantize(one):
        return False
    first, second = (_told(node) for node in (one, other))
    return first == second


def _told(node: Node) -> str:
    """A node's arguments as text, where 1 and 1.0 are two, without quantize nodes."""

    def bare(argument: Node) -> Node:
        while is_quantize(argument) or is_dequantize(argument):
            argument = argument.all_input_nodes[0]
        return argument

    return repr((map_arg(node.args, bare), map_arg(node.kwargs, bare)))


def _long(shape: Iterable[int]) -> list[int]:
    return [size for size in shape if size != 1]
